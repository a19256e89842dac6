"""How fast a sandbox may be: limits on its network and its disk, as values.

Each limit is a rate and a burst: what may go at once after a rest. None and 0 are no limit. Disk limits
are for all disks of a sandbox together, reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv.errors import InvalidRequest

if TYPE_CHECKING:  # clients have these values, and no pydantic
    from pydantic import ConfigDict

# Below these a sandbox could not be started or reached in time.
NETWORK_LEAST = 16 * 1024  # bytes per second, and bytes of a burst: the largest frame must fit
DISK_LEAST = 256 * 1024  # bytes per second
OPERATIONS_LEAST = 20  # per second
MOST = 1 << 40  # more than any device does
BURST_MOST = 1 << 30  # bytes of a network's burst: the kernel counts in 32 bits

_STRICT: ConfigDict = {"extra": "forbid"}


@dataclass(frozen=True)
class NetworkLimits:
    """Bytes per second that a sandbox receives (rx) and sends (tx); `burst_bytes` is for either way, and
    a tenth of a second's worth where it is not given."""

    __pydantic_config__ = _STRICT

    rx_bytes_per_second: int | None = None
    tx_bytes_per_second: int | None = None
    burst_bytes: int | None = None

    def __bool__(self) -> bool:
        """Whether anything is limited."""
        return any(getattr(self, each.name) is not None for each in fields(self))


@dataclass(frozen=True)
class DiskLimits:
    """Bytes and operations per second. A burst is what may be done within one second after a rest, at
    least what the rate says; where it is not given, a tenth of a second's worth goes at once."""

    __pydantic_config__ = _STRICT

    bytes_per_second: int | None = None
    iops: int | None = None
    burst_bytes: int | None = None
    burst_operations: int | None = None

    def __bool__(self) -> bool:
        """Whether anything is limited."""
        return any(getattr(self, each.name) is not None for each in fields(self))


@dataclass(frozen=True)
class Limits:
    """All limits of a sandbox."""

    __pydantic_config__ = _STRICT

    network: NetworkLimits = field(default_factory=NetworkLimits)
    disk: DiskLimits = field(default_factory=DiskLimits)

    def __bool__(self) -> bool:
        """Whether anything is limited."""
        return bool(self.network) or bool(self.disk)


NONE = Limits()

_Part = TypeVar("_Part", NetworkLimits, DiskLimits)

_LEAST = {
    "rx_bytes_per_second": NETWORK_LEAST,
    "tx_bytes_per_second": NETWORK_LEAST,
    "bytes_per_second": DISK_LEAST,
    "iops": OPERATIONS_LEAST,
}
# A burst, the rates that it belongs to, and the least that it can be: None is the rate itself.
_BURSTS: tuple[tuple[str, tuple[str, ...], int | None], ...] = (
    ("network.burst_bytes", ("network.rx_bytes_per_second", "network.tx_bytes_per_second"), NETWORK_LEAST),
    ("disk.burst_bytes", ("disk.bytes_per_second",), None),
    ("disk.burst_operations", ("disk.iops",), None),
)


def chosen(asked: Limits, default: Limits, most: Limits) -> Limits:
    """The limits of a sandbox: what was asked, the node's default for what was not, and never more than
    the node's maximum.

    Raises:
        InvalidRequest: it is more than the maximum, too little to work with, or a burst without a rate.
    """
    found = Limits(
        _part("network", asked.network, default.network, most.network),
        _part("disk", asked.disk, default.disk, most.disk),
    )
    return _with_bursts(found, asked)


def _part(where: str, asked: _Part, default: _Part, most: _Part) -> _Part:
    return replace(
        asked,
        **{
            each.name: _value(
                f"{where}.{each.name}",
                getattr(asked, each.name),
                getattr(default, each.name),
                getattr(most, each.name),
                _LEAST.get(each.name, 1),
            )
            for each in fields(asked)
        },
    )


def _value(name: str, asked: int | None, default: int | None, most: int | None, least: int) -> int | None:
    most = most or None
    if asked is None:
        value = default or most
        return value if value is None or most is None else min(value, most)
    if asked == 0:
        if most is not None and "burst" not in name:
            raise InvalidRequest(f"limits.{spelled(name)}: this node limits it to {most}; it cannot be 0")
        return None
    if asked < least:
        raise InvalidRequest(f"limits.{spelled(name)}: must be at least {least}, or 0 for none, is {asked}")
    top = most or (BURST_MOST if name == "network.burst_bytes" else MOST)
    if asked > top:
        raise InvalidRequest(f"limits.{spelled(name)}: {asked} is more than the most of {top}")
    return asked


def _with_bursts(found: Limits, asked: Limits) -> Limits:
    """The same with bursts that can be: those asked for are refused where they cannot, others follow."""
    for burst, rates, least in _BURSTS:
        room, name = burst.split(".")
        part = getattr(found, room)
        value = getattr(part, name)
        if value is None:
            continue
        given = [rate for each in rates if (rate := getattr(part, each.split(".")[1])) is not None]
        was_asked = getattr(getattr(asked, room), name) is not None
        needed = least if least is not None else max(given, default=0)
        if was_asked and not given:
            raise InvalidRequest(f"limits.{spelled(burst)}: a burst of what is not limited")
        if was_asked and value < needed:
            raise InvalidRequest(f"limits.{spelled(burst)}: must be at least {needed}, is {value}")
        kept: Any = value if given and value >= needed else None
        found = replace(found, **{room: replace(part, **{name: kept})})
    return found


def spelled(name: str) -> str:
    """A field's name as requests and answers spell it."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
