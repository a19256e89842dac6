"""What of ours there is on the host, as data: taken before and after, compared, told readably.

A scope says whose things are looked at: those of some data directories, so that tests of real
machines can run beside other nodes, or those of every AgentENV on the host. What belongs to a node
rather than to a machine has a kind that begins with "node".
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentenv.config import Settings, hash_path
from agentenv.network.node import REGISTRY

Things = dict[str, dict[str, str]]
"""By kind (`process`, `link`, ...), each thing's name with a description."""

_SLOT = r"aenv(%s)-\d+$"
_NODE = r"aenv(%s)$"

# What a node changes in its directories by itself while it runs.
_PASSING = re.compile(r"(aenv\.db.*|.*\.log|api-key|\.lock|.*\.new)$")


@dataclass(frozen=True)
class Scope:
    """Whose things are looked at.

    `homes` are data directories, or directories of data directories; `runtimes` are patterns of
    run-time directories. With `everyone`, processes, network and control groups of all homes count.
    """

    homes: tuple[Path, ...]
    runtimes: tuple[str, ...]
    everyone: bool = False

    @classmethod
    def of(cls, *nodes: Settings) -> Scope:
        """Of the nodes with these settings."""
        return cls(tuple(node.home for node in nodes), tuple(str(node.runtime_dir) for node in nodes))

    def owns(self, home: Path) -> bool:
        """Whether a data directory is one of these."""
        return home in self.homes or home.parent in self.homes

    def data_directories(self) -> list[Path]:
        """Those that exist now."""
        places = [place for home in self.homes if home.is_dir() for place in (home, *home.iterdir())]
        return [place for place in places if (place / "aenv.db").exists()]

    def roots(self) -> list[str]:
        """Data and run-time directories that exist now."""
        found = [str(home) for home in self.data_directories()]
        return found + [path for pattern in self.runtimes for path in glob.glob(pattern)]

    def indexes(self) -> str:
        """The host-wide numbers of these nodes, as a part of a regular expression."""
        if self.everyone:
            return r"\d+"
        found = []
        for file in REGISTRY.glob("[0-9]*"):
            try:
                if self.owns(Path(json.loads(file.read_text())["home"])):
                    found.append(file.name)
            except (OSError, ValueError):
                continue  # gone, or being written by its owner
        return "|".join(found) or "none"


def snapshot(scope: Scope) -> Things:
    """All things in the scope, now."""
    indexes = scope.indexes()
    slot, node = re.compile(_SLOT % indexes), re.compile(_NODE % indexes)
    roots = scope.roots()
    files = _files(roots)
    sockets = _sockets(roots)
    return {
        "process": _processes(scope),
        "namespace": _listed("/run/netns", slot),
        "link": _listed("/sys/class/net", slot),
        "mount": _mounts(roots, slot),
        "socket": {path: what for path, what in sockets.items() if "/machines/" in path},
        "file": {path: what for path, what in files.items() if "/machines/" in path},
        "cgroup": _cgroups(scope),
        "record": _records(scope),
        "node link": _listed("/sys/class/net", node),
        "node table": _nftables(node),
        "node socket": {path: what for path, what in sockets.items() if "/machines/" not in path},
        "node file": {path: what for path, what in files.items() if "/machines/" not in path},
    }


def diff(before: Things, after: Things) -> list[str]:
    """One line for each thing that appeared, vanished or changed."""
    lines = []
    for kind in sorted(before.keys() | after.keys()):
        old, new = before.get(kind, {}), after.get(kind, {})
        lines += [f"+ {kind} {name}: {new[name]}" for name in sorted(new.keys() - old.keys())]
        lines += [f"- {kind} {name}: {old[name]}" for name in sorted(old.keys() - new.keys())]
        for name in sorted(old.keys() & new.keys()):
            if old[name] != new[name]:
                lines.append(f"~ {kind} {name}: {old[name]} -> {new[name]}")
    return lines


def settle(before: Things, scope: Scope, limit_s: float) -> list[str]:
    """The differences that remain; waited for, since the kernel removes some things by and by.

    A node that was started meanwhile may go on; its machines may not.
    """
    deadline = time.monotonic() + limit_s
    pause = 0.01
    while (
        remaining := [line for line in diff(before, snapshot(scope)) if not _of_node(line)]
    ) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 2, 0.5)
    return remaining


def _of_node(line: str) -> bool:
    """Whether a difference is what a node does by itself: it starts, and clears snapshots away by and by."""
    return line.startswith("+ node ") or (line.startswith("- node file ") and "/snapshots/" in line)


def _processes(scope: Scope) -> dict[str, str]:
    """Machines' processes: those whose environment names the data directory and a machine."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # gone meanwhile
        variables = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
        home = os.fsdecode(variables.get(b"AENV_HOME", b""))
        if b"AENV_MACHINE" in variables and (scope.everyone or scope.owns(Path(home))):
            found[pid] = f"{home}: {command[:120]}"
    return found


def _listed(directory: str, names: re.Pattern[str]) -> dict[str, str]:
    try:
        return {name: directory for name in os.listdir(directory) if names.match(name)}
    except FileNotFoundError:
        return {}


def _nftables(names: re.Pattern[str]) -> dict[str, str]:
    nft = shutil.which("nft") or "/usr/sbin/nft"
    if not Path(nft).exists():
        return {}
    listed = subprocess.run([nft, "--stateless", "list", "ruleset"], capture_output=True, text=True)
    tables = re.split(r"^(?=table )", listed.stdout, flags=re.MULTILINE)
    found = {}
    for table in filter(None, (text.strip() for text in tables)):
        head = table.split("{", 1)[0].strip()
        if names.match(head.rsplit(" ", 1)[-1]):
            found[head] = " ".join(table.split())
    return found


def _mounts(roots: list[str], names: re.Pattern[str]) -> dict[str, str]:
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point, kind = line.split()[4], line.partition(" - ")[2].split()[0]
        parent, _, name = point.rpartition("/")
        if _below(point, roots) or (parent in ("/run/netns", "/var/run/netns") and names.match(name)):
            found[point] = kind
    return found


def _sockets(roots: list[str]) -> dict[str, str]:
    """Unix sockets by path; the machines' were bound through a descriptor, and show their names only
    in `_files`."""
    found: dict[str, str] = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and _below(fields[7], roots):
            found[fields[7]] = "a Unix socket"
    return found


def _below(path: str, roots: list[str]) -> bool:
    return any(path.startswith(f"{root}/") for root in roots)


def _cgroups(scope: Scope) -> dict[str, str]:
    tags = "|".join(f"{hash_path(home):08x}" for home in scope.data_directories())
    wanted = re.compile(r"aenv-[0-9a-f]{8}-" if scope.everyone else rf"aenv-({tags or 'none'})-")
    found = {}
    for place, directories, _ in os.walk("/sys/fs/cgroup"):
        for name in directories:
            if wanted.match(name):
                found[f"{place}/{name}"] = "a control group"
    return found


def _files(roots: list[str]) -> dict[str, str]:
    found = {}
    for root in roots:
        for place, directories, files in os.walk(root):
            if Path(place).name == "machines":
                found.update({f"{place}/{name}": "a machine's directory" for name in directories})
            found.update({f"{place}/{name}": "a file" for name in files if not _PASSING.match(name)})
    return found


def _records(scope: Scope) -> dict[str, str]:
    found = {}
    for database in (home / "aenv.db" for home in scope.data_directories()):
        for owner, kind, name in _rows(database):
            if owner != "node":
                found[f"{kind} {name}"] = f"of {owner}, in {database}"
    return found


def _rows(database: Path) -> Iterable[tuple[str, str, str]]:
    if not database.exists():
        return []
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        return connection.execute("SELECT owner, kind, name FROM resources").fetchall()
    except sqlite3.OperationalError:
        return []  # no schema yet
    finally:
        connection.close()
