"""The Python client on a real node, with calls of E2B's class in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2b import NotFoundException, SandboxNotFoundException

from agentenv import AsyncSandbox, DiskLimits, Limits, NetworkLimits, Sandbox

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit", "e2b_environment")]

LIMITS = Limits(NetworkLimits(tx_bytes_per_second=1 << 20), DiskLimits(iops=1000, burst_operations=2000))


@pytest.fixture
def sandbox(e2b_environment: None) -> Iterator[Sandbox]:
    with Sandbox.create("base", timeout=300, envs={"ALL": "1"}, limits=LIMITS) as made:
        yield made


def test_a_search_in_a_sandbox_branches_and_goes_back(sandbox: Sandbox) -> None:
    assert sandbox.get_limits() == LIMITS
    sandbox.set_limits(Limits())
    assert sandbox.get_limits() == Limits()

    sandbox.files.write("state", "before")
    point = sandbox.create_snapshot()
    sandbox.files.write("state", "after")
    forked = sandbox.fork(envs=[{"BRANCH": "0"}, {"BRANCH": "1"}], metadata={"job": "search"}, timeout=120)
    children = [each for each in forked if isinstance(each, Sandbox)]
    assert len(children) == 2, forked
    for number, child in enumerate(children):
        with child:
            assert child.commands.run('echo "$ALL $BRANCH $(cat state)"').stdout == f"1 {number} after\n"
            assert child.get_info().metadata == {"job": "search"}
            assert [each.name for each in child.operations()] == ["create"]

    assert sandbox.rollback(point.snapshot_id) is sandbox
    assert sandbox.commands.run("cat state").stdout == "before"
    tree = sandbox.tree()
    assert [(branch.snapshot.snapshot_id, branch.branches) for branch in tree.branches] == [
        (point.snapshot_id, ())
    ]
    assert (tree.snapshot_id, tree.start_id) == (point.snapshot_id, Sandbox.lineage(point.snapshot_id).parent)
    done = sandbox.operations()
    assert [each.name for each in done] == ["create", "checkpoint", "fork", "rollback"]
    for each in done:
        assert each.seconds > 0
        assert all(0 <= phase.begun_s <= each.seconds and not phase.failed for phase in each.phases)
    assert "capture" in [phase.name for phase in done[1].phases]

    with pytest.raises(NotFoundException, match="nothere"):
        sandbox.rollback("nothere")
    with pytest.raises(NotFoundException, match="nothere"):
        Sandbox.lineage("nothere")
    Sandbox.delete_snapshot(point.snapshot_id)


async def test_the_same_awaited(e2b_environment: None) -> None:
    started = await AsyncSandbox.start_many("base", envs=[{"N": "0"}, {"N": "1"}], timeout=120)
    made = [each for each in started if isinstance(each, AsyncSandbox)]
    assert len(made) == 2, started
    for number, sandbox in enumerate(made):
        assert (await sandbox.commands.run("echo $N")).stdout == f"{number}\n"
    first, second = made
    await second.kill()
    with pytest.raises(NotFoundException):
        await second.rollback()
    with pytest.raises(SandboxNotFoundException):
        await second.tree()

    [child] = await AsyncSandbox.fork(first.sandbox_id, timeout=120, envs={"CHILD": "yes"})
    assert isinstance(child, AsyncSandbox)
    assert (await child.commands.run("echo $N $CHILD")).stdout == "0 yes\n"
    await child.set_limits(LIMITS)
    assert await child.get_limits() == LIMITS
    await child.give_back_memory()
    assert (await child.operations())[-1].name == "refresh"
    assert await child.rollback() is child
    assert (await child.tree()).branches == ()
    await child.kill()
    await first.kill()
