"""Signals of this process, handed over to a thread that may take its time with them."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

TICK_S = 20.0


@contextmanager
def caught(
    numbers: Iterable[int], deliver: Callable[[int], None], tick: Callable[[], None] | None = None
) -> Iterator[None]:
    """Have these signals delivered one by one, by another thread, within the block.

    Args:
        numbers: which.
        deliver: takes a signal's number.
        tick: called by that thread now and then, every `TICK_S`.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=_deliver, args=(reading, deliver, tick), name="signals", daemon=True)
    wanted = frozenset(map(int, numbers))
    before = {number: signal.signal(number, lambda *_: None) for number in wanted}
    old = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(writing)  # the thread ends at that; it may be in the midst of something, so nobody waits


def _deliver(reading: int, deliver: Callable[[int], None], tick: Callable[[], None] | None) -> None:
    try:
        while True:
            if not select.select([reading], [], [], TICK_S if tick else None)[0]:
                if tick is not None:
                    tick()
                continue
            numbers = os.read(reading, 64)
            if not numbers:
                return
            for number in dict.fromkeys(numbers):  # several of one kind are one
                deliver(number)
    finally:
        os.close(reading)
