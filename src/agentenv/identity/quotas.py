"""Whether one more sandbox is within a key's quota. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from agentenv.errors import AenvError
from agentenv.identity.records import UNLIMITED, Quota

_UNITS = {
    "sandboxes": "sandboxes",
    "vcpus": "vcpus",
    "memory_mib": "MiB of memory",
    "disk_mib": "MiB of disk",
}


class QuotaExceeded(AenvError):
    """The key's sandboxes would take more than they may. E2B answers 429 where a team has too many."""

    status = 429
    code = "quota_exceeded"
    exit_code = 5


def no_quota(key_id: str | None) -> Quota:
    """What a key may have where there are no quotas."""
    return UNLIMITED


def require_room(quota: Quota, taken: Iterable[Quota], wanted: Quota) -> None:
    """Refuse what would be more than the quota; all fields of `taken` and `wanted` are numbers.

    Raises:
        QuotaExceeded: says how much there is, and how much is taken.
    """
    total = list(taken)
    for each in fields(Quota):
        most = getattr(quota, each.name)
        if most is None:
            continue
        used = sum(getattr(one, each.name) for one in total)
        more = getattr(wanted, each.name)
        if more and used + more > most:
            raise QuotaExceeded(
                f"this API key may have {most} {_UNITS[each.name]}:"
                f" {used} are taken, and {more} more are wanted",
                remedy="kill or pause some of its sandboxes, or have its quota raised",
            )
