"""Starting a machine from a saved state: a process that waits, memory written in, devices loaded.

The memory's base is mapped privately; what lies above it is written into the process before the device
state is loaded, which looks at the memory. The vcpus do not run until they are told to.
"""

from __future__ import annotations

import asyncio
from contextlib import closing

from agentenv.errors import HostFault, StoreCorrupt
from agentenv.vmm import memory
from agentenv.vmm.machine import MachineSpec, MemoryImage, SavedState
from agentenv.vmm.qemu.launch import MIB, Launch, Site, launching
from agentenv.vmm.qemu.machine import QemuMachine
from agentenv.vmm.qemu.qmp import QmpBroken
from agentenv.vmm.settle import settled

_LOAD_LIMIT_S = 60.0
_SETTLED = ("completed", "failed")


async def restore(spec: MachineSpec, saved: SavedState, site: Site) -> QemuMachine:
    """A machine with that state whose vcpus do not run; on failure nothing is left.

    Raises:
        StoreCorrupt: a layer or the device state is missing, damaged, or of another machine.
        AenvError: as a cold boot (`launch`).
    """
    async with launching(spec, site, saved) as steps:
        with steps.phase("layers", "opening the memory layers"):
            image = await settled(asyncio.to_thread(open_image, saved.memory, spec.memory_mib * MIB))
        with closing(image):
            machine = await steps.start()
            with steps.phase("apply", "writing the memory layers into the machine"):
                # On a thread, and waited for: the process must not be gone meanwhile.
                await settled(asyncio.to_thread(memory.apply, machine.pid, image))
        with steps.phase("load", "loading the device state"):
            await _load(machine, steps, saved)
        return machine


def open_image(image: MemoryImage, size: int | None = None) -> memory.Image:
    """The layers of a memory, open and checked; `size` is that of the memory in bytes.

    Raises:
        StoreCorrupt: one is missing or damaged.
    """
    return memory.Image(image.base, image.deltas, size=size)


async def _load(machine: QemuMachine, steps: Launch, saved: SavedState) -> None:
    qmp = machine.qmp
    loaded = qmp.expect("MIGRATION", lambda data: data.get("status") in _SETTLED)
    capabilities = [{"capability": "events", "state": True}]
    try:
        await qmp.together(
            ("migrate-set-capabilities", {"capabilities": capabilities}),
            ("migrate-incoming", {"uri": steps.state_uri}),
            timeout=_LOAD_LIMIT_S,
        )
        async with asyncio.timeout(_LOAD_LIMIT_S):
            outcome = await loaded
    except QmpBroken as error:
        ended = await machine.wait()
        raise StoreCorrupt(
            f"QEMU cannot load the device state {saved.device_state}: {ended.detail}",
            remedy="it is damaged, or of a machine with other devices",
        ) from error
    except TimeoutError:
        raise HostFault(f"the device state was not loaded in {_LOAD_LIMIT_S:g} s") from None
    if outcome["status"] != "completed":
        raise StoreCorrupt(f"QEMU cannot load the device state {saved.device_state}")
