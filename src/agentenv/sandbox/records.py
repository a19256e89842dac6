"""The record of a sandbox, and the table that keeps it.

The record holds all that is needed to find the sandbox's machine and slot again after a restart.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentenv.identity.records import DEFAULT
from agentenv.limits import NONE, Limits
from agentenv.network.policy import UNRESTRICTED, Policy
from agentenv.network.slot import Slot
from agentenv.records.database import Database
from agentenv.records.document import Documents
from agentenv.sandbox.transitions import ENDS, State
from agentenv.snapshot.records import Attached, GuestSettings, Resources, Snapshot
from agentenv.vmm.machine import MachineSpec

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
_ID_LENGTH = 19


def new_sandbox_id() -> str:
    """`i` and 19 random base32 letters (95 bits): lowercase and without dashes, as host names of
    the form `{port}-{id}.{domain}` need."""
    return "i" + "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


@dataclass(frozen=True)
class Origin:
    """The template a sandbox was made from, as it was then."""

    id: str
    name: str
    build_id: str


@dataclass(frozen=True)
class Lifecycle:
    """What happens at expiry, whether traffic wakes a paused sandbox, and for how many seconds a paused
    one is kept (None: for good)."""

    on_timeout: Literal["kill", "pause"] = "kill"
    auto_resume: bool = False
    pause_memory: bool = True
    paused_timeout_s: int | None = None


# E2B's names of what a sandbox may reach, as opposed to who reaches it.
EGRESS_KEYS = frozenset({"allowOut", "denyOut", "dnsServers", "egressProxy", "rules"})


@dataclass(frozen=True)
class Network:
    """The network settings as the client gave them; `given` is shown again, None when there were none.
    `policy` is what they come to for what the sandbox may reach."""

    public: bool = True
    internet: bool | None = None
    given: dict[str, Any] | None = None
    policy: Policy = UNRESTRICTED

    def with_egress(self, other: Network) -> Network:
        """These settings with what may be reached as in the other ones, whole: what they do not say is
        as if it had never been said."""
        kept = {key: value for key, value in (self.given or {}).items() if key not in EGRESS_KEYS}
        return replace(
            self, internet=other.internet, given={**kept, **(other.given or {})} or None, policy=other.policy
        )

    @property
    def mask_host(self) -> str | None:
        """The host that services are told, see `sandbox.masking`."""
        return (self.given or {}).get("maskRequestHost") or None


@dataclass(frozen=True)
class Sandbox:
    """A sandbox. Times are seconds since the epoch, sizes MiB.

    `access_token` is None for a sandbox that was asked to be unsecured (v1 only); `traffic_token`
    is None where everybody may reach its services. `boot_id` is the host boot during which the machine
    was started. `reason` says why it ended, or why it could not be resumed.

    `env` is what the client gave, `guest` what processes get in the end. `snapshot` is the newest one on
    the line of its machine, which a paused sandbox is resumed from; `start` the one that it was born
    from; `target` the one that the operation under way makes. `fingerprint` is that of a machine that was
    booted; a restored one has its snapshot's. `drives` are as they were when it was created. `project` is
    whose it is, `key` the id of the API key that made it.
    """

    id: str
    state: State
    template: Origin
    started_at: float
    end_at: float
    timeout_s: int
    vcpus: int
    memory_mib: int
    disk_mib: int
    generation: int = 1
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    access_token: str | None = None
    traffic_token: str | None = None
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    network: Network = field(default_factory=Network)
    limits: Limits = NONE
    guest: GuestSettings = field(default_factory=GuestSettings)
    machine_id: str = ""
    snapshot: str | None = None
    start: str | None = None
    target: str | None = None
    fingerprint: dict[str, str] | None = None
    pause_mode: Literal["full", "filesystem"] | None = None
    agent_answered: bool = True
    paused_until: float | None = None
    drives: tuple[Attached, ...] = ()
    machine: MachineSpec | None = None
    slot: Slot | None = None
    boot_id: str | None = None
    ended_at: float | None = None
    reason: str | None = None
    project: str = DEFAULT
    key: str | None = None

    def with_state(self, state: State, **changes: Any) -> Sandbox:
        """This record in another state."""
        return replace(self, state=state, **changes)

    @property
    def resources(self) -> Resources:
        """What its machine has."""
        return Resources(self.vcpus, self.memory_mib, self.disk_mib)

    @property
    def written_mib(self) -> int:
        """MiB of all disks that it may write to."""
        return self.disk_mib + sum(drive.disk_mib for drive in self.drives if not drive.read_only)

    def drives_on(self, snapshot: Snapshot) -> tuple[Attached, ...]:
        """Its drives where it starts from a snapshot: what that has of them, and the others as they were."""
        return (*snapshot.drives, *self.drives[len(snapshot.drives) :])

    def kept_until(self, now: float) -> float | None:
        """When a sandbox that is paused at `now` ends; None for one that is kept for good."""
        kept_s = self.lifecycle.paused_timeout_s
        return None if kept_s is None else now + kept_s


_DOCUMENTS = Documents(Sandbox, "a sandbox record")
encode = _DOCUMENTS.encode
decode = _DOCUMENTS.decode


@dataclass(frozen=True)
class Claim:
    """An idempotency key and what it was used for."""

    key: str
    request: str
    sandbox_id: str
    created_at: float


class Records:
    """Sandbox records and idempotency keys in the node's database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, record: Sandbox, claim: Claim | None = None) -> None:
        """Keep a new record, together with the key that asked for it."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "INSERT INTO sandboxes (id, state, template, started_at, document) VALUES (?, ?, ?, ?, ?)",
                (record.id, record.state, record.template.id, record.started_at, encode(record)),
            )
            if claim is not None:
                cursor.execute(
                    "INSERT INTO idempotency (key, request, sandbox, created_at) VALUES (?, ?, ?, ?)",
                    (claim.key, claim.request, claim.sandbox_id, claim.created_at),
                )

    def update(self, record: Sandbox, *, forget_claim: bool = False) -> None:
        """Replace a record; with `forget_claim` its idempotency key may be used anew."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "UPDATE sandboxes SET state = ?, started_at = ?, document = ? WHERE id = ?",
                (record.state, record.started_at, encode(record), record.id),
            )
            if forget_claim:
                cursor.execute("DELETE FROM idempotency WHERE sandbox = ?", (record.id,))

    def find(self, sandbox_id: str) -> Sandbox | None:
        """The record of that id, ended or not."""
        rows = self._database.query("SELECT document FROM sandboxes WHERE id = ?", (sandbox_id,))
        return decode(rows[0]["document"]) if rows else None

    def unended(self) -> list[Sandbox]:
        """Records of sandboxes that have not come to an end, oldest first."""
        rows = self._database.query(
            "SELECT document FROM sandboxes WHERE state NOT IN (?, ?) ORDER BY started_at, id", tuple(ENDS)
        )
        return [decode(row["document"]) for row in rows]

    def claim(self, key: str) -> Claim | None:
        """What an idempotency key was used for, if it is known."""
        rows = self._database.query("SELECT * FROM idempotency WHERE key = ?", (key,))
        if not rows:
            return None
        row = rows[0]
        return Claim(row["key"], row["request"], row["sandbox"], row["created_at"])

    def prune(self, *, ended_before: float, claims_before: float) -> None:
        """Forget keys and ended records that are older than that."""
        with self._database.transaction() as cursor:
            cursor.execute("DELETE FROM idempotency WHERE created_at < ?", (claims_before,))
            cursor.execute(
                "DELETE FROM sandboxes WHERE state IN (?, ?) "
                "AND coalesce(json_extract(document, '$.ended_at'), started_at) < ? "
                "AND id NOT IN (SELECT sandbox FROM idempotency)",
                (*ENDS, ended_before),
            )
