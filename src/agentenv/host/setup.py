"""`setup`: make this host's data directory ready for a node. Repeating it changes nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import AenvError, HostFault, StoreFull
from agentenv.guestimage import build as guest
from agentenv.guestimage.steps import Report, Step, step
from agentenv.host import accelerator
from agentenv.progress import Progress, silent

LONG = {"kernel": "looking for the guest kernel"}


@dataclass(frozen=True)
class Outcome:
    """What setup came to: the parts that it made or changed."""

    changed: tuple[str, ...]


def setup(
    settings: Settings,
    say: Progress = silent,
    *,
    refresh: bool = False,
    local_ca: bool = False,
) -> Outcome:
    """Make the directories, the guest's files, and the choice of accelerator.

    Blocking. `say` gets a line for every step that ends, with the time it took, and one as a long
    step begins; with `refresh`, a newer guest kernel is looked for; with `local_ca`, a certificate
    authority for the node's domain is made.

    Raises:
        InvalidRequest: there can be no certificate for the node's domain.
        HostIncapable: a program or package is missing; the error says how to get it.
        HostFault: something that should work failed, as a download.
        StoreFull: no space in the data directory or for temporary files.
    """
    changed: list[str] = []

    def progress(report: Report) -> None:
        line = describe(report)
        if line:
            say(line)

    with step("directories", progress) as current:
        made = make_directories(settings)
        current.changed = bool(made)
        current.detail = str(settings.home)
        changed += made
    if local_ca:
        with step("authority", progress) as current:
            changed += make_authority(settings, current)
    with filesystem_faults(settings):
        changed += guest.build(settings, progress, refresh=refresh).made
    with step("accelerator", progress) as current:
        current.detail = str(accelerator.choose(settings))
    return Outcome(tuple(changed))


def make_authority(settings: Settings, current: Step) -> list[str]:
    """Make the local certificate authority, if there is none for the node's domain; returns what changed."""
    from agentenv.tls import authority

    current.changed = authority.establish(settings.tls_dir, settings.domain_name)
    current.detail = f"for {settings.domain_name}, in {settings.tls_dir}"
    return [str(settings.tls_dir)] if current.changed else []


@contextmanager
def filesystem_faults(settings: Settings) -> Iterator[None]:
    """Turn what the filesystem refuses while files are made into an error that tells what to do."""
    try:
        yield
    except AenvError:
        raise
    except OSError as error:
        # shutil gathers many failed copies into one error, which has no number but their texts.
        text = error.strerror or str(error)[:300]
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in text:
            raise StoreFull(
                f"no space left to make the guest's files in {settings.guest_dir}",
                remedy="free some there and in /tmp, or set AENV_HOME to another place",
            ) from error
        raise HostFault(
            f"cannot make the guest's files in {settings.guest_dir}: {text}",
            remedy="aenv doctor looks at the data directory; /tmp must be writable as well",
        ) from error


def describe(report: Report) -> str:
    """A report as a line for people; empty for one that says nothing."""
    match report.state:
        case "begun":
            return LONG.get(report.step, "")
        case "unchanged":
            return f"{report.step}: unchanged ({report.detail})"
        case "failed":
            return f"{report.step}: failed"
        case _:
            return f"{report.step}: {report.detail} ({report.seconds:.1f} s)"


def directories(settings: Settings) -> dict[Path, int]:
    """Each directory of the node and its mode.

    A machine's process gets its files as open descriptors, so nobody else need reach them by name.
    """
    return {
        settings.home: 0o700,
        settings.guest_dir: 0o755,
        settings.images_dir: 0o700,
        settings.machines_dir: 0o700,
    }


def make_directories(settings: Settings) -> list[str]:
    """Make what is absent of the node's directories and give each its mode; returns what changed."""
    changed = []
    for path, mode in directories(settings).items():
        try:
            if not path.is_dir():
                path.mkdir(parents=True)
            elif path.stat().st_mode & 0o7777 == mode:
                continue
            path.chmod(mode)
        except OSError as error:
            remedy = "run as root, or set AENV_HOME to a directory of your own" if os.geteuid() else None
            raise HostFault(f"cannot make {path}: {error.strerror}", remedy=remedy) from None
        changed.append(str(path))
    return changed
