"""How large what a template's machines have may be."""

from __future__ import annotations

from agentenv.errors import InvalidRequest

VCPUS_MAX = 64
MEMORY_MIB_MIN = 128
MEMORY_MIB_MAX = 1 << 20
DISK_MIB_MIN = 64
DISK_MIB_MAX = 1 << 20


def within(what: str, value: int, least: int, most: int) -> int:
    """The value, which `what` names to whoever gave it.

    Raises:
        InvalidRequest: it is too small or too large.
    """
    if not least <= value <= most:
        raise InvalidRequest(f"{what}: {value} is not possible", remedy=f"between {least} and {most}")
    return value
