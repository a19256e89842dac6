"""Settings: defaults, then `$AENV_HOME/aenv.toml`, then `AENV_*` variables, the last one winning.

Every key is a field of `Settings`, with its unit and meaning in its description; nothing else in
the program reads the environment for settings.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from agentenv.errors import InvalidRequest
from agentenv.limits import NONE, Limits, chosen


def default_home() -> Path:
    """The data directory: `/var/lib/aenv` for root, `~/.local/share/aenv` for a user."""
    if os.geteuid() == 0:
        return Path("/var/lib/aenv")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "aenv"


def default_runtime(home: Path) -> Path:
    """Run-time state: `/run/aenv` for root's own home, else one directory per data directory.

    It holds sockets and must vanish with the host's boot, so it is always under /run. The name is
    short because a Unix socket's path has room for 107 bytes.
    """
    if home == Path("/var/lib/aenv"):
        return Path("/run/aenv")
    tag = f"{abs(hash_path(home)):08x}"[:8]
    return Path(f"/run/aenv-{tag}")


def default_docker_config() -> Path:
    """Where `docker login` keeps what it knows."""
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def hash_path(path: Path) -> int:
    """A stable 32-bit number for a path (FNV-1a), to tell data directories apart by name."""
    value = 0x811C9DC5
    for byte in os.fsencode(path):
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


class Settings(BaseSettings):
    """All settings of a node. Environment names are `AENV_` plus the field name in capitals."""

    model_config = SettingsConfigDict(env_prefix="AENV_", extra="forbid", frozen=True)

    home: Path = Field(default_factory=default_home, description="Data directory.")
    runtime: Path | None = Field(
        default=None, description="Run-time directory (sockets, logs of machines); default under /run."
    )
    host: str = Field(default="127.0.0.1", description="Address that the API listens on.")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port of the API; 0 takes a free one.")
    domain: str = Field(
        default="localhost",
        description="Domain under which `{port}-{sandbox}.{domain}` reaches a service in a sandbox.",
    )
    tls_cert: Path | None = Field(
        default=None,
        description="Certificate chain (PEM) for `*.{domain}`, to serve https; unset, the local authority's"
        " if `setup --local-ca` made one. Files are looked at again every few seconds.",
    )
    tls_key: Path | None = Field(default=None, description="Its key (PEM, not encrypted).")
    tls_port: int = Field(
        default=8443,
        ge=0,
        le=65535,
        description="TCP port for https, where there is a certificate; 0 takes a free one.",
    )
    api_key: str | None = Field(
        default=None, description="The API key; unset, one is generated at first start and kept in a file."
    )
    audit_file_mib: int = Field(
        default=16, ge=1, description="MiB after which a new file of the audit log is begun."
    )
    audit_files: int = Field(
        default=8, ge=1, description="Files of the audit log that are kept besides the newest."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="The log's form: lines for people, or one JSON object on each."
    )

    accelerator: Literal["auto", "kvm", "tcg"] = Field(
        default="auto",
        description="KVM or software emulation; auto takes KVM where a real boot with it succeeded.",
    )
    qemu: str = Field(
        default="qemu-system-x86_64", description="QEMU program, no script: a name on the path, or a path."
    )
    kernel: Path | None = Field(
        default=None,
        description="Guest kernel (bzImage) whose modules `setup` packs; unset, the distribution's.",
    )
    tcg_buffer_mib: int | None = Field(
        default=None,
        ge=16,
        le=1024,
        description="MiB that a machine's translated code may take under software emulation, in which its"
        " process takes them beside its memory; unset, an eighth of the memory, at least 32.",
    )

    cgroup: str | None = Field(
        default=None,
        description="Control group of version 2, by its path in the hierarchy, that is delegated to this node"
        " for its machines' groups; unset, or where there is none, the root.",
    )

    vcpus: int = Field(default=1, ge=1, le=64, description="Virtual cpus of a template that does not say.")
    memory_mib: int = Field(default=512, ge=128, description="MiB of memory of a template that does not say.")
    disk_mib: int = Field(
        default=2048, ge=256, description="MiB of root disk of a template that does not say."
    )

    timeout_s: int = Field(
        default=300, ge=1, description="Seconds a sandbox lives when the request does not say (v2)."
    )
    timeout_v1_s: int = Field(default=15, ge=1, description="The same for the v1 call.")
    timeout_max_s: int = Field(
        default=7 * 24 * 3600, ge=1, description="Longest time-to-live that can be asked, seconds."
    )
    boot_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds until a booting guest's agent must have answered."
    )
    resume_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds until a restored guest's agent must have answered."
    )
    on_timeout: Literal["pause", "kill"] = Field(
        default="pause",
        description="What becomes of a sandbox whose time ran out and whose request did not say.",
    )
    paused_timeout_s: int = Field(
        default=24 * 3600,
        ge=0,
        description="Seconds that a paused sandbox is kept when the request does not say; 0: for good.",
    )
    pause_durable: bool = Field(
        default=False,
        description="Answer a pause only when it survives the host, not as soon as it survives the node.",
    )
    max_sandboxes: int = Field(
        default=200, ge=1, description="Sandboxes that may exist on this node at once."
    )

    memory_budget_mib: int | None = Field(
        default=None, ge=1, description="MiB of memory for sandboxes; unset, all that the host has."
    )
    memory_overcommit: float = Field(
        default=3.0,
        gt=0,
        description="How often the memory budget may be promised: guests share what they have in common.",
    )
    memory_floor_mib: int = Field(
        default=512, ge=0, description="MiB of the host's memory that no new machine may take."
    )
    vcpu_overcommit: float = Field(
        default=64.0, gt=0, description="Virtual cpus that may be promised per processor of the host."
    )
    disk_budget_mib: int | None = Field(
        default=None, ge=1, description="MiB of disk for sandboxes; unset, the data directory's filesystem."
    )
    disk_overcommit: float = Field(
        default=4.0,
        gt=0,
        description="How often the disk budget may be promised: disks take what is written to them.",
    )
    disk_floor_mib: int = Field(
        default=1024, ge=0, description="MiB of the data directory's filesystem that no new machine may take."
    )

    pool_least: int = Field(
        default=1, ge=0, description="Machines kept ready per snapshot that was started from lately."
    )
    pool_most: int = Field(
        default=8, ge=0, description="The most machines kept ready per snapshot; 0 keeps none."
    )
    pool_total: int = Field(default=32, ge=0, description="The most machines kept ready on this node.")
    pool_keep_s: float = Field(
        default=300.0, gt=0, description="Seconds for which demand is remembered: pools shrink after them."
    )
    pool_at_once: int | None = Field(
        default=None, ge=1, description="Machines made ready at a time; unset, half of the processors."
    )
    slots_least: int = Field(default=2, ge=0, description="Network slots made ahead, at least.")
    slots_most: int = Field(default=16, ge=0, description="Network slots made ahead, at most.")

    fold_layers: int = Field(
        default=16,
        ge=2,
        description="Layers of memory, or of disk above the template's, from which on they are made one.",
    )
    fold_delta_mib: int = Field(
        default=256,
        ge=1,
        description="MiB of changed memory in a snapshot from which on it gets a flat file of its own.",
    )
    fold_starts: int = Field(
        default=8, ge=1, description="Sandboxes started from a snapshot from which on it gets one as well."
    )

    pressure: Literal["off", "page_out", "refresh", "pause"] = Field(
        default="refresh",
        description="What is done to idle sandboxes, the idlest first, when the host runs out of memory: each"
        " includes those before. page_out: written to swap, where there is some; refresh: started anew in"
        " place from a file of their memory; pause: paused.",
    )
    pressure_below_mib: int = Field(
        default=768, ge=0, description="MiB of memory available on the host below which that begins."
    )
    pressure_stalled: float = Field(
        default=20.0,
        ge=0,
        le=100,
        description="Percentage of the time that everything waits for memory above which it begins as well,"
        " where the kernel tells (full avg10 of /proc/pressure/memory); 0: not looked at.",
    )
    pressure_idle_s: float = Field(
        default=30.0, ge=0, description="Seconds without requests or computing after which one is idle."
    )

    registry_mirrors: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Registry → its mirrors (HOST[:PORT]), which are asked first, in this order.",
    )
    insecure_registries: list[str] = Field(
        default_factory=list,
        description="Registries (HOST[:PORT]) that are spoken to by http, in the clear; all others by https.",
    )
    ecr_url: str | None = Field(
        default=None,
        description="Where AWS keys of a build are exchanged for credentials of ECR, instead of"
        " https://api.ecr.REGION.amazonaws.com/: a VPC endpoint.",
    )
    docker_config: Path = Field(
        default_factory=default_docker_config,
        description="Directory with the config.json of `docker login`; DOCKER_CONFIG, or ~/.docker.",
    )
    ca_file: Path | None = Field(
        default=None,
        description="Certificates (PEM) to trust besides the system's, as a proxy's: in pulls and in guests.",
    )
    guest_proxy: bool = Field(
        default=True,
        description="Whether guests get the node's HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY. The proxy"
        " must listen on another address than a loopback one.",
    )
    guest_env: dict[str, str] = Field(
        default_factory=dict,
        description="Variables of every guest, such as PIP_INDEX_URL; a sandbox's own win over them.",
    )
    open_addresses: list[str] = Field(
        default_factory=list,
        description="What guests reach although its range is denied, as a mirror: ADDRESS:PORT or NAME:PORT,"
        " looked up when the node starts. The proxies that guests get are open by themselves.",
    )
    image_downloads: int = Field(default=3, ge=1, le=32, description="Layers of an image fetched at a time.")
    image_conversions: int = Field(default=2, ge=1, description="Images fetched and converted at a time.")
    image_cache_mib: int = Field(
        default=20480,
        ge=0,
        description="MiB of layers and root filesystems kept although no template or snapshot needs them.",
    )

    limits: Limits = Field(
        default=NONE,
        description="Limits of a sandbox whose request does not say: `network` (rx_bytes_per_second,"
        " tx_bytes_per_second, burst_bytes), `disk` (bytes_per_second, iops, burst_bytes, burst_operations).",
    )
    limits_most: Limits = Field(
        default=NONE,
        description="The most that a request can have of each; what is unset has no maximum.",
    )

    network_range: str = Field(
        default="10.192.0.0/12",
        description="IPv4 range of which each node on this host takes one /18 block for its sandboxes.",
    )
    denied_ranges: list[str] = Field(
        default_factory=lambda: [
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "::1/128",
            "64:ff9b:1::/48",
            "fc00::/7",
            "fe80::/10",
        ],
        description="Ranges that no sandbox reaches, whatever its own rules say: private networks and "
        "metadata addresses, exactly those listed (and the IPv6 addresses that hold an IPv4 one of them: "
        "mapped, NAT64, 6to4). The host itself and other sandboxes are refused whatever is listed.",
    )
    ipv6: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether sandboxes have IPv6, translated to the host's own. `auto`: where the host"
        " reaches the internet from a global address and forwards, or can without being a router altogether.",
    )
    nameservers: list[str] = Field(
        default_factory=list, description="Upstream name servers for guests; empty means the host's own."
    )

    proxy_head_bytes: int = Field(
        default=65536, ge=1024, le=1048576, description="Bytes of the longest head of a request or an answer."
    )
    proxy_head_s: float = Field(
        default=30.0, gt=0, description="Seconds that a client has to send a request's head."
    )
    proxy_idle_s: float = Field(
        default=640.0,
        gt=0,
        description="Seconds a client's connection is kept between requests: longer than clients keep it.",
    )
    proxy_connect_s: float = Field(
        default=5.0, gt=0, description="Seconds for a connection to a port of a sandbox."
    )
    proxy_answer_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that a sandbox has, once a request has come whole, to begin its answer; 0: any.",
    )
    proxy_still_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds for which nothing may move in the midst of a body or of a WebSocket; 0: any.",
    )
    proxy_wake_s: float = Field(
        default=0.0, ge=0, description="Seconds that a request waits for its sandbox to wake; 0: any."
    )
    proxy_connections: int = Field(
        default=0,
        ge=0,
        description="Connections that clients may have to the node in all; 0: a third of the files that it"
        " may have open. Beyond that the one goes that has waited longest for a request.",
    )
    proxy_per_client: int = Field(
        default=0, ge=0, description="Connections that one address may have to the node; 0: any number."
    )
    proxy_per_sandbox: int = Field(
        default=0,
        ge=0,
        description="Requests and WebSockets that may be under way to one sandbox; 0: any number.",
    )

    builds_at_once: int | None = Field(
        default=None,
        ge=1,
        description="Builds of templates that have a machine at a time; unset, one per processor.",
    )
    build_from_paths: bool = Field(
        default=False,
        description="Whether a build may name a directory or file of this host as its image (`oci:`, "
        "`archive:`, `rootfs:`): whoever has the API key then reads what the node can read.",
    )
    step_cache_mib: int = Field(
        default=20480, ge=0, description="MiB of steps of builds that are kept to be used again."
    )
    step_keep_s: float = Field(
        default=30 * 24 * 3600.0, ge=0, description="Seconds that a step nobody uses is kept at most."
    )
    shape_cache_mib: int = Field(
        default=20480,
        ge=0,
        description="MiB of snapshots of other sizes than their template's, and of images of sandboxes, that "
        "are kept to be started from again.",
    )
    shape_keep_s: float = Field(
        default=7 * 24 * 3600.0,
        ge=0,
        description="Seconds that one of these that nobody uses is kept at most.",
    )
    context_max_mib: int = Field(
        default=8192, ge=1, description="MiB of the largest upload of files that a build copies."
    )
    context_keep_s: float = Field(
        default=7 * 24 * 3600.0, ge=0, description="Seconds that uploaded files nobody uses are kept."
    )

    serial_log_bytes: int = Field(
        default=262144, ge=4096, description="Bytes kept of each machine's serial log."
    )

    @field_validator("home", "runtime", mode="after")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else Path(os.path.abspath(value.expanduser()))  # noqa: PTH100

    @model_validator(mode="after")
    def _limits_can_be(self) -> Settings:
        try:
            chosen(self.limits_most, NONE, NONE)
            chosen(self.limits, NONE, self.limits_most)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
        return self

    @cached_property
    def runtime_dir(self) -> Path:
        """The run-time directory in force."""
        return self.runtime or default_runtime(self.home)

    @property
    def database(self) -> Path:
        """The node's SQLite file."""
        return self.home / "aenv.db"

    @property
    def guest_dir(self) -> Path:
        """Where `aenv setup` puts kernel, initramfs and tools drive."""
        return self.home / "guest"

    @property
    def images_dir(self) -> Path:
        """Read-only root filesystems of templates."""
        return self.home / "images"

    @property
    def contexts_dir(self) -> Path:
        """Files that builds copy, by the hash that their clients gave them."""
        return self.home / "contexts"

    @property
    def cache_dir(self) -> Path:
        """Root filesystems of images by their content, shared by what is made from them."""
        return self.images_dir / "cache"

    @property
    def blobs_dir(self) -> Path:
        """Layers and documents from registries, by digest."""
        return self.home / "blobs"

    @property
    def machines_dir(self) -> Path:
        """Writable disk layers of machines, one directory each."""
        return self.home / "machines"

    @property
    def domain_name(self) -> str:
        """The domain without the port that it may carry."""
        return self.domain.partition(":")[0].removesuffix(".").lower()

    @property
    def tls_dir(self) -> Path:
        """The local certificate authority, if one was made, and the certificate it issued."""
        return self.home / "tls"

    @property
    def api_key_file(self) -> Path:
        """The generated API key (mode 0600)."""
        return self.home / "api-key"

    @property
    def audit_file(self) -> Path:
        """Who changed what: the newest file of the audit log (mode 0600)."""
        return self.home / "audit.log"

    @property
    def log_file(self) -> Path:
        """Log of a node in the background."""
        return self.home / "node.log"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = getattr(init_settings, "init_kwargs", {}).get("home")
        home = Path(given or os.environ.get("AENV_HOME") or default_home()).expanduser()
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, home / "aenv.toml")


def load(**overrides: Any) -> Settings:
    """The settings in force; `overrides` (from the command line) win over file and environment.

    Raises:
        InvalidRequest: a value is not allowed or a key is unknown; the message names each.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        parts = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise InvalidRequest(
            "settings: " + "; ".join(parts),
            remedy="check AENV_* variables and aenv.toml in the data directory",
        ) from None
    except ValueError as error:  # a TOML file that does not parse
        raise InvalidRequest(f"settings: {error}", remedy="mend aenv.toml in the data directory") from None
