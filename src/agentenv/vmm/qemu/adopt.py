"""Taking over a machine that an earlier life of this node launched."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack

from agentenv.errors import HostFault
from agentenv.vmm import cgroup, sockets
from agentenv.vmm.console import Console, SerialLog
from agentenv.vmm.machine import MachineSpec
from agentenv.vmm.output import BoundedOutput
from agentenv.vmm.process import Process
from agentenv.vmm.qemu.capture import top_nodes
from agentenv.vmm.qemu.launch import Site
from agentenv.vmm.qemu.lineage import Lineage, disks_of
from agentenv.vmm.qemu.machine import QemuMachine
from agentenv.vmm.qemu.qmp import Qmp, QmpBroken, QmpRefused

log = logging.getLogger(__name__)

_ANSWER_LIMIT_S = 30.0
# What a machine that was restored shows until it runs, and again when it is stopped later.
_BEFORE_RUNNING = ("inmigrate", "paused", "prelaunch")
_ENDING_LIMIT_S = 3.0  # a killed process closes its sockets some time before it is gone


async def adopt(spec: MachineSpec, site: Site) -> QemuMachine | None:
    """The machine of that specification if its process still runs, else None.

    Its vcpus run from then on: a boot that was cut off is finished, and a machine that was stopped to
    be captured goes on. One that was restored and never ran is ended: nobody was told of it. Captures
    that were not recorded as whole are to be removed before.

    Raises:
        Conflict: it was captured to end, and the capture exists; `reap` ends it.
        HostFault: the process runs but cannot be controlled; `reap` ends it.
        OutcomeUnknown: it does not answer within half a minute.
    """
    process = site.resources.process(spec.id)
    if process is None:
        return None
    undo = ExitStack()
    undo.callback(process.release)
    try:
        return await _take_over(spec, site, process, undo)
    except BaseException:
        undo.close()
        raise


async def _take_over(spec: MachineSpec, site: Site, process: Process, undo: ExitStack) -> QemuMachine | None:
    directory, runtime = site.machine_dir(spec.id), site.socket_dir(spec.id)
    try:
        output = BoundedOutput.of_process(process.pid)
        undo.callback(output.close)
        cgroup.join(site.resources.groups(spec.id), process.pid)
        serial = SerialLog(directory / "serial.log", site.settings.serial_log_bytes)
        undo.callback(serial.close)
        console = Console(sockets.connect(runtime / "console"), serial)
        undo.callback(console.close)
        qmp = await Qmp.connect(runtime / "qmp", timeout=_ANSWER_LIMIT_S)
        undo.callback(qmp.close)
    except (OSError, QmpBroken) as error:
        if await _is_ending(process):
            undo.close()
            return None
        raise HostFault(f"process {process.pid} of machine {spec.id} cannot be adopted: {error}") from error
    status = (await qmp.execute("query-status"))["status"]
    lineage = await _lineage(spec, site, qmp)
    if lineage.image and not lineage.ran and status in _BEFORE_RUNNING:
        undo.close()
        await site.resources.release_all(spec.id)
        log.info("machine %s had been restored and never ran: ended", spec.id)
        return None
    await _tidy(lineage, qmp)
    machine = QemuMachine(spec, process, qmp, console, output, site.resources, lineage, site.trace)
    undo.pop_all()
    undo.callback(machine.detach)
    if status != "running" or not lineage.ran:
        await machine.run()
    log.info("machine %s adopted: process %d, %s", spec.id, process.pid, status)
    return machine


async def _lineage(spec: MachineSpec, site: Site, qmp: Qmp) -> Lineage:
    directory = site.machine_dir(spec.id)
    tops = await top_nodes(qmp, disks_of(directory, spec))
    try:
        return Lineage.noted(directory, spec, site.resources.noted(spec.id), tops)
    except (ValueError, OSError) as error:
        raise HostFault(f"the disk of machine {spec.id} is not as it should be: {error}") from error


async def _tidy(lineage: Lineage, qmp: Qmp) -> None:
    """Remove the layers that a capture was about to go on in when it was cut off."""
    for disk in lineage.disks:
        try:
            await qmp.execute("blockdev-del", {"node-name": disk.node(1)})
        except QmpRefused:
            pass  # there is none, as is the rule
        disk.file(1).unlink(missing_ok=True)


async def _is_ending(process: Process) -> bool:
    try:
        async with asyncio.timeout(_ENDING_LIMIT_S):
            await process.wait()
    except TimeoutError:
        return False
    return True
