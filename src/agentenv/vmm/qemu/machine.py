"""A running QEMU machine: watched, ended, let go."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from agentenv.errors import AenvError, Conflict, HostFault
from agentenv.limits import DiskLimits
from agentenv.vmm.console import Console
from agentenv.vmm.machine import Capture, Exit, MachineSpec
from agentenv.vmm.output import BoundedOutput
from agentenv.vmm.process import Process
from agentenv.vmm.qemu import overlay, throttle
from agentenv.vmm.qemu.capture import capture
from agentenv.vmm.qemu.lineage import Lineage
from agentenv.vmm.qemu.qmp import Qmp
from agentenv.vmm.qemu.steps import Steps, Trace
from agentenv.vmm.resources import Resources
from agentenv.vmm.settle import settled

log = logging.getLogger(__name__)

# Socket data is there when the process is gone; this bounds the wait for the loop to read it.
_LAST_WORDS_LIMIT_S = 5.0
_END_LIMIT_S = 20.0
_STOP_LIMIT_S = 60.0  # requests under way end first, on a busy disk

_PANIC = re.compile(r"Kernel panic[^\r\n]*")
_GUEST_CAUSES = ("guest-shutdown", "guest-reset", "guest-panic")


class QemuMachine:
    """The machine protocol over one QEMU process.

    `console` is the guest's serial console. `phases` has the seconds that each step of the launch
    took; it is empty for an adopted machine.
    """

    def __init__(
        self,
        spec: MachineSpec,
        process: Process,
        qmp: Qmp,
        console: Console,
        output: BoundedOutput,
        resources: Resources,
        lineage: Lineage,
        trace: Trace | None = None,
        phases: Mapping[str, float] | None = None,
    ) -> None:
        self.spec = spec
        self.qmp = qmp
        self.lineage = lineage
        self.phases = phases or {}
        self._trace = trace
        self._process = process
        self.console = console
        self._output = output
        self._resources = resources
        self._ended_here = False
        self._detached = False
        self._shutdown_cause = ""
        self._ending: asyncio.Task[None] | None = None
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        qmp.on_event(self._note)
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {spec.id}")

    @property
    def pid(self) -> int:
        """The hypervisor's process."""
        return self._process.pid

    @property
    def exited(self) -> bool:
        """Whether the process is known to be gone."""
        return self._process.exited

    @property
    def stands_on(self) -> frozenset[Path]:
        """The files that it needs besides its own; see the protocol."""
        only_read = (drive.layers for drive in self.spec.drives if not drive.writable)
        return self.lineage.stands_on | {layer.path for layers in only_read for layer in layers}

    async def run(self) -> None:
        """Let the vcpus run; see the protocol."""
        if self.lineage.shared():
            raise Conflict(
                f"machine {self.spec.id} was captured to end: what it would write belongs to the capture",
                remedy="remove the capture, or end the machine",
            )
        await self.qmp.execute("cont")
        if not self.lineage.ran:
            await self._grow()
            # After the fact: when the node dies between, the machine is seen to run.
            self._pass_to(replace(self.lineage, ran=True))

    async def stop(self) -> None:
        """Stop the vcpus, and let disk requests come to rest."""
        await self.qmp.execute("stop", timeout=_STOP_LIMIT_S)

    async def capture(self, into: Path, *, final: bool) -> Capture:
        """Write the state of the stopped machine to `into`; see the protocol. Goes on when cancelled."""
        return await settled(self._capture(into, final))

    async def limit_disk(self, limits: DiskLimits) -> None:
        """Limit all disks together; see the protocol."""
        await self.qmp.together(*throttle.commands(limits, len(self.spec.drives)))
        self._resources.limit_disk(self.spec.id, limits)

    async def wait(self) -> Exit:
        """Return when the process is gone.

        Raises:
            HostFault: the machine was let go by `detach` first.
        """
        return await asyncio.shield(self._exit)

    async def end(self) -> None:
        """Kill the process if it runs and release all that the launch made; goes on when cancelled.

        Raises:
            HostFault: something could not be released; its record stays and `end` may be repeated.
        """
        if self._ending is None or (self._ending.done() and _failed(self._ending)):
            self._ending = asyncio.create_task(self._end(), name=f"end {self.spec.id}")
        await asyncio.shield(self._ending)

    def detach(self) -> None:
        """Let go: the process runs on, and another node process can adopt it."""
        self._detached = True
        self._watcher.cancel()
        self._close()
        if not self._exit.done():
            self._exit.set_exception(HostFault(f"machine {self.spec.id} was let go"))
            self._exit.exception()  # seen; whoever waits gets it all the same

    def console_tail(self) -> str:
        """The end of the guest's serial output."""
        return self.console.tail(2048)

    def on_console(self, callback: Callable[[bytes], None]) -> None:
        """Call back with what comes from the guest's console, from now on."""
        self.console.listener = callback

    def on_event(self, callback: Callable[[str, dict[str, object]], None]) -> None:
        """Call back with the name and data of each QMP event, from now on."""
        self.qmp.on_event(callback)

    async def _grow(self) -> None:
        """Give the disk the size that was asked for, if that is another one than it was saved with.

        Not before it runs: the disk belongs to whoever sends a state until then, thinks QEMU.
        """
        size = self.spec.disk_mib * overlay.MIB
        if self.lineage.image and size != overlay.size_at_start(self.spec, saved=True):
            await self.qmp.execute("block_resize", {"node-name": self.lineage.disk.stem, "size": size})

    async def _capture(self, into: Path, final: bool) -> Capture:
        steps = Steps(self._trace)
        captured, lineage = await capture(
            self.spec, self.pid, self.qmp, self.lineage, into, steps, final=final
        )
        if lineage != self.lineage:
            self._pass_to(lineage)
        log.debug(
            "machine %s: %d pages captured: %s",
            self.spec.id,
            captured.pages,
            " ".join(f"{name}={seconds * 1e3:.1f}" for name, seconds in captured.seconds.items()),
        )
        return captured

    def _pass_to(self, lineage: Lineage) -> None:
        self.lineage = lineage
        if lineage.image is None and not lineage.sealed:
            return  # all that a booted machine's note would say is known without it
        try:
            self._resources.note(self.spec.id, **lineage.detail())
        except AenvError as error:
            # It happened all the same; an adopted machine's next capture would only be larger.
            log.warning("machine %s: what it consists of could not be noted: %s", self.spec.id, error)

    async def _end(self) -> None:
        if self._detached:
            raise HostFault(f"machine {self.spec.id} was let go, and is not this node's to end")
        if not self._process.exited:
            self._ended_here = True
            self._process.kill()
        await asyncio.wait({self._exit}, timeout=_END_LIMIT_S)
        await self._resources.release_all(self.spec.id)

    async def _watch(self) -> None:
        status = await self._process.wait()
        try:
            async with asyncio.timeout(_LAST_WORDS_LIMIT_S):
                await self.qmp.wait_closed()
        except TimeoutError:
            log.warning("machine %s: the QMP connection outlived the process", self.spec.id)
        self.console.drain()
        result = verdict(
            ended_here=self._ended_here,
            status=status,
            cause=self._shutdown_cause,
            last_words=self._output.last_line(),
            console=self.console.tail(4096),
        )
        if result.reason == "crashed":
            log.warning("machine %s: %s", self.spec.id, result.detail)
        self._close()
        self._exit.set_result(result)

    def _note(self, name: str, data: Mapping[str, object]) -> None:
        if name == "SHUTDOWN":
            self._shutdown_cause = str(data.get("reason", ""))

    def _close(self) -> None:
        self.qmp.close()
        self.console.close()
        self._output.close()
        self._process.release()


def verdict(*, ended_here: bool, status: int | None, cause: str, last_words: str, console: str) -> Exit:
    """Why a process ended.

    `cause` is the reason in QEMU's SHUTDOWN event, if there was one (qapi/run-state.json); `last_words`
    the last line of its standard error; `console` the end of the guest's serial output.
    """
    if ended_here:
        return Exit("ended", status, "ended by the node")
    panic = _PANIC.search(console)
    if cause in _GUEST_CAUSES and (panic or cause == "guest-panic"):
        return Exit("crashed", status, f"the guest's kernel failed: {panic[0] if panic else cause}")
    if cause in _GUEST_CAUSES:
        return Exit(
            "shutdown", status, "the guest " + ("shut down" if cause == "guest-shutdown" else "rebooted")
        )
    if cause:
        how = f"QEMU was told to end by the host ({cause})"
    elif status is not None and status < 0:
        how = f"QEMU was killed by signal {-status}"
    else:
        how = "QEMU ended" if status is None else f"QEMU ended with status {status}"
    lines = console.strip().splitlines()
    said = [f"its last words: {last_words}"] if last_words else []
    said += [f"last on the console: {lines[-1].strip()}"] if lines else []
    return Exit("crashed", status, "; ".join([how, *said]))


def _failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None
