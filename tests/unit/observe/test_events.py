"""The history of events and its followers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentenv.errors import CapacityExceeded
from agentenv.observe.events import PENDING_MOST, Events, Filter, Follower
from agentenv.sandbox.observing import Change, Happening
from agentenv.sandbox.records import Origin, Sandbox
from agentenv.sandbox.requests import Stopping
from agentenv.sandbox.service import Sandboxes
from agentenv.sandbox.transitions import State
from agentenv.template.records import Build, Reason
from agentenv.template.states import BuildState
from support.sandbox_parts import prepared, wanted


def happen(events: Events, sandbox: str = "i1", change: Change = Change.CREATED) -> None:
    record = Sandbox(sandbox, State.RUNNING, Origin("t", "base", "b"), 0.0, 1.0, 1, 1, 512, 1024)
    events.happened(Happening(change, record, 1.0))


async def numbers(follower: Follower) -> list[int]:
    return [event.number for event in await follower.read()]


async def test_who_follows_gets_what_happens_from_then_on() -> None:
    events = Events()
    happen(events)
    follower = events.follow(Filter())
    reading = asyncio.create_task(follower.read())
    await asyncio.sleep(0)
    assert not reading.done()
    happen(events)
    happen(events)
    assert [event.number for event in await reading] == [1, 2]
    assert not follower.lost


async def test_who_comes_again_misses_nothing_that_is_known() -> None:
    events = Events(keep=4)
    for _ in range(6):
        happen(events)
    ids = {event.number: event.id for event in events.newest_first()}
    assert sorted(ids) == [2, 3, 4, 5]
    again = events.follow(Filter(), ids[3])
    assert (await numbers(again), again.lost) == ([4, 5], False)
    assert not events.follow(Filter(), ids[5]).lost
    assert not events.follow(Filter(), f"{events.life}-1").lost
    late = events.follow(Filter(), f"{events.life}-0")
    assert (await numbers(late), late.lost) == ([2, 3, 4, 5], True)


@pytest.mark.parametrize("told", ["", "nonsense", "0123-1", "{life}-x", "{life}-99", "{life}-" + "9" * 400])
async def test_an_id_that_is_not_known_is_a_loss(told: str) -> None:
    events = Events()
    happen(events)
    follower = events.follow(Filter(), told.replace("{life}", events.life))
    assert follower.lost == bool(told)


async def test_what_a_node_finds_at_its_start_is_an_event(tmp_path: Path) -> None:
    async with prepared(tmp_path) as node:
        gone = (await node.service.create(wanted())).sandbox
        node.hypervisor.machines.clear()
        watched: list[Events] = []

        def watch(service: Sandboxes) -> None:
            watched.append(Events())
            service.observe(watched[0])

        await node.restart(watch)
        [event] = watched[0].newest_first()
    assert (event.kind, event.sandbox_id) == ("failed", gone.id)
    assert "gone when the node started again" in event.detail["reason"]


async def test_filters() -> None:
    events = Events()
    one = events.follow(Filter(sandboxes=frozenset({"i2"})))
    kinds = events.follow(Filter(kinds=frozenset({"paused", "build_failed"})))
    happen(events)
    happen(events, "i2")
    happen(events, "i1", Change.PAUSED)
    events.built(Build("b2", "t", BuildState.WAITING, 1.0, 1.0))
    events.built(Build("b2", "t", BuildState.ERROR, 1.0, 2.0, reason=Reason("no such image")))
    assert await numbers(one) == [1]
    [paused, failed] = await kinds.read()
    assert (paused.kind, failed.kind, failed.detail) == (
        "paused",
        "build_failed",
        {"reason": "no such image"},
    )


async def test_who_is_too_slow_is_cut_and_costs_the_others_nothing() -> None:
    events = Events()
    slow, quick = events.follow(Filter()), events.follow(Filter())
    seen = 0
    for _ in range(PENDING_MOST + 1):
        happen(events)
        seen += len(await quick.read())
    assert slow.cut and slow.closed.is_set()
    assert await slow.read() == []
    assert seen == PENDING_MOST + 1 and not quick.cut


async def test_there_are_so_many_followers_and_no_more() -> None:
    events = Events(followers=1)
    first = events.follow(Filter())
    with pytest.raises(CapacityExceeded):
        events.follow(Filter())
    events.leave(first)
    second = events.follow(Filter())
    events.close()
    assert second.closed.is_set()
    with pytest.raises(Stopping):
        events.follow(Filter())
    assert await second.read() == []
