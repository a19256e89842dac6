"""The one error tree.

Each class says what kind of trouble it is; an instance says what happened and, where something
can be done, what. The HTTP status doubles as the `code` of the error body, since E2B's clients
compare the two; `retry` tells a client whether the same call can succeed later.
"""

from __future__ import annotations

from typing import ClassVar


class AenvError(Exception):
    """Something went wrong that is worth a name.

    Args:
        message: what happened, and to what.
        remedy: what the reader can do about it; shown after the message.
        retry_after: seconds after which a retry makes sense, if that is known.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    retry: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    e2b_code: ClassVar[str | None] = None  # by which E2B's clients know a few of them

    def __init__(self, message: str, *, remedy: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class InvalidRequest(AenvError):
    """The caller's mistake: a value that cannot be right."""

    status = 400
    code = "invalid_request"
    exit_code = 2


class Unauthorized(AenvError):
    """No credential, or one that is not known."""

    status = 401
    code = "unauthorized"
    exit_code = 7


class Forbidden(AenvError):
    """A known caller asks for what it may not have."""

    status = 403
    code = "forbidden"
    exit_code = 7


class NotFound(AenvError):
    """The named object does not exist (or is not the caller's to see)."""

    status = 404
    code = "not_found"
    exit_code = 3


class Conflict(AenvError):
    """The object's state forbids the operation now."""

    status = 409
    code = "conflict"
    exit_code = 4


class CapacityExceeded(AenvError):
    """The node has no room now: memory, disk, slots or processes."""

    status = 503
    code = "capacity"
    retry = True
    exit_code = 5


class Expired(AenvError):
    """The object's time ran out; what was asked of it was fine."""

    status = 410
    code = "expired"
    exit_code = 3


class NotImplementedYet(AenvError):
    """Part of the interface, not of this version."""

    status = 501
    code = "not_implemented"
    exit_code = 2


class GuestFault(AenvError):
    """The guest, or the agent in it, did not do its part."""

    status = 500
    code = "guest"


class HostFault(AenvError):
    """The host refused something that this node needs: a process, a device, a namespace."""

    status = 500
    code = "host"


class HostIncapable(HostFault):
    """The host lacks a capability; `aenv doctor` shows it with its remedy."""

    code = "host_incapable"
    exit_code = 6


class StoreFault(AenvError):
    """A record, image or layer cannot be read or written."""

    status = 500
    code = "store"


class StoreFull(StoreFault):
    """No space where images, layers or records go."""

    status = 507
    code = "store_full"
    retry = True


class StoreCorrupt(StoreFault):
    """Data is there but is not what it says it is."""

    code = "store_corrupt"


class Unreachable(AenvError):
    """Another server that is needed for this, such as a registry, does not answer or cannot now."""

    status = 502
    code = "unreachable"
    retry = True


class OutcomeUnknown(AenvError):
    """It was begun, and whether it happened cannot be told; looking before retrying is wise."""

    status = 504
    code = "outcome_unknown"
