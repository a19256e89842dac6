"""What `doctor` looks at of serving: the port, who may read the keys, the clock, the service of systemd."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from agentenv import run_record
from agentenv.config import Settings
from agentenv.errors import HostFault
from agentenv.host import service
from agentenv.host.capability import Capability
from agentenv.listening import bound

_TIME_ERROR = 5  # what adjtimex(2) returns of a clock that nothing keeps right
_TIMEX_BYTES = 512  # struct timex has 208


def port(settings: Settings) -> Capability:
    """The address of the API, which is free, or this directory's node's."""
    why = "the API and all traffic of sandboxes come in there"
    running = run_record.read(settings)
    if running is not None:
        return Capability("port", "ok", True, f"process {running.pid} serves {running.url}", why, "")
    try:
        with bound(settings.host, settings.port):
            pass
    except HostFault as error:
        return Capability("port", "missing", True, error.message, why, error.remedy or "")
    return Capability("port", "ok", True, f"{settings.host} port {settings.port} is free", why, "")


def keys(settings: Settings) -> Capability:
    """Files with keys, which nobody but their owner may read."""
    why = "whoever reads an API key has all sandboxes, whoever reads a certificate's key can pose as the node"
    open_ones = [str(path) for path in _secrets(settings) if _others_may_read(path)]
    if not open_ones:
        return Capability("key files", "ok", False, "read by their owner alone", why, "")
    detail = f"others may read {', '.join(open_ones)}"
    return Capability("key files", "degraded", False, detail, why, f"chmod go= {' '.join(open_ones)}")


def _secrets(settings: Settings) -> Iterator[Path]:
    yield from (settings.api_key_file, settings.database, settings.audit_file)
    if settings.tls_key is not None:
        yield settings.tls_key
    yield from settings.tls_dir.glob("*.key")
    if settings.api_key:
        yield settings.home / "aenv.toml"
        yield service.DEFAULTS


def _others_may_read(path: Path) -> bool:
    """Whether the mode lets somebody else read it, and its directory lets them get there."""
    try:
        directory = path.parent.stat()
        return bool(
            path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
            and directory.st_mode & (stat.S_IXGRP | stat.S_IXOTH)
        )
    except OSError:
        return False  # absent, or not ours to look at


def clock() -> Capability:
    """Whether something keeps the host's clock right, as the kernel is told by whatever does."""
    why = "guests take their time from it; with a wrong one certificates and signed URLs are refused"
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state < 0:
        return Capability(
            "clock", "degraded", False, f"cannot be told: {os.strerror(ctypes.get_errno())}", why, ""
        )
    if state != _TIME_ERROR:
        return Capability("clock", "ok", False, "is kept right", why, "")
    remedy = "apt install systemd-timesyncd or chrony; harmless where the hypervisor keeps the clock"
    return Capability("clock", "degraded", False, "nothing keeps it right", why, remedy)


def service_of(settings: Settings) -> Capability:
    """The service of systemd, where scripts/install made one of this data directory."""
    why = "it starts the node with the host, and again after a crash"
    found = service.of(settings)
    if found is None:
        return Capability("service", "ok", False, f"no {service.UNIT} for {settings.home}", why, "")
    if found.state == "failed":
        remedy = f"{service.LOG} -n 50 says why; then systemctl restart {service.UNIT}"
        return Capability("service", "degraded", False, f"{service.UNIT} failed", why, remedy)
    running = run_record.read(settings)
    if running is not None and found.pid != running.pid:
        detail = f"process {running.pid} serves {settings.home} beside {found}"
        remedy = f"aenv node stop --keep; systemctl start {service.UNIT}"
        return Capability("service", "degraded", False, detail, why, remedy)
    return Capability("service", "ok", False, str(found), why, "")
