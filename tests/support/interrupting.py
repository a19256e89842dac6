"""Ctrl-C for what a test runs.

What runs in the background of a script, as tests may, has inherited that interrupts are ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Before a command that is to be interrupted.
HEEDING = ("env", "--default-signal=INT")


@contextmanager
def heeding() -> Iterator[None]:
    """Interrupts are no longer ignored here either."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
