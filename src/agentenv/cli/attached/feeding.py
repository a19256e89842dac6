"""What is typed or piped here, sent to a process in a sandbox.

One thread reads and one sends, so that keys are looked at even while the process reads nothing. Both may
stand still in a system call for ever, so they are daemons.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from contextlib import closing

from agentenv.cli.attached.processes import Hand
from agentenv.cli.attached.terminal import DetachKeys
from agentenv.cli.attached.wire import LineBroken
from agentenv.errors import AenvError

READ = 256 * 1024
MOST = 1 << 20  # bytes that are sent at a time
PIECES = 8  # of piped input that wait to be sent
HOLD_S = 1.0  # how long what may begin the detach keys waits for the rest


def feed_pipe(hand: Hand, given: int) -> None:
    """Begin to send what comes from a pipe or file, and its end; `hand` is the sending thread's."""
    pieces: queue.Queue[bytes | None] = queue.Queue(PIECES)

    def read() -> None:
        while data := _read(given):
            pieces.put(data)
        pieces.put(None)

    _begin("input", lambda: _send(hand, pieces, lossy=False))
    _begin("keys", read)


def feed_keys(
    hand: Hand, given: int, keys: DetachKeys, typed: Callable[[bytes], bytes], on_end: Callable[[], None]
) -> None:
    """Begin to send what is typed; `hand` is the sending thread's.

    Args:
        hand: of a process in a terminal.
        given: the terminal here.
        keys: what ends it: it is looked for before `typed` is told.
        typed: takes what was typed and says what of it is to be sent.
        on_end: called when the keys were found, or the terminal is gone.
    """
    pieces: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        while not keys.found:
            if select.select([given], [], [], HOLD_S if keys.holding else None)[0]:
                if not (data := _read(given)):
                    break
                data = keys.feed(data)
            else:
                data = keys.release()
            if data and (data := typed(data)):
                pieces.put(data)
        on_end()

    _begin("input", lambda: _send(hand, pieces, lossy=True))
    _begin("keys", read)


def _send(hand: Hand, pieces: queue.Queue[bytes | None], *, lossy: bool) -> None:
    """Send pieces until they end, and let the hand go; what could not be delivered is left out if `lossy`,
    else it is the end."""
    with closing(hand):
        ended = False
        while not ended and (data := pieces.get()) is not None:
            data, ended = _more(data, pieces)
            try:
                hand.write(data)
            except LineBroken:
                if not lossy:
                    return  # the events of the process have broken too, and are looked after
            except AenvError:
                return  # it has ended, or reads no more
        try:
            hand.end_input()
        except AenvError:
            pass  # it has ended


def _more(first: bytes, pieces: queue.Queue[bytes | None]) -> tuple[bytes, bool]:
    """What is there to be sent at once, and whether it is the last."""
    found, size = [first], len(first)
    while size < MOST and not pieces.empty():
        if (piece := pieces.get()) is None:
            return b"".join(found), True
        found.append(piece)
        size += len(piece)
    return b"".join(found), False


def _read(given: int) -> bytes:
    try:
        return os.read(given, READ)
    except OSError:  # a terminal that is gone
        return b""


def _begin(name: str, target: Callable[[], None]) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()
