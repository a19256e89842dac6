"""The lookups that sandboxes' rules refused: a bounded record, and a line in the log now and then."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

NAMES = 64  # of each sandbox, the latest
OWNERS = 1024  # sandboxes, those with the latest refusals
LOG_EVERY_S = 10.0  # of each sandbox

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """A name that was not looked up: how often, and when first and last, in seconds since 1970."""

    name: str
    count: int
    first: float
    last: float


@dataclass
class _Own:
    names: OrderedDict[str, Refusal] = field(default_factory=OrderedDict)
    logged: float | None = None
    unsaid: int = 0


class Refusals:
    """What was refused, by sandbox, the latest of each."""

    def __init__(
        self, now: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._monotonic = monotonic
        self._owners: OrderedDict[str, _Own] = OrderedDict()

    def note(self, owner: str, name: str) -> None:
        """Record that a name was refused to a sandbox."""
        own = self._owners.setdefault(owner, _Own())
        self._owners.move_to_end(owner)
        if len(self._owners) > OWNERS:
            self._owners.popitem(last=False)
        at = self._now()
        before = own.names.pop(name, None)
        own.names[name] = (
            Refusal(name, 1, at, at) if before is None else Refusal(name, before.count + 1, before.first, at)
        )
        if len(own.names) > NAMES:
            own.names.popitem(last=False)
        self._say(owner, own, name)

    def of(self, owner: str) -> list[Refusal]:
        """What was refused to a sandbox, the latest last."""
        own = self._owners.get(owner)
        return [] if own is None else list(own.names.values())

    def _say(self, owner: str, own: _Own, name: str) -> None:
        at = self._monotonic()
        if own.logged is not None and at - own.logged < LOG_EVERY_S:
            own.unsaid += 1
            return
        more = f" ({own.unsaid} more lookups were refused since the last such line)" if own.unsaid else ""
        _log.info("sandbox %s: its network rules do not allow the name %s%s", owner, name, more)
        own.logged, own.unsaid = at, 0
