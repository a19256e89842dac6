"""The service of systemd that scripts/install makes, as far as a data directory is concerned."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentenv.config import Settings, default_home
from agentenv.errors import HostFault, OutcomeUnknown

UNIT = "agentenv.service"
GROUP = "/system.slice/agentenv-machines.service"  # the delegated control group of its machines
LOG = "journalctl -u agentenv"
DEFAULTS = Path("/etc/default/agentenv")
_BOOTED = Path("/run/systemd/system")  # sd_booted(3)
_PROPERTIES = ("LoadState", "ActiveState", "UnitFileState", "MainPID", "Environment", "EnvironmentFiles")
_ASK_LIMIT_S = 10.0
_DO_LIMIT_S = 480.0  # more than the unit's own for a stop and a start

Verb = Literal["start", "stop", "restart"]


@dataclass(frozen=True)
class Service:
    """The unit as systemd sees it: `state` as `active` or `failed`, `pid` of the node or 0, `enabled`
    whether it is started with the host."""

    home: Path
    state: str
    pid: int
    enabled: bool

    def __str__(self) -> str:
        return f"{UNIT} ({self.state}{', started with the host' if self.enabled else ''})"

    @property
    def is_ending(self) -> bool:
        """Whether systemd is ending it, as when the host goes down: then it would not be asked again."""
        return self.state == "deactivating"


def of(settings: Settings) -> Service | None:
    """The service that this data directory is of; None where systemd does not run the host, has no such
    unit, or has it for another directory."""
    if not _BOOTED.is_dir():
        return None
    try:
        told = subprocess.run(
            ["systemctl", "show", UNIT, f"--property={','.join(_PROPERTIES)}"],
            capture_output=True,
            text=True,
            timeout=_ASK_LIMIT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None  # a systemd that does not answer runs no node for us
    found = read(told, _text(DEFAULTS))
    return found if found is not None and found.home == settings.home else None


def read(told: str, defaults: str) -> Service | None:
    """What `systemctl show` told of the unit; `defaults` is the text of its file of variables, which win."""
    properties = dict(line.partition("=")[::2] for line in told.splitlines())
    if properties.get("LoadState") != "loaded":
        return None
    words = shlex.split(properties.get("Environment", ""))
    if str(DEFAULTS) in properties.get("EnvironmentFiles", ""):
        words += shlex.split(defaults, comments=True)
    homes = [word.removeprefix("AENV_HOME=") for word in words if word.startswith("AENV_HOME=")]
    return Service(
        home=Path(homes[-1]) if homes else default_home(),
        state=properties.get("ActiveState", ""),
        pid=int(properties.get("MainPID") or 0),
        enabled=properties.get("UnitFileState") == "enabled",
    )


def ask(verb: Verb) -> None:
    """Have systemd start, stop or restart it, and wait until that is done. Blocking, for root.

    Starts before do not count against it: what systemd limits is starting after crashes.

    Raises:
        HostFault: it did not succeed. OutcomeUnknown: it took too long.
    """
    try:
        subprocess.run(
            ["systemctl", "reset-failed", UNIT], capture_output=True, timeout=_ASK_LIMIT_S, check=False
        )
        done = subprocess.run(
            ["systemctl", verb, UNIT], capture_output=True, text=True, timeout=_DO_LIMIT_S, check=False
        )
    except OSError as error:
        raise HostFault(f"systemctl cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise OutcomeUnknown(
            f"systemctl {verb} {UNIT} was not done within {_DO_LIMIT_S:.0f} s", remedy=f"see {LOG}"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().partition("\n")[0]
        raise HostFault(f"{UNIT} did not {verb}: {said}", remedy=f"{LOG} -n 50; aenv doctor")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # absent, or root's alone: then what the unit says stands
