"""Commands in the process of the test, as they answer."""

from __future__ import annotations

from collections.abc import Callable

from agentenv.errors import AenvError

KEY = "e2b_0123456789abcdef"
Aenv = Callable[..., "Said"]


class Said(str):
    """What a command printed; `code` is its exit code, `told` what it said on stderr, `error` the error that
    it ended with."""

    code: int
    told: str
    error: AenvError | None


def started(aenv: Aenv, *options: str) -> str:
    return aenv("start", "base", "-d", *options).strip()
