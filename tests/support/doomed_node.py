"""A node process that launches a machine and is killed: `doomed_node.py SPEC.json`.

`die_at` names the step of the launch or capture at whose start it kills itself (with `:complete`, at its
end), or `recording` for the moment between the start of the hypervisor and the record of its pid;
without it the machine is launched and the process then waits to be killed.

With `state` (device state, then memory layers) the machine is restored, and runs if `run` says so. With
`capture` it is then captured into that directory.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from agentenv.config import Settings
from agentenv.records.ledger import Entry
from agentenv.vmm.machine import GuestFiles, Layer, MachineSpec, MemoryImage, Nic, SavedState
from agentenv.vmm.process import Identity
from agentenv.vmm.resources import Resources

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.small_guest import shown, small_qemu


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_recording(_: Resources, entry: Entry, identity: Identity) -> Entry:
    die()
    raise AssertionError("unreachable")


async def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    settings = Settings(home=Path(given["home"]), runtime=Path(given["runtime"]))
    guest = GuestFiles(*(Path(path) for path in given["guest"]))
    nic = Nic(Path(given["namespace"]), given["tap"], given["mac"])
    layers = tuple(Layer(Path(path), "qcow2") for path in given.get("layers", ()))
    spec = MachineSpec(given["id"], 1, 128, 256, guest, layers, nic, given["uid"])
    die_at = given["die_at"]
    if die_at == "recording":
        setattr(Resources, "started", die_recording)  # noqa: B010

    def trace(phase: str, state: str) -> None:
        if die_at in (f"{phase}:{state}", phase if state == "started" else None):
            die()

    qemu, _ = small_qemu(settings, trace)
    if "state" in given:
        state, base, *deltas = map(Path, given["state"])
        machine = await qemu.restore(spec, SavedState(state, MemoryImage(base, tuple(deltas))))
        if given["run"]:
            await machine.run()
    else:
        machine = await qemu.boot(spec)
    if given["await"]:
        await shown(machine, given["await"])
    if "capture" in given:
        machine.console.send(given["type"].encode())
        await shown(machine, given["await_typed"])
        await machine.stop()
        await machine.capture(Path(given["capture"]), final=given.get("final", False))
    print(machine.pid, flush=True)
    await machine.wait()


asyncio.run(main())
