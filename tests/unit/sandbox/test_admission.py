"""Promises of a node: counted at once, refused with figures, lent only while nobody needs them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.config import Settings
from agentenv.errors import CapacityExceeded, InvalidRequest
from agentenv.sandbox.admission import (
    OVERHEAD_MIB,
    STARTING_MIB,
    Admission,
    Budget,
    Free,
    Need,
    host_free,
    host_memory_mib,
)

PLENTY = Free(1 << 20, 1 << 20)
ONE = Need.running(vcpus=1, memory_mib=512, disk_mib=2048)


def admission(total: Need, free: Free = PLENTY, **floors: int) -> Admission:
    return Admission(Budget(total, **floors), lambda: free)


def times(need: Need, count: int) -> Need:
    return sum([need] * count, Need())


async def test_fifty_at_once_on_room_for_ten_give_ten_and_forty_refusals() -> None:
    node = admission(times(ONE, 10))

    async def create(number: int) -> None:
        await asyncio.sleep(0)  # the request's other work: all fifty are under way
        node.reserve(f"i{number}", ONE)
        await asyncio.sleep(0)
        node.commit(f"i{number}")

    results = await asyncio.gather(*(create(number) for number in range(50)), return_exceptions=True)
    refusals = [result for result in results if isinstance(result, CapacityExceeded)]
    assert results.count(None) == 10
    assert len(refusals) == 40
    assert {refusal.status for refusal in refusals} == {503}
    assert all(refusal.retry and refusal.retry_after for refusal in refusals)
    assert node.promised == times(ONE, 10)
    node.release("i0")
    node.reserve("another", ONE)


def test_a_refusal_says_what_there_is_and_what_is_missing() -> None:
    node = admission(Need(2000, 100_000, 8, 100))
    node.reserve("a", Need(1500, 1, 1, 1))
    with pytest.raises(CapacityExceeded) as caught:
        node.reserve("b", Need(600, 1, 1, 1))
    message = str(caught.value)
    assert "1500 of 2000 MiB of memory are promised and it needs 600" in message
    assert "AENV_MEMORY_OVERCOMMIT" in message
    assert node.promised.memory_mib == 1500


@pytest.mark.parametrize("name", ["memory_mib", "disk_mib", "vcpus", "sandboxes"])
def test_every_dimension_counts(name: str) -> None:
    node = admission(Need(**{"memory_mib": 100, "disk_mib": 100, "vcpus": 100, "sandboxes": 100, name: 2}))
    node.reserve("a", Need(1, 1, 1, 1))
    node.reserve("b", Need(1, 1, 1, 1))
    with pytest.raises(CapacityExceeded, match="2 of 2"):
        node.reserve("c", Need(1, 1, 1, 1))


def test_what_never_fits_is_the_callers_mistake() -> None:
    node = admission(Need(1000, 1000, 2, 10))
    with pytest.raises(InvalidRequest, match="4 vcpus, and this node has 2"):
        node.reserve("a", Need(1, 1, 4, 1))
    assert node.promised == Need()


def test_a_paused_sandbox_holds_no_memory_and_needs_it_anew() -> None:
    node = admission(times(ONE, 2))
    node.reserve("a", ONE)
    node.reserve("b", ONE)
    node.reserve("a", Need.paused(disk_mib=2048))
    assert node.promised.memory_mib == 512 + OVERHEAD_MIB
    assert node.promised.sandboxes == 2
    with pytest.raises(CapacityExceeded):  # its place among the sandboxes is taken
        node.reserve("c", ONE)
    node.reserve("a", ONE)
    assert node.promised == times(ONE, 2)


def test_a_refused_change_leaves_what_was_held() -> None:
    node = admission(times(ONE, 2))
    node.reserve("a", Need.paused(disk_mib=2048))
    node.reserve("b", ONE)
    node.adopt("c", Need(ONE.memory_mib, 0, 0, 0))
    with pytest.raises(CapacityExceeded):
        node.reserve("a", ONE)
    assert node.promised == ONE + Need.paused(disk_mib=2048) + Need(ONE.memory_mib)


def test_releasing_twice_frees_once() -> None:
    node = admission(times(ONE, 1))
    node.reserve("a", ONE)
    node.release("a")
    node.release("a")
    assert node.room == ONE


def test_recovery_counts_what_runs_even_beyond_the_budget() -> None:
    node = admission(times(ONE, 2))
    for name in "abc":
        node.adopt(name, ONE)
    assert node.promised == times(ONE, 3)
    with pytest.raises(CapacityExceeded):
        node.reserve("d", ONE)
    node.release("a")
    node.release("b")
    node.reserve("d", ONE)


def test_what_is_lent_gives_way_and_is_asked_back_at_once() -> None:
    node = admission(times(ONE, 3))
    asked: list[Need] = []
    node.on_pressure(lambda: asked.append(node.room))
    node.reserve("a", ONE)
    assert node.lend("p1", ONE)
    assert node.lend("p2", ONE)
    assert not node.lend("p3", ONE)
    assert not asked
    node.reserve("b", ONE)
    assert asked == [times(ONE, 3) - times(ONE, 4)]
    node.release("p1")
    assert node.room == Need()
    node.press()
    assert len(asked) == 1


def test_the_hosts_own_memory_is_looked_at_with_what_is_about_to_start() -> None:
    free = Free(512 + 2 * STARTING_MIB, PLENTY.disk_mib)
    node = admission(times(ONE, 100), free, memory_floor_mib=512)
    node.reserve("a", ONE)
    node.reserve("b", ONE)
    with pytest.raises(CapacityExceeded, match="AENV_MEMORY_FLOOR_MIB"):
        node.reserve("c", ONE)
    node.commit("a")  # it runs, and the host's figures have it
    node.reserve("c", ONE)


def test_pools_give_back_when_the_host_itself_is_short() -> None:
    left = [Free(10_000, PLENTY.disk_mib)]
    node = Admission(Budget(times(ONE, 100), memory_floor_mib=512), lambda: left[0])
    asked: list[int] = []
    node.on_pressure(lambda: asked.append(node.room.memory_mib))
    assert node.lend("p1", ONE)
    left[0] = Free(512 + STARTING_MIB - 1, PLENTY.disk_mib)
    assert not node.lend("p2", ONE)
    node.reserve("a", ONE)  # with what the pool gives back there is enough
    assert asked == [-ONE.memory_mib]


def test_nothing_is_lent_while_memory_is_scarce() -> None:
    node = admission(times(ONE, 100))
    asked: list[int] = []
    node.on_pressure(lambda: asked.append(node.room.memory_mib))
    assert node.lend("p1", ONE)
    node.set_scarce(True)
    assert asked == [-ONE.memory_mib]
    node.release("p1")
    assert not node.lend("p1", ONE)
    node.reserve("a", ONE)  # that is for the host's own figures to refuse
    node.set_scarce(False)
    assert node.lend("p1", ONE)
    assert len(asked) == 1


def test_a_full_filesystem_refuses_before_anything_is_written() -> None:
    node = admission(times(ONE, 100), Free(1 << 20, 1023), disk_floor_mib=1024)
    with pytest.raises(CapacityExceeded, match="1023 MiB left"):
        node.reserve("a", ONE)
    node.reserve("b", Need.paused(disk_mib=10))  # takes nothing that is not there already


def test_the_budget_of_this_host(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, memory_budget_mib=1000, memory_overcommit=2.5, max_sandboxes=7)
    budget = Budget.of(settings)
    assert budget.total.memory_mib == 2500
    assert budget.total.sandboxes == 7
    free = host_free(tmp_path)
    assert 0 < free.memory_mib <= host_memory_mib()
    assert 0 < free.disk_mib < budget.total.disk_mib


@given(st.lists(st.tuples(st.sampled_from(["reserve", "lend", "release", "pause"]), st.integers(0, 5))))
def test_promises_never_exceed_the_budget(steps: list[tuple[str, int]]) -> None:
    node = admission(times(ONE, 3))

    def give_back() -> None:
        for number in range(6):
            node.release(f"p{number}")

    node.on_pressure(give_back)
    for step, number in steps:
        try:
            if step == "reserve":
                node.reserve(f"i{number}", ONE)
            elif step == "lend":
                node.lend(f"p{number}", ONE)
            elif step == "release":
                node.release(f"i{number}")
            else:
                node.reserve(f"i{number}", Need.paused(disk_mib=2048))
        except CapacityExceeded:
            pass
        assert not node.budget.total.short_of(node.promised)
        assert not node.budget.total.short_of(node.promised + node.lent)
