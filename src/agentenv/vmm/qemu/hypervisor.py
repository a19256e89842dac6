"""QEMU as a hypervisor: launches, adopts and reaps machines of one node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import AenvError
from agentenv.records.ledger import Ledger
from agentenv.vmm.cgroup import Cgroups
from agentenv.vmm.machine import MachineSpec, SavedState
from agentenv.vmm.qemu import version
from agentenv.vmm.qemu.adopt import adopt
from agentenv.vmm.qemu.command import Accelerator, Emulation
from agentenv.vmm.qemu.files import view_of
from agentenv.vmm.qemu.fingerprint import fingerprint_of, require_same
from agentenv.vmm.qemu.launch import Site, launch
from agentenv.vmm.qemu.machine import QemuMachine
from agentenv.vmm.qemu.restore import restore
from agentenv.vmm.qemu.steps import Trace
from agentenv.vmm.resources import Resources
from agentenv.vmm.view import View

log = logging.getLogger(__name__)

_KVM = Path("/dev/kvm")
_REAP_AT_ONCE = 8


class Qemu:
    """QEMU's microvm machine, with KVM or with software emulation.

    Args:
        accelerator: what really works on this host (`agentenv.host`).
        tsc_khz: the host's TSC rate in kHz.
        cgroups: where limits are set; found out when not given.
        trace: told of each step of each launch and capture.
    """

    name = "qemu"

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        *,
        accelerator: Accelerator,
        tsc_khz: int,
        cgroups: Cgroups | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._settings = settings
        self._emulation = Emulation(accelerator, tsc_khz, settings.tcg_buffer_mib)
        self._trace = trace
        self.cgroups = cgroups or Cgroups.of_host(settings.cgroup)
        roots = (settings.machines_dir, settings.runtime_dir / "machines")
        self._resources = Resources(ledger, self.cgroups, roots)
        self._checked: tuple[str, int] | None = None
        self._version: version.Version | None = None
        # One per QEMU that there was: a launch under way may still need the one before.
        self._views: list[View] = []
        if self.cgroups.missing:
            log.warning("machines run with %s", self.cgroups.missing)

    async def boot(self, spec: MachineSpec) -> QemuMachine:
        """Start a machine cold; see `agentenv.vmm.qemu.launch.launch` for what it raises."""
        return await launch(spec, await self._site())

    async def restore(
        self, spec: MachineSpec, saved: SavedState, *, fingerprint: Mapping[str, str] | None = None
    ) -> QemuMachine:
        """A machine with a saved state, whose vcpus do not run yet.

        Raises:
            Incompatible: `fingerprint`, that of the capture, is not this specification's here.
            AenvError: see `agentenv.vmm.qemu.restore.restore`.
        """
        if fingerprint is not None:
            require_same(fingerprint, await self.fingerprint(spec))
        return await restore(spec, saved, await self._site())

    async def fingerprint(self, spec: MachineSpec) -> dict[str, str]:
        """All that must be the same where a capture of this machine is restored."""
        await self._site()
        assert self._version is not None
        return await asyncio.to_thread(fingerprint_of, spec, self._emulation, self._version)

    async def adopt(self, spec: MachineSpec) -> QemuMachine | None:
        """The running machine of that specification, or None; see `agentenv.vmm.qemu.adopt.adopt`."""
        return await adopt(spec, self._plain_site("qemu-system-x86_64"))

    async def reap(self, keep: set[str]) -> list[str]:
        """End and release every recorded machine but those in `keep`; returns the ids released.

        What cannot be released is logged, keeps its record, and is not in the answer.
        """
        owners = list(dict.fromkeys(entry.owner for entry in self._resources.entries()))
        room = asyncio.Semaphore(_REAP_AT_ONCE)

        async def one(owner: str) -> str | None:
            async with room:
                try:
                    await self._resources.release_all(owner)
                except (AenvError, OSError) as error:
                    log.error("machine %s could not be released: %s", owner, error)
                    return None
                return owner

        reaped = await asyncio.gather(*(one(owner) for owner in owners if owner not in keep))
        return [owner for owner in reaped if owner is not None]

    async def _site(self) -> Site:
        """The site with a QEMU that will do: asked for its version when the program changed."""
        path = version.locate(self._settings.qemu)
        seen = (path, Path(path).stat().st_mtime_ns)
        if seen != self._checked:
            found = await version.ask(path)
            version.require(found, self._emulation.accelerator)
            self._views.append(await asyncio.to_thread(view_of, path))
            self._checked, self._version = seen, found
        return replace(self._plain_site(path), view=self._views[-1])

    def _plain_site(self, program: str) -> Site:
        """One where nothing is launched."""
        kvm = _KVM if self._emulation.accelerator == "kvm" else None
        return Site(
            self._settings, self._resources, program, self._emulation, kvm_device=kvm, trace=self._trace
        )
