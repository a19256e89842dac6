"""What a machine holds on the host: recorded before it is made, and released by its record.

A launch that fails, a machine that ends and the leftovers of a crash all go through `release_all`, which
needs nothing but the ledger's entries.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

from agentenv.errors import HostFault
from agentenv.limits import DiskLimits
from agentenv.records.ledger import Entry, Ledger, host_boot_id
from agentenv.vmm import cgroup, process
from agentenv.vmm.cgroup import Cgroups, Limits
from agentenv.vmm.process import Identity, Process

log = logging.getLogger(__name__)

# Marks a machine's process in its environment, to be found by when a crash came before its pid was
# recorded.
TOKEN = "AENV_MACHINE"
_KINDS = ("directory", "cgroup", "process")
_END_LIMIT_S = 20.0


class Resources:
    """The machines' part of the ledger.

    Args:
        roots: the directories that machines' directories lie in, first that of their disks; nothing outside
            is ever removed.
    """

    def __init__(self, ledger: Ledger, cgroups: Cgroups, roots: tuple[Path, ...]) -> None:
        self._ledger = ledger
        self._cgroups = cgroups
        self._roots = roots

    def make_directory(self, owner: str, path: Path) -> Entry:
        """A new directory, mode 0700."""
        self._check(path)
        entry = self._record(owner, "directory", str(path))
        path.mkdir(mode=0o700)
        return entry

    def record_cgroup(self, owner: str, name: str) -> Entry:
        """The groups that `make_cgroup` is about to make."""
        paths = [str(path) for path in self._cgroups.paths(name)]
        return self._record(owner, "cgroup", name, paths=paths)

    def make_cgroup(self, entry: Entry, limits: Limits) -> None:
        """Make the groups of an entry."""
        self._cgroups.make(entry.name, limits)

    def record_process(self, owner: str, token: str, **detail: object) -> Entry:
        """A process about to be started with `token` in its environment; `detail` is the caller's."""
        return self._record(owner, "process", token, **detail)

    def started(self, entry: Entry, identity: Identity) -> Entry:
        """Add to the record which process it became."""
        return self._ledger.amend(entry, pid=identity.pid, start=identity.start)

    def note(self, owner: str, **detail: object) -> None:
        """Add to, or change, what is recorded with the owner's process."""
        for entry in self.entries(owner):
            if entry.kind == "process":
                self._ledger.amend(entry, **detail)

    def noted(self, owner: str) -> dict[str, Any]:
        """What is recorded with the owner's process."""
        details = [entry.detail for entry in self.entries(owner) if entry.kind == "process"]
        return details[-1] if details else {}

    def process(self, owner: str) -> Process | None:
        """The owner's recorded process if it still runs."""
        for entry in self.entries(owner):
            if entry.kind == "process":
                return _running(entry)
        return None

    def groups(self, owner: str) -> list[Path]:
        """The owner's recorded groups."""
        return [
            Path(path)
            for entry in self.entries(owner)
            if entry.kind == "cgroup"
            for path in entry.detail["paths"]
        ]

    def limit_disk(self, owner: str, limits: DiskLimits) -> None:
        """Limit the owner's groups on the disk that its files are on, as far as the host can."""
        device = cgroup.device_of(self._roots[0])
        if device is None:
            return
        try:
            self._cgroups.limit_disk(self.groups(owner), device, limits)
        except OSError as error:
            # The hypervisor keeps the limits itself; these are for one that does not.
            log.warning("the control groups of machine %s take no limits of its disk: %s", owner, error)

    def entries(self, owner: str | None = None) -> list[Entry]:
        """Entries made here, of one owner or of all, oldest first."""
        return [
            entry
            for entry in self._ledger.entries(owner=owner)
            if entry.kind in _KINDS and entry.detail.get("room") == "vmm"
        ]

    async def release_all(self, owner: str) -> None:
        """Make sure that all the owner holds is gone, the newest first, then strike it. Repeatable.

        Nothing is struck before: where a full disk keeps the ledger from being written, the machine's
        own files make room.
        """
        entries = self.entries(owner)[::-1]
        for entry in entries:
            await self._end(entry)
        for entry in entries:
            self._ledger.strike(entry)

    async def _end(self, entry: Entry) -> None:
        if entry.kind == "process":
            await self._end_process(entry)
        elif entry.kind == "cgroup":
            for path in entry.detail["paths"]:
                await cgroup.remove(Path(path))
        else:
            await self._remove_directory(Path(entry.name))

    def _record(self, owner: str, kind: str, name: str, **detail: object) -> Entry:
        return self._ledger.record(owner, kind, name, room="vmm", **detail)

    async def _end_process(self, entry: Entry) -> None:
        running = _running(entry)
        if running is None:
            return
        running.kill()
        try:
            async with asyncio.timeout(_END_LIMIT_S):
                await running.wait()
        except TimeoutError:
            raise HostFault(
                f"process {running.pid} of machine {entry.owner} does not end although it was killed",
                remedy="look at what it waits for in /proc/PID/stack; the record is kept",
            ) from None
        finally:
            running.release()

    async def _remove_directory(self, path: Path) -> None:
        self._check(path)
        try:
            # On a thread: giving back the blocks of a memory file takes milliseconds.
            await asyncio.to_thread(shutil.rmtree, path)
        except FileNotFoundError:
            pass

    def _check(self, path: Path) -> None:
        if path.parent not in self._roots:
            raise HostFault(f"{path} is not a machine's directory: it does not lie in any of {self._roots}")


def _running(entry: Entry) -> Process | None:
    detail = entry.detail
    if "pid" in detail:
        return process.watch(Identity(detail["pid"], detail["start"], entry.boot_id))
    identity = process.find(TOKEN, entry.name) if entry.boot_id == host_boot_id() else None
    return process.watch(identity) if identity else None
