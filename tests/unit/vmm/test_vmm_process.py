"""Processes told from each other, watched and killed; with real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.proc import start_time
from agentenv.records.ledger import host_boot_id
from agentenv.vmm import process
from agentenv.vmm.output import BoundedOutput
from agentenv.vmm.process import Identity, identify, spawn, watch


@pytest.fixture
def output() -> Iterator[BoundedOutput]:
    made = BoundedOutput.create("test", 4096)
    yield made
    made.close()


@pytest.fixture
def start(output: BoundedOutput) -> Iterator[Callable[..., Identity]]:
    started: list[Identity] = []

    def run(*argv: str, descriptors: tuple[int, ...] = (), **environment: str) -> Identity:
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            variables = {"PATH": os.defpath, **environment}
            with ThreadPoolExecutor(1) as thread:
                begun = thread.submit(
                    spawn, argv, variables, descriptors, nothing=nothing, output=output.descriptor
                )
            pid = begun.result()
        finally:
            os.close(nothing)
        started.append(identify(pid))
        return started[-1]

    yield run
    for identity in started:
        if start_time(identity.pid) == identity.start:
            os.kill(identity.pid, signal.SIGKILL)
            try:
                os.waitpid(identity.pid, 0)
            except ChildProcessError:
                pass  # waited for by the test


def stranger() -> Identity:
    """A running process that is not this one's child."""
    command = "sleep 60 >/dev/null & echo $!"
    printed = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=True).stdout
    started = start_time(int(printed))
    assert started is not None
    return Identity(int(printed), started, host_boot_id())


@pytest.mark.parametrize(("command", "status"), [("exit 7", 7), ("exit 0", 0), ("kill -9 $$", -9)])
async def test_the_status_of_a_child_is_known_to_all_who_wait(
    start: Callable[..., Identity], command: str, status: int
) -> None:
    running = watch(start("sh", "-c", command))
    assert running is not None
    assert tuple(await asyncio.gather(running.wait(), running.wait())) == (status, status)
    assert running.exited
    assert await running.wait() == status
    running.kill()  # no effect, and never another process's harm
    running.release()


async def test_a_stranger_is_watched_and_killed_though_its_status_is_not_ours() -> None:
    running = watch(stranger())
    assert running is not None
    assert not running.exited
    running.kill()
    assert await running.wait() is None
    assert watch(running.identity) is None or await_reaped(running.identity.pid)


def await_reaped(pid: int) -> bool:
    """A zombie that its parent has not waited for yet is still the same process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


async def test_another_start_time_or_boot_is_another_process(start: Callable[..., Identity]) -> None:
    identity = start("sleep", "60")
    for other in (replace(identity, start=identity.start + 1), replace(identity, boot_id="earlier")):
        assert watch(other) is None
    running = watch(identity)
    assert running is not None
    running.kill()
    assert await running.wait() == -9
    assert watch(identity) is None


async def test_released_processes_go_on(start: Callable[..., Identity]) -> None:
    identity = start("sleep", "60")
    running = watch(identity)
    assert running is not None
    running.release()
    running.release()
    assert not running.exited
    assert start_time(identity.pid) == identity.start


async def test_a_child_gets_a_session_an_empty_input_and_only_the_descriptors_meant(
    start: Callable[..., Identity], output: BoundedOutput
) -> None:
    kept, dropped = os.pipe()
    os.set_inheritable(dropped, True)
    try:
        command = (
            "cat; for f in /proc/self/fd/*; do readlink $f; done; cut -d' ' -f6 /proc/self/stat; pwd; env"
        )
        identity = start("sh", "-c", command, descriptors=(kept,), MARK="here")
        running = watch(identity)
        assert running is not None
        assert await running.wait() == 0
        said = output.text().split()
        assert sum(word.startswith("pipe:") for word in said) == 1
        assert str(identity.pid) in said
        assert "/" in said
        assert "MARK=here" in said
        assert not any(word.startswith("HOME=") for word in said)
    finally:
        os.close(kept)
        os.close(dropped)


async def test_a_process_is_found_by_what_is_in_its_environment(start: Callable[..., Identity]) -> None:
    identity = start("sleep", "60", AENV_TEST_TOKEN="7f3a")
    assert process.find("AENV_TEST_TOKEN", "7f3a") == identity
    assert process.find("AENV_TEST_TOKEN", "7f3") is None
    assert process.find("AENV_TEST", "7f3a") is None


async def test_a_process_is_found_while_it_executes_one_program_after_the_other(
    start: Callable[..., Identity],
) -> None:
    chain = "exec " + "env " * 60 + "sleep 60"
    for number in range(5):
        identity = start("sh", "-c", chain, AENV_TEST_TOKEN=f"chain-{number}")
        assert process.find("AENV_TEST_TOKEN", f"chain-{number}") == identity
    assert process.find("AENV_TEST_TOKEN", "chain-5") is None


def test_a_missing_program_is_an_error(start: Callable[..., Identity]) -> None:
    with pytest.raises(FileNotFoundError):
        start("/nowhere/program")


async def test_output_beyond_the_bound_is_refused_and_the_writer_goes_on(
    start: Callable[..., Identity], output: BoundedOutput
) -> None:
    running = watch(
        start("sh", "-c", "echo first; i=0; while [ $i -lt 400 ]; do echo line-$i; i=$((i+1)); done; exit 5")
    )
    assert running is not None
    assert await running.wait() == 5
    assert output.text().startswith("first\nline-0\n")
    assert os.fstat(output.descriptor).st_size == 4096
    assert len(output.text()) <= 4096


async def test_output_can_be_read_from_the_process(
    start: Callable[..., Identity], output: BoundedOutput
) -> None:
    identity = start("sh", "-c", "echo only words; exec sleep 60")
    async with asyncio.timeout(20):
        while not output.text():
            await asyncio.sleep(0.001)
    other = BoundedOutput.of_process(identity.pid)
    assert other.text() == "only words\n"
    assert other.last_line() == "only words"
    other.close()
    other.close()
    assert other.text() == other.last_line() == ""
