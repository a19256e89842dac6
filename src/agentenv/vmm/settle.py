"""Waiting for something that must be finished whatever happens to the one who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def settled(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which runs to its end although the caller is cancelled meanwhile.

    The cancellation is delivered afterwards, unless the work failed: then its failure is.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
        except Exception:  # raised below, by result()
            break
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result
