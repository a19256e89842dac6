"""Resources released by record, sockets at deep paths, and waiting that is not broken off."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import HostFault, StoreFull
from agentenv.proc import start_time
from agentenv.records.database import Database
from agentenv.records.ledger import Entry, Ledger
from agentenv.vmm import namespace, sockets
from agentenv.vmm.cgroup import Cgroups
from agentenv.vmm.resources import TOKEN, Resources
from agentenv.vmm.settle import settled


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    database = Database(tmp_path / "aenv.db")
    yield Ledger(database)
    database.close()


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    path = tmp_path / "machines"
    path.mkdir()
    return path


@pytest.fixture
def resources(ledger: Ledger, machines: Path) -> Resources:
    return Resources(ledger, Cgroups([], "not used here"), (machines,))


async def test_a_directory_is_recorded_made_and_released(
    resources: Resources, ledger: Ledger, machines: Path
) -> None:
    entry = resources.make_directory("m1", machines / "m1")
    assert (entry.kind, entry.name) == ("directory", str(machines / "m1"))
    assert (machines / "m1").stat().st_mode & 0o777 == 0o700
    (machines / "m1" / "disk").write_bytes(b"x")
    await resources.release_all("m1")
    assert list(machines.iterdir()) == []
    assert ledger.entries() == []
    await resources.release_all("m1")  # once more is fine


async def test_a_full_disk_gets_room_before_it_is_written_to(
    resources: Resources, ledger: Ledger, machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike, disk = ledger.strike, machines / "m1" / "disk"

    def needs_room(entry: Entry) -> None:
        if disk.exists():
            raise StoreFull("no space for the record")
        strike(entry)

    monkeypatch.setattr(ledger, "strike", needs_room)
    resources.make_directory("m1", machines / "m1")
    disk.write_bytes(b"x")
    resources.record_process("m1", "token-of-none")
    await resources.release_all("m1")
    assert ledger.entries() == []


async def test_nothing_outside_of_the_machines_directories_is_removed(
    resources: Resources, ledger: Ledger, machines: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    with pytest.raises(HostFault, match="not a machine's directory"):
        resources.make_directory("m1", precious)
    for path in (precious, machines / ".." / "precious", machines, machines / "m1" / "deeper"):
        entry = ledger.record("m1", "directory", str(path), room="vmm")
        with pytest.raises(HostFault, match="not a machine's directory"):
            await resources.release_all("m1")
        ledger.strike(entry)
    assert precious.is_dir()


async def test_what_others_recorded_is_left_alone(
    resources: Resources, ledger: Ledger, machines: Path
) -> None:
    ledger.record("m1", "slot", "aenv0-1")
    theirs = ledger.record("m1", "directory", "/somewhere/else")
    resources.make_directory("m1", machines / "m1")
    await resources.release_all("m1")
    assert [entry.kind for entry in ledger.entries()] == ["slot", "directory"]
    assert theirs in ledger.entries()


async def test_a_process_whose_pid_was_not_recorded_is_found_by_its_token(
    resources: Resources, ledger: Ledger
) -> None:
    resources.record_process("m1", "token-of-a-test")
    assert resources.process("m1") is None
    with subprocess.Popen(["sleep", "60"], env={TOKEN: "token-of-a-test", "PATH": os.defpath}) as child:
        async with asyncio.timeout(20):
            while (found := resources.process("m1")) is None:  # until it has executed `sleep`
                await asyncio.sleep(0.001)
        assert found.pid == child.pid
        found.release()
        await resources.release_all("m1")
        child.wait(20)
    assert ledger.entries() == []


async def test_a_recorded_pid_that_is_another_process_now_is_not_touched(
    resources: Resources, ledger: Ledger
) -> None:
    with subprocess.Popen(["sleep", "60"]) as innocent:
        started = start_time(innocent.pid)
        assert started is not None
        entry = resources.record_process("m1", "token-of-another")
        ledger.amend(entry, pid=innocent.pid, start=started - 1)
        assert resources.process("m1") is None
        await resources.release_all("m1")
        assert innocent.poll() is None
        innocent.kill()
    assert ledger.entries() == []


@pytest.mark.parametrize("depth", [1, 40])
def test_sockets_work_at_paths_of_any_length(tmp_path: Path, depth: int) -> None:
    directory = tmp_path.joinpath(*["deep"] * depth)
    directory.mkdir(parents=True)
    server = sockets.listen(directory / "qmp")
    client = sockets.connect(directory / "qmp")
    accepted, _ = server.accept()
    client.send(b"hello")
    assert accepted.recv(10) == b"hello"
    assert (directory / "qmp").stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="in use"):
        sockets.listen(directory / "qmp")
    for one in (server, client, accepted):
        one.close()
    with pytest.raises(ConnectionRefusedError):
        sockets.connect(directory / "qmp")


async def test_settled_work_is_finished_before_the_cancellation_is_delivered() -> None:
    begun, gate = asyncio.Event(), asyncio.Event()
    steps: list[str] = []

    async def work() -> int:
        begun.set()
        await gate.wait()
        steps.append("finished")
        return 7

    task = asyncio.create_task(settled(work()))
    await begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["finished"]
    assert await settled(work()) == 7


async def test_settled_work_that_fails_says_so() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await settled(work())


def test_inside_a_namespace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        namespace.inside(tmp_path / "none", lambda: None)


@pytest.mark.skipif(os.geteuid() != 0, reason="entering a namespace needs root")
def test_inside_a_namespace_only_the_call_is() -> None:
    here = os.readlink("/proc/self/ns/net")
    with subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        path = Path(f"/proc/{holder.pid}/ns/net")
        seen = namespace.inside(path, lambda: os.readlink("/proc/thread-self/ns/net"))
        assert seen == os.readlink(path) != here
        assert os.readlink("/proc/self/ns/net") == os.readlink("/proc/thread-self/ns/net") == here
        with pytest.raises(OSError, match="no such tap"):
            namespace.inside(path, lambda: namespace.open_tap("tap0"))
        holder.communicate(b"\n")
