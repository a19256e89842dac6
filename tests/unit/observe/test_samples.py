"""Figures of sandboxes: from processes and guests, kept within bounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping

import pytest

from agentenv.errors import GuestFault
from agentenv.observe.samples import MIB, Guest, Histories, Sample, cpu_pct, host_guess
from agentenv.observe.sampling import SILENT_S, Sampler
from agentenv.sandbox.observing import Change, Happening, Running
from agentenv.sandbox.records import Origin, Sandbox
from agentenv.sandbox.transitions import State
from agentenv.vmm.usage import Usage, usage_of, usages

SANDBOX = Sandbox("i1", State.RUNNING, Origin("t", "base", "b"), 0.0, 1.0, 1, 2, 512, 1024)
SAID = {
    "mem_total": 500 * MIB,
    "mem_used": 100 * MIB,
    "mem_cache": 50 * MIB,
    "disk_used": 300 * MIB,
    "disk_total": 1000 * MIB,
}


def sample(at: float, used: int = 1) -> Sample:
    return Sample(at, 1.5, 2, used, 10, 3, 4, 20)


def test_a_guest_cannot_have_more_than_its_sandbox() -> None:
    assert Guest.of(SAID, SANDBOX) == (100 * MIB, 500 * MIB, 50 * MIB, 300 * MIB, 1000 * MIB)
    lies = {"mem_total": 2**80, "mem_used": -5, "mem_cache": "much", "disk_used": True, "disk_total": 1.5}
    assert Guest.of(lies, SANDBOX) == (0, 512 * MIB, 0, 0, 1024 * MIB)
    assert Guest.of({}, SANDBOX) == (0, 512 * MIB, 0, 0, 1024 * MIB)


def test_what_the_host_guesses() -> None:
    assert host_guess(SANDBOX, 90 * MIB).mem_used == 90 * MIB
    assert host_guess(SANDBOX, 900 * MIB).mem_used == 512 * MIB


@pytest.mark.parametrize(
    ("seconds", "elapsed", "cpus", "pct"),
    [(1.0, 5.0, 1, 20.0), (1.0, 5.0, 2, 10.0), (9.0, 5.0, 1, 100.0), (1.0, 0.0, 1, 0.0), (-1.0, 5.0, 1, 0.0)],
)
def test_the_share_of_processors(seconds: float, elapsed: float, cpus: int, pct: float) -> None:
    assert cpu_pct(seconds, elapsed, cpus) == pct


def test_a_history_is_bounded_and_gives_back_what_it_got() -> None:
    histories = Histories(keep=3)
    for at in range(5):
        histories.add("i1", sample(at + 0.5))
    assert [each.at for each in histories.of("i1")] == [2.5, 3.5, 4.5]
    assert histories.last("i1") == sample(4.5)
    assert [each.at for each in histories.of("i1", 3, 4)] == [3.5, 4.5]
    assert [each.at for each in histories.of("i1", end=3)] == [2.5, 3.5]
    assert list(histories.of("i2")) == []


def test_histories_of_ended_sandboxes_go_at_last() -> None:
    histories = Histories(ended=1)
    for name in ("i1", "i2"):
        histories.add(name, sample(1.0))
        histories.end(name)
    histories.end("i3")
    assert "i1" not in histories
    assert "i2" in histories


def test_the_usage_of_a_real_process() -> None:
    used = usage_of(os.getpid())
    assert used is not None
    assert 0 < used.own <= used.resident
    assert used.cpu_s > 0
    assert used.own_mib == used.own // MIB
    assert usages([os.getpid(), 2**22 + 1]).keys() == {os.getpid()}


class Host:
    """One sandbox, whose process and guest say what a test wants."""

    def __init__(self) -> None:
        self.running: list[Running] = [Running(SANDBOX, 7, "10.0.0.1", "slot1", False)]
        self.used = {7: Usage(own=80 * MIB, resident=90 * MIB, cpu_s=10.0)}
        self.asked = 0
        self.said: Mapping[str, object] = SAID
        self.silent = False
        self.histories = Histories()
        self.sampler = Sampler(lambda: self.running, self.histories, ask=self.ask, read=self.read)

    def read(self, pids: Iterable[int]) -> Mapping[int, Usage]:
        return {pid: self.used[pid] for pid in pids if pid in self.used}

    async def ask(self, running: Running) -> Mapping[str, object]:
        self.asked += 1
        if self.silent:
            raise GuestFault("no answer")
        return self.said

    @property
    def last(self) -> Sample:
        found = self.histories.last("i1")
        assert found is not None
        return found


@pytest.fixture
def host() -> Host:
    return Host()


async def test_a_new_sandbox_is_asked_and_an_idle_one_is_left_alone(host: Host) -> None:
    await host.sampler.look()
    assert host.asked == 1
    assert host.last[2:] == (2, 100 * MIB, 500 * MIB, 50 * MIB, 300 * MIB, 1000 * MIB)
    await host.sampler.look()
    assert host.asked == 1
    assert host.last.mem_used == 100 * MIB
    host.used[7] = Usage(own=80 * MIB, resident=90 * MIB, cpu_s=20.0)
    host.said = {**SAID, "mem_used": 200 * MIB}
    await host.sampler.look()
    assert host.asked == 2
    assert host.last.mem_used == 200 * MIB


async def test_a_guest_that_does_not_answer_has_figures_all_the_same(host: Host) -> None:
    host.silent = True
    await host.sampler.look()
    assert (host.last.mem_used, host.last.disk_used) == (90 * MIB, 0)


async def test_one_that_does_not_answer_is_left_alone_for_a_while(host: Host) -> None:
    now, host.silent = 100.0, True
    host.sampler = Sampler(
        lambda: host.running, host.histories, ask=host.ask, read=host.read, clock=lambda: now
    )
    for passed, asked in ((0, 1), (5, 1), (SILENT_S, 2)):
        now += passed
        host.used[7] = Usage(own=80 * MIB, resident=90 * MIB, cpu_s=now)  # it computes all the time
        await host.sampler.look()
        assert host.asked == asked


async def test_what_is_young_is_not_taken_again(host: Host) -> None:
    await host.sampler.look_at("i1")
    await host.sampler.look_at("i1")
    await host.sampler.look_at("i2")
    assert host.asked == 1
    assert len(list(host.histories.of("i1"))) == 1


async def test_a_share_is_of_the_time_between_two_samples(host: Host) -> None:
    now = 100.0
    host.sampler = Sampler(
        lambda: host.running, host.histories, ask=host.ask, read=host.read, clock=lambda: now
    )
    await host.sampler.look()
    now, host.used[7] = 105.0, Usage(own=1, resident=1, cpu_s=15.0)
    await host.sampler.look()
    assert host.last.cpu_pct == 50.0
    now, host.used[7] = 105.01, Usage(own=1, resident=1, cpu_s=15.01)
    await host.sampler.look()
    assert host.last.cpu_pct == 50.0  # too short to say anything else


async def test_nothing_is_asked_in_the_midst_of_an_operation(host: Host) -> None:
    host.running = [host.running[0]._replace(busy=True)]
    await host.sampler.look()
    assert host.asked == 0
    assert host.last.mem_used == 90 * MIB


async def test_a_sandbox_that_ends_meanwhile_gets_no_sample(host: Host) -> None:
    answer = asyncio.Event()

    async def ask(running: Running) -> Mapping[str, object]:
        await answer.wait()
        return SAID

    sampler = Sampler(lambda: host.running, host.histories, ask=ask, read=host.read)
    looking = asyncio.create_task(sampler.look_at("i1"))
    await asyncio.sleep(0)
    sampler.happened(Happening(Change.KILLED, SANDBOX, 1.0))
    answer.set()
    await looking
    assert "i1" not in host.histories
