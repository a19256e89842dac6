"""How often a key may ask: token buckets. Pure but for the clock that is given."""

from __future__ import annotations

from collections.abc import Callable

from agentenv.identity.records import Rate


class Bucket:
    """Full at first; each request takes one, and `rate.per_second` come back."""

    def __init__(self, rate: Rate, now: float) -> None:
        self.rate = rate
        self._left = float(rate.burst)
        self._at = now

    def take(self, now: float) -> float:
        """0 if the request may be made, else the seconds after which one may."""
        self._left = min(self.rate.burst, self._left + (now - self._at) * self.rate.per_second)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) / self.rate.per_second


class Rates:
    """The buckets of all keys that have a rate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def take(self, key_id: str, rate: Rate) -> float:
        """As `Bucket.take`, of that key's."""
        bucket = self._buckets.get(key_id)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[key_id] = Bucket(rate, self._clock())
        return bucket.take(self._clock())

    def forget(self, key_id: str) -> None:
        """The key is gone."""
        self._buckets.pop(key_id, None)
