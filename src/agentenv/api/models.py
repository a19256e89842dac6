"""Bodies of requests and answers, with E2B's exact names (its OpenAPI file, and the v2 calls that only
its clients show). Unknown fields are ignored; a null is the same as an absent field."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, model_validator

from agentenv.template.sizes import DISK_MIB_MAX, MEMORY_MIB_MAX, MEMORY_MIB_MIN, VCPUS_MAX

ENVD_VERSION = "0.6.13"
CLIENT_ID = "agentenv"


class Asked(BaseModel):
    """A request's body: types are not converted."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        """JSON can spell half a surrogate pair, which no store or answer can hold."""
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a string holds half of a surrogate pair") from None
        return data


class NetworkLimitsBody(Asked):
    """Bytes per second, and of a burst either way; 0 is no limit, what is missing the node's default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rxBytesPerSecond: int | None = Field(default=None, ge=0)
    txBytesPerSecond: int | None = Field(default=None, ge=0)
    burstBytes: int | None = Field(default=None, ge=0)


class DiskLimitsBody(Asked):
    """Per second, and what may be done within one second after a rest; see NetworkLimitsBody."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bytesPerSecond: int | None = Field(default=None, ge=0)
    iops: int | None = Field(default=None, ge=0)
    burstBytes: int | None = Field(default=None, ge=0)
    burstOperations: int | None = Field(default=None, ge=0)


class LimitsBody(Asked):
    """How fast a sandbox's network and disks may be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    network: NetworkLimitsBody | None = None
    disk: DiskLimitsBody | None = None


class AutoResume(Asked):
    enabled: bool = False


class NetworkConfig(Asked):
    """What traffic a sandbox may send and receive."""

    allowOut: list[str] | None = None
    denyOut: list[str] | None = None
    dnsServers: list[str] | None = None
    egressProxy: dict[str, Any] | None = None
    allowPublicTraffic: bool | None = None
    maskRequestHost: str | None = None
    httpsPorts: list[int] | None = None
    rules: dict[str, Any] | None = None


class AttachedDriveBody(Asked):
    """An image beside the root disk; sizes in MiB. `driveID` and `source.image` are the same as `id` and
    `image`."""

    id: str = Field(validation_alias=AliasChoices("id", "driveID"))
    image: str = Field(validation_alias=AliasChoices("image", AliasPath("source", "image")))
    readOnly: bool | None = None
    mountPath: str | None = None
    subPath: str | None = None
    diskSizeMB: int | None = Field(default=None, ge=1, le=DISK_MIB_MAX)


class NetworkUpdate(Asked):
    """What a sandbox may reach; what is left out is cleared."""

    allowOut: list[str] | None = None
    denyOut: list[str] | None = None
    dnsServers: list[str] | None = None
    egressProxy: dict[str, Any] | None = None
    rules: dict[str, Any] | None = None
    allow_internet_access: bool | None = None


class CreateBody(Asked):
    """A sandbox that is wanted; `timeout` in seconds. `pausedTimeout`, an addition to E2B's, is for how many
    seconds it is kept while it is paused, 0 for good. Additions as well: another size than the template's
    (MiB), and drives."""

    templateID: str = Field(min_length=1, max_length=256)
    timeout: int | None = None
    autoPause: bool | None = None
    autoPauseMemory: bool | None = None
    pausedTimeout: int | None = Field(default=None, ge=0)
    autoResume: AutoResume | None = None
    allow_internet_access: bool | None = None
    network: NetworkConfig | None = None
    limits: LimitsBody | None = None
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volumeMounts: list[dict[str, Any]] | None = None
    cpuCount: int | None = Field(default=None, ge=1, le=VCPUS_MAX)
    memoryMB: int | None = Field(default=None, ge=MEMORY_MIB_MIN, le=MEMORY_MIB_MAX)
    diskSizeMB: int | None = Field(default=None, ge=1, le=DISK_MIB_MAX)
    attachedDrives: list[AttachedDriveBody] | None = None


class CreateBodyV1(CreateBody):
    """The older call: access to the agent is open unless `secure` is true."""

    secure: bool | None = None


class ColdBody(CreateBodyV1):
    """A sandbox of an image, of no template."""

    templateID: str = ""
    image: str = Field(min_length=1, max_length=1024)
    allowInternetAccess: bool | None = None
    extraBootArgs: str | None = None


class ConnectBody(Asked):
    """`memory: false` starts a paused sandbox from its disk alone."""

    timeout: int | None = None
    memory: bool | None = None


class ResumeBody(Asked):
    timeout: int | None = None


class SnapshotBody(Asked):
    """`memory: false` keeps the disk alone."""

    name: str | None = Field(default=None, min_length=1, max_length=257)
    memory: bool | None = None


class RollbackBody(Asked):
    """Without a snapshot it is back to the start."""

    snapshotID: str | None = Field(default=None, min_length=1, max_length=257)


class ChildBody(Asked):
    """What one of many has of its own."""

    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None


class ForkBody(Asked):
    timeout: int | None = None
    count: int | None = None
    children: list[ChildBody] | None = None


class BatchBody(CreateBody):
    """Many sandboxes from one template or snapshot."""

    count: int | None = None
    children: list[ChildBody] | None = None


class TimeoutBody(Asked):
    timeout: int


class RefreshBody(Asked):
    duration: int | None = Field(default=None, ge=0, le=3600)


class PauseBody(Asked):
    memory: bool | None = None
    requireHealthyGuest: bool | None = None


class Given(BaseModel):
    """An answer's body: what is None is left out."""


class Fault(Given):
    """The body of every error; `code` equals the HTTP status."""

    code: int
    message: str
    remedy: str | None = None


class SandboxAnswer(Given):
    """A sandbox that was created or connected to."""

    templateID: str
    sandboxID: str
    clientID: str = CLIENT_ID
    envdVersion: str = ENVD_VERSION
    alias: str | None = None
    envdAccessToken: str | None = None
    trafficAccessToken: str | None = None
    domain: str | None = None


class ListedSandbox(Given):
    """A sandbox in a list; sizes in MiB."""

    templateID: str
    sandboxID: str
    clientID: str = CLIENT_ID
    envdVersion: str = ENVD_VERSION
    alias: str | None = None
    startedAt: str
    endAt: str
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    state: Literal["running", "paused"]
    metadata: dict[str, str] | None = None


class LifecycleAnswer(Given):
    onTimeout: Literal["kill", "pause"]
    autoResume: bool


class AttachedDrive(Given):
    """A drive of a sandbox; its size in MiB."""

    id: str
    image: str
    readOnly: bool
    mountPath: str
    subPath: str | None = None
    diskSizeMB: int


class SandboxDetail(ListedSandbox):
    """All that is told about one sandbox."""

    envdAccessToken: str | None = None
    domain: str | None = None
    allowInternetAccess: bool | None = None
    network: dict[str, Any] | None = None
    limits: dict[str, dict[str, int]] | None = None
    lifecycle: LifecycleAnswer | None = None
    pauseMode: Literal["full", "filesystem"] | None = None
    envdUnresponsiveAtPause: bool | None = None
    reason: str | None = None
    snapshotID: str | None = None
    attachedDrives: list[AttachedDrive] | None = None


class ForkError(Given):
    code: int
    message: str


class ForkAnswer(Given):
    """One of many: a sandbox, or why there is none."""

    sandbox: SandboxAnswer | None = None
    error: ForkError | None = None


class SnapshotAnswer(Given):
    """A snapshot; it is started from like a template."""

    snapshotID: str
    names: list[str]


class SnapshotDetail(SnapshotAnswer):
    """All that is told about a snapshot: sizes in MiB but `addedBytes`, and its relatives' ids."""

    kind: str
    templateID: str
    sandboxID: str | None = None
    createdAt: str
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    addedBytes: int
    durable: bool
    mode: Literal["full", "filesystem"]
    parent: str | None = None
    children: list[str] = []


class BranchAnswer(SnapshotDetail):
    """A snapshot and, whole, what grew from it."""

    branches: list[BranchAnswer]


class TreeAnswer(Given):
    """A sandbox's snapshots, and where it is itself: the snapshot that it runs from now."""

    sandboxID: str
    startID: str | None = None
    snapshotID: str | None = None
    branches: list[BranchAnswer]


class PhaseAnswer(Given):
    """A phase of an operation: when it began after the operation did, and how long it took."""

    name: str
    begunSeconds: float
    seconds: float
    failed: bool


class OperationAnswer(Given):
    """What was done with a sandbox, and what that spent its time on, in the order in which phases ended."""

    operation: str
    seconds: float
    phases: list[PhaseAnswer]


class TemplateAnswer(Given):
    """A template; `createdBy` and `lastSpawnedAt` are null, and shown so, where they are not known."""

    templateID: str
    buildID: str
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    public: bool = True
    aliases: list[str]
    names: list[str]
    createdAt: str
    updatedAt: str
    createdBy: None = None
    lastSpawnedAt: str | None = None
    spawnCount: int = 0
    buildCount: int = 1
    envdVersion: str = ENVD_VERSION
    buildStatus: Literal["waiting", "building", "ready", "error"] = "ready"


class TemplateAlias(Given):
    templateID: str
    public: bool = True


def rfc3339(seconds: float) -> str:
    """A time since the epoch as RFC 3339 in UTC, with microseconds and `Z`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
