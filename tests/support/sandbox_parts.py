"""Parts of a node that live in memory, for tests of the sandbox service's own logic.

They keep the protocols' promises and can be told to stop or fail at any step. Real machines and slots
are tested elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from agentenv.config import Settings
from agentenv.errors import CapacityExceeded, Conflict, HostFault, NotFound
from agentenv.identity.keys import Keys
from agentenv.image.cache import CachedImage
from agentenv.image.config import ImageConfig
from agentenv.image.credentials import Credentials
from agentenv.limits import DiskLimits, NetworkLimits
from agentenv.network.denied import denied
from agentenv.network.policy import UNRESTRICTED, Policy
from agentenv.network.servers import OwnServers
from agentenv.network.slot import Slot
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.sandbox.agent import Identity
from agentenv.sandbox.records import Records
from agentenv.sandbox.requests import NewSandbox
from agentenv.sandbox.service import Sandboxes
from agentenv.template.records import Template
from agentenv.template.store import Templates
from agentenv.vmm.machine import (
    Capture,
    Exit,
    GuestFiles,
    Incompatible,
    Layer,
    MachineSpec,
    MemoryImage,
    SavedState,
)

GUEST = GuestFiles(Path("/guest/kernel"), Path("/guest/initramfs"), Path("/guest/tools"))


class Steps:
    """Lets a test stop the service at a named step, let it go on, or have the step fail."""

    def __init__(self) -> None:
        self._gates: dict[str, asyncio.Event] = {}
        self._reached: dict[str, asyncio.Event] = {}
        self._faults: dict[str, BaseException] = {}
        self.passed: list[str] = []

    def hold(self, step: str) -> None:
        """Whoever comes to `step` waits there."""
        self._gates[step] = asyncio.Event()
        self._reached[step] = asyncio.Event()

    async def reached(self, step: str) -> None:
        """Wait until somebody waits at `step`."""
        await self._reached[step].wait()

    def let_go(self, step: str) -> None:
        self._gates.pop(step).set()

    def fail(self, step: str, error: BaseException) -> None:
        self._faults[step] = error

    def mend(self, step: str) -> None:
        del self._faults[step]

    async def at(self, step: str) -> None:
        self.passed.append(step)
        if (gate := self._gates.get(step)) is not None:
            self._reached[step].set()
            await gate.wait()
        if (fault := self._faults.get(step)) is not None:
            raise fault


class MemoryMachine:
    """A machine that is nothing but its promises."""

    def __init__(self, spec: MachineSpec, steps: Steps, gone: Callable[[MemoryMachine], object]) -> None:
        self.spec = spec
        self.pid = 4242
        self.detached = False
        self.running = True
        self.limits = DiskLimits()
        self.image: MemoryImage | None = None
        self._sealed: tuple[Layer, ...] = ()
        self._drives = tuple(drive.layers for drive in spec.drives)
        self._final: Path | None = None
        self._steps = steps
        self._gone = gone
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.write: Callable[[bytes], None] = lambda data: None  # to its console
        self.events: list[Callable[[str, dict[str, object]], None]] = []

    @property
    def exited(self) -> bool:
        return self._exit.done()

    @property
    def stands_on(self) -> frozenset[Path]:
        image = self.image.files() if self.image else ()
        layers = (*self.spec.layers, *self._sealed, *(layer for drive in self._drives for layer in drive))
        return frozenset((*(layer.path for layer in layers), *image))

    def _require(self) -> None:
        if self._exit.done():
            raise HostFault(f"machine {self.spec.id} is gone")

    async def run(self) -> None:
        await self._steps.at("run")
        self._require()
        if self._final is not None and (self._final / "disk").exists():
            raise Conflict("it was captured to end")
        self.running = True

    async def stop(self) -> None:
        await self._steps.at("stop")
        self._require()
        self.running = False

    async def capture(self, into: Path, *, final: bool) -> Capture:
        assert not self.running
        await self._steps.at("capture")
        self._require()
        if final:
            self._final = into
        for name in ("state", "memory", "memory.map", "disk"):
            (into / name).write_text(f"{name} of {self.spec.id}")
        memory, disk = into / "memory", Layer(into / "disk", "qcow2")
        # What earlier captures gave and is gone by now, is left out or given anew.
        known = tuple(path for path in self.image.deltas if path.exists()) if self.image else ()
        image = MemoryImage(self.image.base, (*known, memory)) if self.image else MemoryImage(memory)
        layers = (*self.spec.layers, *(self._again(layer, into) for layer in self._sealed), disk)
        drives = tuple(self._drive(index, into) for index in range(len(self.spec.drives)))
        if not final:
            self._sealed, self.image = (*self._sealed, disk), self.image and image
            self._drives = drives
        return Capture(into / "state", memory, 1, disk, image, layers, drives)

    def _drive(self, index: int, into: Path) -> tuple[Layer, ...]:
        layers = self._drives[index]
        if not self.spec.drives[index].writable:
            return layers
        sealed = into / f"drive{index}"
        sealed.write_text(f"drive {index} of {self.spec.id}")
        return (*layers, Layer(sealed, "qcow2"))

    @staticmethod
    def _again(layer: Layer, into: Path) -> Layer:
        if layer.path.exists():
            return layer
        anew = into / f"disk.{layer.path.parent.name}"
        anew.write_text("a layer from before")
        return Layer(anew, layer.format)

    async def limit_disk(self, limits: DiskLimits) -> None:
        await self._steps.at("limit disk")
        self._require()
        self.limits = limits

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    def die(self, detail: str = "signal 11") -> None:
        """The process is gone, as after a crash."""
        self._exit.set_result(Exit("crashed", None, detail))

    async def end(self) -> None:
        await self._steps.at("end")
        if not self._exit.done():
            self._exit.set_result(Exit("ended", None, ""))
        self._gone(self)

    def detach(self) -> None:
        self.detached = True

    def console_tail(self) -> str:
        return "Booting\nlast line\n"

    def on_console(self, callback: Callable[[bytes], None]) -> None:
        self.write = callback

    def on_event(self, callback: Callable[[str, dict[str, object]], None]) -> None:
        self.events.append(callback)


class MemoryHypervisor:
    """Machines by id; `machines` is the host, which outlives a node."""

    name = "memory"

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.machines: dict[str, MemoryMachine] = {}
        self.booted: list[MachineSpec] = []
        self.versions: dict[str, str] = {}

    async def boot(self, spec: MachineSpec) -> MemoryMachine:
        assert spec.id not in self.machines
        await self._steps.at("boot")
        self.booted.append(spec)
        machine = MemoryMachine(spec, self._steps, lambda gone: self.machines.pop(gone.spec.id, None))
        self.machines[spec.id] = machine
        return machine

    async def restore(
        self, spec: MachineSpec, saved: SavedState, *, fingerprint: Mapping[str, str] | None = None
    ) -> MemoryMachine:
        assert spec.id not in self.machines
        await self._steps.at("restore")
        if fingerprint is not None and fingerprint != await self.fingerprint(spec):
            raise Incompatible("the snapshot is of another hypervisor")
        machine = MemoryMachine(spec, self._steps, lambda gone: self.machines.pop(gone.spec.id, None))
        machine.running, machine.image = False, saved.memory
        self.machines[spec.id] = machine
        return machine

    async def fingerprint(self, spec: MachineSpec) -> dict[str, str]:
        return {
            **self.versions,
            "hypervisor": self.name,
            "vcpus": str(spec.vcpus),
            "memory_mib": str(spec.memory_mib),
        }

    async def adopt(self, spec: MachineSpec) -> MemoryMachine | None:
        await self._steps.at("adopt")
        machine = self.machines.get(spec.id)
        if machine is None or machine.exited:
            return None
        await machine.run()
        return machine

    async def reap(self, keep: set[str]) -> list[str]:
        doomed = [machine for name, machine in self.machines.items() if name not in keep]
        for machine in doomed:
            await machine.end()
        return [machine.spec.id for machine in doomed]


class MemorySlots:
    """A few slots by number."""

    ipv6 = False

    def __init__(self, steps: Steps, capacity: int = 8) -> None:
        self._steps = steps
        self.limits: dict[int, NetworkLimits] = {}
        self.capacity = capacity
        self.taken: dict[int, tuple[str, Slot]] = {}
        self.policies: dict[Slot, Policy] = {}

    async def acquire(self, owner: str) -> Slot:
        if len(self.taken) >= self.capacity:
            raise CapacityExceeded("no slot is free")
        index = next(number for number in range(self.capacity) if number not in self.taken)
        slot = Slot(
            index, f"slot{index}", Path(f"/ns/{index}"), "tap0", "02:00", f"127.0.1.{index}", 1000 + index
        )
        self.taken[index] = (owner, slot)
        try:
            await self._steps.at("acquire")
        except BaseException:
            del self.taken[index]
            raise
        return slot

    async def release(self, slot: Slot) -> None:
        await self._steps.at("release")
        self.taken.pop(slot.index, None)
        self.limits.pop(slot.index, None)
        self.policies.pop(slot, None)

    @property
    def free(self) -> int:
        return self.capacity - len(self.taken)

    async def limit(self, slot: Slot, limits: NetworkLimits) -> None:
        assert self.taken[slot.index][1] == slot
        await self._steps.at("limit network")
        self.limits[slot.index] = limits

    def hand_over(self, slot: Slot, owner: str) -> None:
        assert self.taken[slot.index][1] == slot
        self.taken[slot.index] = (owner, slot)

    def check(self, policy: Policy) -> None:
        OwnServers(denied(["10.0.0.0/8"]), (), IPv4Network("10.0.0.0/18")).check(policy)

    async def apply(self, slot: Slot, policy: Policy) -> None:
        if policy == self.policies.get(slot, UNRESTRICTED):
            return
        await self._steps.at("apply")
        assert self.taken[slot.index][1] == slot
        self.policies[slot] = policy

    async def adopt(self, owner: str, policy: Policy = UNRESTRICTED) -> Slot | None:
        found = next((slot for name, slot in self.taken.values() if name == owner), None)
        if found is not None:
            self.policies[found] = policy
        return found

    async def reap(self, keep: set[str]) -> list[str]:
        doomed = [index for index, (owner, _) in self.taken.items() if owner not in keep]
        for index in doomed:
            del self.taken[index]
        return [f"slot{index}" for index in doomed]


class MemoryAgent:
    """An agent that is ready at once and remembers who it is."""

    def __init__(self, steps: Steps, identities: list[Identity]) -> None:
        self._steps = steps
        self._identities = identities

    async def wait_ready(self, machine: Any, limit_s: float) -> None:
        await self._steps.at("ready")

    async def take_over(self, machine: Any, identity: Identity, limit_s: float) -> None:
        await self._steps.at("agent")
        assert machine.running
        await self._steps.at("init")
        self._identities.append(identity)

    async def health(self) -> None:
        await self._steps.at("health")

    async def rehearse(self, *, user: str, token: str) -> None:
        await self._steps.at("rehearse")

    async def freeze(self) -> None:
        await self._steps.at("freeze")

    async def thaw(self) -> None:
        await self._steps.at("thaw")

    async def close(self) -> None:
        await self._steps.at("close")


def template_of(rootfs: Path | None, **given: Any) -> Template:
    """A template's record: `base` where nothing else is said."""
    record: dict[str, Any] = {
        "id": "tbase",
        "name": "base",
        "build_id": "5f0c5dd2-7b53-4c58-9a5e-0a6e8ac7ab9a",
        "rootfs": rootfs,
        "disk_mib": 2048,
        "memory_mib": 512,
        "vcpus": 1,
        "source": "debootstrap:bookworm",
        "recipe": "r",
        "digest": "sha256:0",
        "size_bytes": 12,
        "default_user": "user",
        "default_workdir": "/home/user",
        "created_at": 1_700_000_000.0,
        "updated_at": 1_700_000_100.0,
        "env": {"LANG": "C.UTF-8"},
    }
    return Template(**{**record, **given})


def rootfs_of(template: Template) -> Path:
    """The file that a template's first snapshot is booted from."""
    assert template.rootfs is not None
    return template.rootfs


class MemoryImages:
    """A cache in which every image is at once, but those whose name begins with `missing`."""

    def __init__(self, directory: Path, steps: Steps) -> None:
        self._directory = directory
        self._steps = steps
        self.asked: list[str] = []
        self.held: list[str] = []

    async def get(
        self,
        source: str,
        *,
        credentials: Credentials | None = None,
        disk_mib: int | None = None,
        progress: Callable[[str], None],
    ) -> CachedImage:
        self.asked.append(source)
        await self._steps.at("image")
        if "missing" in source:
            raise NotFound(f"{source}: no such image")
        progress(f"pulled {source}")
        digest = f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"
        rootfs = self._directory / f"1-{digest[7:]}" / "1024-one.ext4"
        rootfs.parent.mkdir(parents=True, exist_ok=True)
        rootfs.write_bytes(b"a filesystem")
        config = ImageConfig(env={"FROM_IMAGE": "1"})
        return CachedImage(digest, rootfs, 1024, 12, config, "root", "/root")

    def keep(self, digest: str) -> MemoryImages:
        self.held.append(digest)
        return self

    def release(self) -> None:
        """End one hold."""
        self.held.pop()


class JumpingClock:
    """A clock that moves only when told, and then runs what is due."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self._now = now
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        entry = (self._now + delay_s, callback)
        self._calls.append(entry)
        return lambda: self._calls.remove(entry) if entry in self._calls else None

    def jump(self, seconds: float) -> None:
        """Let time pass; callbacks that set new timers see the new time."""
        self._now += seconds
        while due := [entry for entry in self._calls if entry[0] <= self._now]:
            self._calls.remove(due[0])
            due[0][1]()


class MemoryNode:
    """A service over parts in memory and a real database; `restart` is a node's second life."""

    def __init__(self, home: Path, **settings: Any) -> None:
        nothing_ahead = {"pool_most": 0, "slots_least": 0, "slots_most": 0, "pressure": "off"}
        self.settings = Settings(home=home, **{**nothing_ahead, **settings})
        self.steps = Steps()
        self.clock = JumpingClock()
        self.hypervisor = MemoryHypervisor(self.steps)
        self.slots = MemorySlots(self.steps)
        rootfs = home / "images" / "base.ext4"
        rootfs.parent.mkdir(exist_ok=True)
        rootfs.write_bytes(b"a filesystem")
        self.rootfs = rootfs
        self.versions = {"version": "1"}
        self.hypervisor.versions = self.versions
        self.identities: list[Identity] = []
        self.images = MemoryImages(self.settings.cache_dir, self.steps)
        self.turn_limit_s = 5.0
        self._open()

    def keys(self, first: str) -> Keys:
        """The API keys on record, and a first one."""
        return Keys(self.database, first)

    def _open(self) -> None:
        self.database = Database(self.settings.database)
        self.records = Records(self.database)
        self.templates = Templates(self.database, self.settings)
        if self.templates.find("base") is None:
            self.templates.register(template_of(self.rootfs))
        self.service = Sandboxes(
            self.settings,
            self.database,
            Ledger(self.database),
            self.hypervisor,
            self.slots,
            self.templates,
            lambda recorded=None: GUEST,
            clock=self.clock,
            agent_at=lambda address: MemoryAgent(self.steps, self.identities),
            turn_limit_s=self.turn_limit_s,
            images=self.images,
        )

    async def restart(self, watch: Callable[[Sandboxes], None] = lambda service: None) -> Sandboxes:
        """A new life on the same data and host, without any goodbye of the old one. `watch` is called before
        it begins."""
        self.database.close()
        self._open()
        watch(self.service)
        await self.service.start()
        return self.service

    async def prepare(self) -> None:
        """Make the template's first snapshot, so that later starts restore it."""
        await self.service.kill((await self.service.create(wanted())).sandbox.id)
        self.steps.passed.clear()
        self.identities.clear()

    def assert_empty(self) -> None:
        """Nothing of any sandbox is left."""
        assert self.hypervisor.machines == {}
        assert self.slots.taken == {}
        assert self.records.unended() == []
        assert self.service.count == 0


def wanted(template: str = "base", timeout_s: int = 300, **given: Any) -> NewSandbox:
    return NewSandbox(template, timeout_s, **given)


async def quiet(turns: int = 20) -> None:
    """Let everything that can go on now do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


@asynccontextmanager
async def prepared(home: Path, **settings: Any) -> AsyncIterator[MemoryNode]:
    """A node that serves, whose template has its first snapshot; stopped at the end."""
    node = MemoryNode(home, **settings)
    await node.service.start()
    await node.prepare()
    yield node
    await node.service.stop()
