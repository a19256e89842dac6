"""What is asked of the sandbox service, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentenv.errors import CapacityExceeded, InvalidRequest, NotImplementedYet
from agentenv.identity.records import DEFAULT
from agentenv.limits import NONE, Limits
from agentenv.sandbox.drives import NewDrive
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Lifecycle, Network, Sandbox

# E2B's names; an empty value of each is what a sandbox gets anyway.
UNSUPPORTED_NETWORK = (
    "egressProxy",
    "httpsPorts",
    "rules",
)


@dataclass(frozen=True)
class Shape:
    """The size of a machine as far as another is wanted than what it is started from has."""

    vcpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None


@dataclass(frozen=True)
class NewSandbox:
    """A sandbox that is wanted. `timeout_s` is its time-to-live in seconds. With `image`, a source of a root
    filesystem, it is of that and of no template."""

    template: str
    timeout_s: int
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    secure: bool = True
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    network: Network = field(default_factory=Network)
    image: str | None = None
    shape: Shape = Shape()
    drives: tuple[NewDrive, ...] = ()
    limits: Limits = NONE
    project: str = DEFAULT
    key: str | None = None


def refuse_unsupported(request: NewSandbox) -> None:
    """Refuse what this version cannot honour, rather than ignore it.

    Raises:
        NotImplementedYet: it names what.
    """
    refuse_unsupported_network(request.network)


def refuse_unsupported_network(network: Network) -> None:
    """The same for network settings."""
    for name in UNSUPPORTED_NETWORK:
        if (network.given or {}).get(name):
            raise NotImplementedYet(f"network.{name} is not part of this version yet")


@dataclass(frozen=True)
class Key:
    """An idempotency key and the digest of the request that it came with."""

    value: str
    request: str


@dataclass(frozen=True)
class Answer:
    """A sandbox as it is after an operation; `phases` is None where nothing had to be done."""

    sandbox: Sandbox
    phases: Phases | None = None
    resumed: bool = False


class KeyReused(InvalidRequest):
    """An idempotency key came with another request than before.

    422 is what the Idempotency-Key draft (draft-ietf-httpapi-idempotency-key-header) asks for.
    """

    status = 422
    code = "idempotency_key_reused"


class Stopping(CapacityExceeded):
    """The node is about to stop and begins nothing new."""

    code = "stopping"
