"""A root filesystem out of a distribution's packages: `debootstrap:SUITE`.

Done by mmdebstrap, which takes half the time of debootstrap and lets nothing start in the tree. It
reaches the mirror as the host's apt does: same mirror, proxy, certificates and credentials.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentenv.errors import AenvError, HostFault, HostIncapable, InvalidRequest, StoreFull
from agentenv.image import aptsource
from agentenv.image.aptsource import AptSource, Distribution
from agentenv.image.programs import Outcome, in_thread, run
from agentenv.image.tree import host_faults, remove_scratch

ATTEMPTS = 3
RETRY_DELAYS_S = (3.0, 10.0)

DPKG_FILE = "/etc/dpkg/dpkg.cfg.d/lean"

# Kept in the guest as well: what is installed there later is as lean, and as quick.
DPKG_OPTIONS = (
    "force-unsafe-io",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
)


@dataclass(frozen=True)
class System:
    """What a bootstrapped system holds beyond the suite's minimum.

    `prepare` is called with the finished tree, in a thread; `identity` names both, and changes
    whenever they would make another tree.
    """

    packages: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda root: None
    identity: str = "minimal"
    env: dict[str, str] = field(default_factory=dict)


MINIMAL = System()


@dataclass(frozen=True)
class Host:
    """What the host's apt is configured with."""

    sources: tuple[AptSource, ...]
    options: tuple[str, ...]

    @classmethod
    async def read(cls, etc: Path = Path("/etc/apt")) -> Host:
        """Read the sources below `etc`, and the options from `apt-config dump`."""
        options: list[str] = []
        outcome = await run(["apt-config", "dump"], on_line=options.append)
        dump = "\n".join(options) if outcome.status == 0 else ""
        return cls(tuple(_sources(etc)), aptsource.acquire_options(dump) + tuple(_credentials(etc)))


def _sources(etc: Path) -> list[AptSource]:
    found: list[AptSource] = []
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if path.is_file() and path.suffix in (".list", ".sources"):
            text = path.read_text(errors="replace")
            parse = aptsource.parse_deb822 if path.suffix == ".sources" else aptsource.parse_list
            found += [_plain(source) for source in parse(text)]
    return found


def _plain(source: AptSource) -> AptSource:
    """Cloud images name their mirror in a file of the host's, which the tree will not have."""
    path = Path(source.uri.removeprefix("mirror+file:").replace("//", "/"))
    if source.uri.startswith("mirror+file:") and path.is_file():
        uri = aptsource.first_uri(path.read_text(errors="replace"))
        return AptSource(uri or source.uri, source.suites, source.components, source.signed_by)
    return source


def _credentials(etc: Path) -> list[str]:
    options = []
    if (etc / "auth.conf").is_file():
        options.append(f'Dir::Etc::netrc "{etc}/auth.conf";')
    if any((etc / "auth.conf.d").glob("*")):
        options.append(f'Dir::Etc::netrcparts "{etc}/auth.conf.d";')
    return options


def arguments(
    suite: str, target: Path, system: System, distribution: Distribution, keyring: str, host: Host
) -> list[str]:
    """The command line of mmdebstrap, in a mount and process namespace that die with this process."""
    options = ('Acquire::Retries "3";', *host.options)
    return [
        *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"),
        *("mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase", "--architectures=amd64"),
        f"--keyring={keyring}",
        *([f"--include={','.join(system.packages)}"] if system.packages else []),
        *(f"--aptopt={option}" for option in options),
        # As a --dpkgopt, mmdebstrap would pass every essential package through a slow filter: 25 s.
        f'--extract-hook=printf "%s\\n" {shlex.join(DPKG_OPTIONS)} >"$1{DPKG_FILE}"',
        suite,
        str(target),
        *aptsource.lines(aptsource.plan(suite, distribution, host.sources)),
    ]


Failure = Literal["suite", "transient", "space", "package", "other"]
_SIGNS: tuple[tuple[Failure, str], ...] = (
    ("space", r"No space left on device|You don't have enough free space"),
    (
        "transient",
        r"Temporary failure resolving|Could not (connect|resolve)|Unable to connect"
        r"|Connection (timed out|failed|reset|refused)|Network is unreachable|Error reading from server"
        r"|Hash Sum mismatch|unexpected size|Mirror sync in progress|\b50[0234] ",
    ),
    ("suite", r"does not have a Release file|404 +Not Found"),
    ("package", r"Unable to locate package|has no installation candidate"),
)


def failure_of(output: str) -> Failure:
    """What kind of failure the output of mmdebstrap tells."""
    return next((kind for kind, sign in _SIGNS if re.search(sign, output)), "other")


async def bootstrap(
    suite: str, target: Path, system: System, scratch: Path, progress: Callable[[str], None]
) -> None:
    """Install `suite` with `system` into `target`, a directory that does not exist yet.

    Raises:
        InvalidRequest: the suite is not known, here or to the mirror.
        HostIncapable: not root, or a program or keyring is missing.
        StoreFull: no space.
        HostFault: the mirror cannot be reached, or the installation failed.
    """
    distribution = supported(suite)
    keyring = next((path for path in distribution.keyrings if Path(path).is_file()), None)
    _require(keyring, distribution)
    assert keyring is not None
    host = await Host.read()
    command = arguments(suite, target, system, distribution, keyring, host)
    environment = {**os.environ, "TMPDIR": str(scratch), "DEBIAN_FRONTEND": "noninteractive"}
    report = _Reporter(progress)
    for attempt in range(ATTEMPTS):
        outcome = await run(command, environment, report)
        if outcome.status == 0:
            break
        failure = failure_of(outcome.stderr)
        if failure != "transient" or attempt == ATTEMPTS - 1:
            raise explain(failure, suite, outcome, host)
        progress("the mirror did not answer as it should; trying again")
        await in_thread(lambda: remove_scratch(target))
        await asyncio.sleep(RETRY_DELAYS_S[attempt])
    await in_thread(lambda: _prepare(target, system))


def supported(suite: str) -> Distribution:
    """The suite's distribution. Raises InvalidRequest for one that is not known."""
    distribution = aptsource.distribution_of(suite)
    if distribution is None:
        known = ", ".join(aptsource.DEBIAN.suites + aptsource.UBUNTU.suites)
        raise InvalidRequest(f"the suite {suite} is not known", remedy=f"take one of: {known}")
    return distribution


def _require(keyring: str | None, distribution: Distribution) -> None:
    if os.geteuid() != 0:
        raise HostIncapable("installing a root filesystem needs root", remedy="run the command with sudo")
    if keyring is None:
        package = "debian-archive-keyring" if distribution.name == "debian" else "ubuntu-keyring"
        raise HostIncapable(
            f"the keys of {distribution.name}'s archive are not on this host",
            remedy=f"apt-get install {package}",
        )


class _Reporter:
    """Passes on what mmdebstrap says of its own steps, and drops what its programs say."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress

    def __call__(self, line: str) -> None:
        text = line.removeprefix("I: ")
        if text != line and not text.startswith(("automatically", "success", "removing", "running --")):
            self._progress(text.rstrip("."))


def explain(failure: Failure, suite: str, outcome: Outcome, host: Host) -> AenvError:
    """The error to raise for a failed run."""
    if outcome.status is None or "mmdebstrap: No such file" in outcome.stderr:
        return HostIncapable("there is no mmdebstrap", remedy="apt-get install mmdebstrap")
    tail = "; ".join(_worst_lines(outcome.stderr))
    match failure:
        case "suite":
            return InvalidRequest(
                f"the mirror has no suite {suite}: {tail}",
                remedy="check the suite, and the host's apt sources",
            )
        case "space":
            return StoreFull("no space left to install packages", remedy="free space in the data directory")
        case "transient":
            return HostFault(
                f"the mirror cannot be reached: {tail}",
                remedy="see whether `apt-get update` works here; mirror and proxy are taken from /etc/apt",
            )
        case "package":
            return InvalidRequest(f"{suite} lacks a package: {tail}")
        case "other":
            return HostFault(f"mmdebstrap failed ({outcome.status}): {tail}")


def _worst_lines(output: str) -> Sequence[str]:
    marked = [line.strip() for line in output.splitlines() if line.startswith(("E: ", "Err:", "W: "))]
    return (marked or [line for line in output.splitlines() if line.strip()])[-4:]


# What the essential packages bring before dpkg knows its options, by the same rules.
_EXCLUDED = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale")
_INCLUDED = ("copyright", "locale.alias")

_LEFT_BEHIND = (
    "etc/apt/apt.conf.d/99mmdebstrap",
    "var/cache/ldconfig/aux-cache",
    "etc/resolv.conf",
    "etc/hostname",
)


def _prepare(target: Path, system: System) -> None:
    with host_faults(str(target)):
        _tidy(target)
        system.prepare(target)


def _tidy(root: Path) -> None:
    """Remove what belongs to the host or to the installation: the proxy's address may hold a password."""
    for name in _LEFT_BEHIND:
        (root / name).unlink(missing_ok=True)
    for name in _EXCLUDED:
        _thin_out(root / name)
    for path in (root / "var/log").rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.unlink()
    (root / "etc/resolv.conf").touch()  # filled by the guest's init
    (root / "etc/hostname").write_text("localhost\n")


def _thin_out(directory: Path) -> None:
    """Remove all files but those that are kept, and directories that are empty then."""
    for above, names, files in os.walk(directory, topdown=False):
        for name in files:
            if name not in _INCLUDED:
                Path(above, name).unlink()
        for path in (Path(above, name) for name in names):
            if path.is_symlink():
                path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
