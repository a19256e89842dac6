"""The agent's event loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentenv.guest import loop


def test_tasks_take_turns_and_are_joined() -> None:
    seen: list[str] = []

    async def worker(name: str) -> None:
        for _ in range(2):
            seen.append(name)
            await loop.checkpoint()

    async def main() -> None:
        tasks = [loop.spawn(worker("a")), loop.spawn(worker("b"))]
        for task in tasks:
            await task.join()
        assert all(task.done for task in tasks)

    loop.run(main())
    assert seen == ["a", "b", "a", "b"]


def test_timers_fire_in_order_and_can_be_cancelled() -> None:
    seen: list[int] = []

    async def main() -> None:
        loop.call_later(0.02, lambda: seen.append(2))
        loop.call_later(0.01, lambda: seen.append(1))
        timer = loop.call_later(0.015, lambda: seen.append(9))
        timer.cancel()
        timer.cancel()
        assert not timer.pending
        await loop.sleep(0.03)

    loop.run(main())
    assert seen == [1, 2]


def test_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> None:
        for _ in range(10_000):
            loop.call_later(1000, lambda: None).cancel()
        assert len(loop._timers) < 1000
        fired = loop.Event()
        loop.call_later(0, fired.set)
        assert await fired.wait(10)

    loop.run(main())


def test_events() -> None:
    async def main() -> None:
        event = loop.Event()
        assert await event.wait(0.01) is False
        loop.call_later(0.01, event.set)
        assert await event.wait(10) is True
        assert await event.wait(0) is True
        event.clear()
        assert not event.is_set()

    loop.run(main())


@pytest.mark.parametrize(
    "wait", [lambda: loop.sleep(1000), lambda: loop.Event().wait(), lambda: loop.Event().wait(1000)]
)
def test_cancel(wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    seen: list[str] = []

    async def worker() -> None:
        try:
            await wait()
        finally:
            seen.append("cleaned")

    async def main() -> None:
        task = loop.spawn(worker())
        await loop.checkpoint()
        task.cancel()
        await task.join()
        task.cancel()  # nothing left to cancel

    loop.run(main())
    assert seen == ["cleaned"]


def test_a_task_cancelled_before_its_first_step_does_not_run() -> None:
    ran = []

    async def worker() -> None:
        ran.append("step")

    async def main() -> None:
        task = loop.spawn(worker())
        task.cancel()
        await task.join()

    loop.run(main())
    assert ran == []


def test_a_failing_task_is_shown_and_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    async def worker() -> None:
        raise RuntimeError("broken on purpose")

    async def main() -> None:
        await loop.spawn(worker()).join()
        await loop.sleep(0)

    loop.run(main())
    assert "RuntimeError: broken on purpose" in capsys.readouterr().err


def test_descriptors() -> None:
    """Edges: data, and the end; and nothing after unwatch."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    seen: list[bytes] = []

    async def main() -> None:
        ended = loop.Event()

        def on_events(_events: int) -> None:
            try:
                while data := os.read(reading, 100):
                    seen.append(data)
                ended.set()
            except BlockingIOError:
                pass

        loop.watch(reading, on_events)
        os.write(writing, b"a")
        await loop.sleep(0.01)
        os.write(writing, b"b")
        os.close(writing)
        assert await ended.wait(10)
        loop.unwatch(reading)
        loop.unwatch(reading)

    loop.run(main())
    os.close(reading)
    assert seen == [b"a", b"b"]


def test_await_outside_a_task_says_so() -> None:
    with pytest.raises(RuntimeError, match="guest loop"):
        loop.current()
    with pytest.raises(RuntimeError, match="guest loop"):
        loop.watch(0, lambda _events: None)
