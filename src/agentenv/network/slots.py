"""The node's network slots: handed out, found again after a restart, taken back.

The number of a slot is decided on the event loop, in one step, and recorded; the kernel work
follows in threads kept for it, since it blocks and moves between namespaces.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from typing import Any, TypeVar

from agentenv.config import Settings
from agentenv.errors import AenvError, CapacityExceeded, HostFault, HostIncapable
from agentenv.limits import NetworkLimits
from agentenv.network import egress, namespace, nft, shaping
from agentenv.network.applied import Applied, Asker
from agentenv.network.denied import denied
from agentenv.network.forwarding import ipv6_for_guests
from agentenv.network.host import HostSide, in_use, left_behind, uplink_mtu
from agentenv.network.namespace import Ipv6Wiring, NameTaken, Wiring
from agentenv.network.netlink import Rtnetlink
from agentenv.network.node import SLOTS_PER_NODE, NodeIdentity, NodeRegistry
from agentenv.network.opened import Opened, opened
from agentenv.network.policy import UNRESTRICTED, Address, Policy
from agentenv.network.servers import OwnServers
from agentenv.network.slot import GUEST_MAC, Slot
from agentenv.records.ledger import Entry, Ledger

T = TypeVar("T")

KIND = "slot"
_NODE_KIND, _NODE_OWNER = "network", "node"
# Two: a removal waits for the kernel's grace periods, and would hold up who comes next.
_WORKERS = 2
_REFRESH_S = 10.0  # seconds after which a new way out of the host is noticed at the latest use

_log = logging.getLogger(__name__)


def _no_step(_: str) -> None:
    """Nothing is to be told of the steps."""


def _lease(entry: Entry) -> int:
    lease: int = entry.detail["lease"]
    return lease


class Slots:
    """All slots of this node. Used from one event loop; `start` first, `stop` last.

    Args:
        settings: `home`, `network_range` and `denied_ranges` matter here.
        ledger: each slot is recorded in it (kind `slot`) before it is made.
        capacity: how many slots may exist at once; by default as many as there are addresses.
        registry: where the host's nodes are told apart.
        step: told of each step of making a slot, in a worker thread; what it raises fails the
            step. For tests.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        *,
        capacity: int = SLOTS_PER_NODE,
        registry: NodeRegistry | None = None,
        step: Callable[[str], None] = _no_step,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._capacity = min(capacity, SLOTS_PER_NODE)
        self._registry = registry or NodeRegistry()
        self._step = step
        self._entries: dict[int, Entry] = {}  # by number: exists, or may
        self._foreign: set[int] = set()  # numbers whose names something else has
        self._identity: NodeIdentity | None = None
        self._host_side: HostSide | None = None
        self._own_servers: OwnServers | None = None
        self._opened: list[Opened] = []
        self._applied: dict[int, Applied] = {}  # by lease
        self._mtu = 0
        self._ipv6 = False
        self._workers: ThreadPoolExecutor | None = None
        self._sockets: queue.SimpleQueue[Rtnetlink] = queue.SimpleQueue()
        self._refreshed = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._building: set[int] = set()  # leases
        self._removals: dict[int, asyncio.Task[None]] = {}  # by lease

    @property
    def identity(self) -> NodeIdentity:
        """This node's place on its host, known once started."""
        if self._identity is None:
            raise HostFault("the network has not been started")
        return self._identity

    @property
    def free(self) -> int:
        """How many more slots can be acquired now."""
        return self._capacity - len(self._entries)

    @property
    def ipv6(self) -> bool:
        """Whether guests have IPv6, known once started."""
        return self._ipv6

    def owner_at(self, address: str) -> str | None:
        """Whose slot has that address: who asks the resolver, or connects to the node."""
        entry = self._entry_at(address)
        return None if entry is None else entry.owner

    def policy_at(self, address: str) -> Policy | None:
        """The policy in force at the slot with that address; None where there is no slot."""
        asker = self.asker_at(address)
        return None if asker is None else asker.policy

    def asker_at(self, address: str) -> Asker | None:
        """Who asks the resolver from that address, to be named when what was found is to be opened."""
        entry = self._entry_at(address)
        if entry is None:
            return None
        applied = self._at(entry)
        return Asker(entry.owner, entry.detail["number"], _lease(entry), applied.policy, applied.serial)

    async def apply(self, slot: Slot, policy: Policy) -> None:
        """Have a policy in force at a slot, in the place of the one before, at once and as a whole. Flows
        that it forbids are cut, those that it allows go on.

        Raises:
            HostFault: it could not be applied, or the slot was released; the one before is in force.
        """
        entry = self._held(slot)
        if entry is None:
            raise HostFault(f"the slot {slot.name} was released")
        applied = self._at(entry)
        if applied.policy != policy or applied.lock.locked() or not applied.certain:
            await asyncio.shield(self._begin(self._apply(entry, applied, policy)))

    async def open(self, asker: Asker, name: str, found: Sequence[tuple[Address, float]]) -> bool:
        """Open what a name resolved to, each address for its seconds, to new flows of who asked. Flows that
        began in that time go on afterwards.

        False, and nothing is opened, where the slot has gone or has another policy by now, or there is no
        room for more: the answer is not to be given.
        """
        entry = self._entries.get(asker.number)
        if entry is None or _lease(entry) != asker.lease:
            return False
        return await asyncio.shield(self._begin(self._open(entry, self._at(entry), asker, name, found)))

    def may_serve(self, server: Address) -> bool:
        """Whether a sandbox may have that name server asked for it."""
        return self._own_servers is not None and self._own_servers.permitted(server)

    def check(self, policy: Policy) -> None:
        """See that a policy can be in force on this node.

        Raises:
            InvalidRequest: it names a name server that no sandbox may have asked.
        """
        if self._own_servers is not None:
            self._own_servers.check(policy)

    async def start(self) -> None:
        """Take the node's index and set up its side of the host. Slots of before stay as they are.

        Raises:
            HostIncapable: not root, or nftables is missing.
            HostFault, CapacityExceeded, InvalidRequest: see `NodeRegistry.claim`.
        """
        if os.geteuid() != 0:
            raise HostIncapable("network slots need root", remedy="run the node as root")
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="network")
        try:
            for _ in range(_WORKERS):
                self._sockets.put(Rtnetlink())
            before = self._recorded_identity()
            self._identity = await self._run(lambda host: self._claim(host, before))
            self._record_identity()
            self._opened = await self._run(lambda _: opened(self._settings))
            denied_to_all = denied(self._settings.denied_ranges)
            self._own_servers = OwnServers(denied_to_all, self._opened, self.identity.block)
            self._ipv6 = await self._run(lambda _: ipv6_for_guests(self._settings.ipv6))
            self._host_side = HostSide(
                self.identity, self._registry, denied_to_all, self._opened, ipv6=self.ipv6
            )
            await self._run(self._host_side.set_up)
            self._mtu = await self._run(uplink_mtu)
            await self._recollect()
        except BaseException:
            try:
                await self.stop()
            except (AenvError, OSError) as error:  # why it did not start is what matters
                _log.error("the host's network is not wholly put back: %s", error)
            raise

    async def acquire(self, owner: str) -> Slot:
        """A new slot for a machine.

        Whether there is room is decided at once, so that a burst gets exactly what there is. On
        failure, or when the caller is cancelled, nothing is left of it.

        Raises:
            CapacityExceeded: all are in use.
            HostFault: the kernel refused a step.
        """
        task = self._begin(self._build(self._reserve(owner)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._begin(self._discard(task))
            raise

    async def release(self, slot: Slot) -> None:
        """Remove a slot; its number is free once nothing of it is left. A second time does nothing.

        Raises:
            HostFault: it could not be removed; the record stays, and `reap` tries again.
        """
        entry = self._held(slot)
        if entry is not None:
            await self._remove(entry)

    async def limit(self, slot: Slot, limits: NetworkLimits) -> None:
        """Have a slot's traffic no faster than that from now on, in the place of earlier limits. They go
        with the slot.

        Raises:
            HostFault: the slot was released, or the kernel refused. HostIncapable: it cannot shape traffic.
        """
        entry = self._held(slot)
        if entry is None or _lease(entry) in self._removals:
            raise HostFault(f"the slot {slot.name} was released")
        path = self._wiring(entry).namespace
        await asyncio.shield(self._begin(self._run(lambda _: shaping.apply(path, limits))))

    def hand_over(self, slot: Slot, owner: str) -> None:
        """Give a slot made ahead to the machine that will use it."""
        entry = self._held(slot)
        if entry is None or _lease(entry) in self._removals:
            raise HostFault(f"the slot {slot.name} was released")
        self._entries[slot.index] = self._ledger.hand_over(entry, owner)

    async def adopt(self, owner: str, policy: Policy = UNRESTRICTED) -> Slot | None:
        """The slot that was recorded for `owner` by an earlier life of this node, with a policy in force.

        It is compared with the kernel and mended where a part is missing; what names have opened stays
        open, and there is no moment without rules. None when there is no
        such slot or it lost what a running machine holds on to; then it is removed altogether.
        """
        entry = next((entry for entry in self._entries.values() if entry.owner == owner), None)
        if entry is None or _lease(entry) in self._removals:
            return None
        wiring = self._wiring(entry)
        try:
            openings = await self._run(lambda host: namespace.repair(wiring, host, policy, self._opened))
        except OSError as error:
            raise HostFault(f"slot {entry.name} could not be put in order: {error}") from error
        if openings is not None:
            now = time.monotonic()
            self._at(entry).become(policy, now)
            self._at(entry).note(openings, now)
            return self._slot(entry)
        _log.warning("slot %s of %s has lost its namespace or tap", entry.name, owner)
        await self._remove(entry)
        return None

    async def reap(self, keep: set[str]) -> list[str]:
        """Remove the recorded slots whose owner is not in `keep`; returns their names."""
        doomed = [
            entry
            for entry in self._entries.values()
            if entry.owner not in keep and _lease(entry) not in self._building
        ]
        results = await asyncio.gather(*map(self._remove, doomed), return_exceptions=True)
        removed = []
        for entry, result in zip(doomed, results, strict=True):
            if isinstance(result, BaseException):
                if not isinstance(result, AenvError):
                    raise result
                _log.error("slot %s is not removed: %s", entry.name, result)
            else:
                removed.append(entry.name)
        return removed

    async def stop(self) -> None:
        """Let go of the network. With no slot left the host is put back as it was found.

        With slots in use (machines that outlive the node) their rules and addresses stay.
        """
        if self._workers is None:
            return
        while self._tasks:
            await asyncio.wait(self._tasks)
        try:
            if self._identity is not None and not self._entries and not self._ledger.entries(kind=KIND):
                await self._run(self._leave_host)
                for entry in self._ledger.entries(kind=_NODE_KIND):
                    self._ledger.strike(entry)
                self._identity = None
        finally:
            workers, self._workers = self._workers, None
            await asyncio.to_thread(self._let_go, workers)

    # Decisions, on the event loop.

    def _recorded_identity(self) -> NodeIdentity | None:
        """The identity that this boot's records name."""
        for entry in self._ledger.entries(kind=_NODE_KIND):
            if entry.boot_id == self._ledger.boot_id:
                return NodeIdentity(entry.detail["index"], IPv4Network(entry.detail["block"]))
        return None

    def _record_identity(self) -> None:
        if self._recorded_identity() == self.identity:
            return
        for entry in self._ledger.entries(kind=_NODE_KIND):
            self._ledger.strike(entry)
        self._ledger.record(
            _NODE_OWNER,
            _NODE_KIND,
            self.identity.name,
            index=self.identity.index,
            block=str(self.identity.block),
        )

    def _reserve(self, owner: str) -> Entry:
        if self.free <= 0:
            raise CapacityExceeded(
                f"all {self._capacity} network slots of this node are in use",
                remedy="end a sandbox, or try again later",
            )
        taken = self._entries.keys() | self._foreign
        number = next(number for number in itertools.count(1) if number not in taken)
        if number > SLOTS_PER_NODE:
            raise CapacityExceeded(
                f"names of {len(self._foreign)} network slots are taken by something else",
                remedy=f"remove the namespaces {self.identity.name}-… that belong to nobody",
            )
        entry = self._ledger.record(
            owner,
            KIND,
            self.identity.slot_name(number),
            number=number,
            address=str(self.identity.slot_address(number)),
            uid=self.identity.uid(number),
            lease=secrets.randbits(62),  # the ledger's own ids come again once struck
        )
        self._entries[number] = entry
        return entry

    def _held(self, slot: Slot) -> Entry | None:
        entry = self._entries.get(slot.index)
        return entry if entry is not None and _lease(entry) == slot.lease else None

    def _entry_at(self, address: str) -> Entry | None:
        try:
            return self._entries.get(self.identity.slot_number(IPv4Address(address)))
        except AddressValueError:
            return None

    def _at(self, entry: Entry) -> Applied:
        return self._applied.setdefault(_lease(entry), Applied())

    def _forget(self, entry: Entry) -> None:
        self._ledger.strike(entry)
        self._applied.pop(_lease(entry), None)
        if self._entries.get(entry.detail["number"]) == entry:
            del self._entries[entry.detail["number"]]

    def _wiring(self, entry: Entry) -> Wiring:
        number = entry.detail["number"]
        return Wiring(
            name=entry.name,
            address=self.identity.slot_address(number),
            node=self.identity.address,
            uid=self.identity.uid(number),
            mtu=self._mtu,
            ipv6=self._ipv6_wiring(number),
        )

    def _ipv6_wiring(self, number: int) -> Ipv6Wiring | None:
        if not self.ipv6:
            return None
        return Ipv6Wiring(self.identity.slot_address6(number), self.identity.address6)

    def _slot(self, entry: Entry) -> Slot:
        wiring = self._wiring(entry)
        return Slot(
            index=entry.detail["number"],
            name=entry.name,
            namespace=wiring.namespace,
            tap=nft.TAP,
            mac=GUEST_MAC,
            address=str(wiring.address),
            uid=wiring.uid,
            lease=_lease(entry),
        )

    # Effects, each a task that runs to its end whatever becomes of the caller.

    async def _build(self, entry: Entry) -> Slot:
        wiring = self._wiring(entry)
        self._building.add(_lease(entry))
        try:
            await self._run(lambda host: self._make(wiring, host))
        except NameTaken as error:
            _log.warning("%s", error)
            self._foreign.add(entry.detail["number"])
            self._forget(entry)
            return await self._build(self._reserve(entry.owner))
        except BaseException as error:
            await self._clear(entry)
            if isinstance(error, AenvError) or not isinstance(error, Exception):
                raise
            raise HostFault(f"slot {entry.name} could not be made: {error}") from error
        finally:
            self._building.discard(_lease(entry))
        return self._slot(entry)

    def _make(self, wiring: Wiring, host: Rtnetlink) -> None:
        namespace.build(wiring, host, self._step)
        if self._host_side is not None and time.monotonic() - self._refreshed > _REFRESH_S:
            self._host_side.refresh(host)
            self._refreshed = time.monotonic()

    async def _apply(self, entry: Entry, applied: Applied, policy: Policy) -> None:
        async with applied.lock:
            now = time.monotonic()
            openings = applied.left(policy, now)
            if egress.differ(policy, applied.policy) or not applied.certain:
                before = applied.policy if applied.certain else None
                script = egress.change(before, policy, self._opened, openings)
                applied.certain = False
                await self._in_slot(entry, lambda: nft.apply(script))
                applied.certain = True
            if policy != applied.policy:
                applied.become(policy, now)

    async def _open(
        self,
        entry: Entry,
        applied: Applied,
        asker: Asker,
        name: str,
        found: Sequence[tuple[Address, float]],
    ) -> bool:
        async with applied.lock:
            now = time.monotonic()
            openings = applied.wider(name, found, now)
            if applied.serial != asker.serial or openings is None:
                return False
            try:
                await self._in_slot(entry, lambda: applied.add(egress.additions(openings)))
            except HostFault as error:
                _log.warning("what a name resolved to is not opened: %s", error)
                return False
            applied.note(openings, now)
            return True

    async def _in_slot(self, entry: Entry, work: Callable[[], None]) -> None:
        """Do something to the rules of a slot.

        Raises:
            HostFault: it could not be done, or the slot was released meanwhile.
        """
        path = self._wiring(entry).namespace
        current = self._entries.get(entry.detail["number"])
        if current is None or _lease(current) != _lease(entry) or _lease(entry) in self._removals:
            raise HostFault(f"the slot {entry.name} was released")

        def inside(_: Rtnetlink) -> None:
            with namespace.inside(path):
                work()

        try:
            await self._run(inside)
        except OSError as error:
            raise HostFault(f"the rules of slot {entry.name} could not be changed: {error}") from error

    async def _clear(self, entry: Entry) -> None:
        """Remove what a failed build left; the build's failure is what the caller hears of."""
        try:
            await self._remove(entry)
        except HostFault as error:
            _log.error("%s; it stays on record", error)

    async def _discard(self, build: asyncio.Task[Slot]) -> None:
        """Remove the slot of a caller that went away."""
        try:
            slot = await build
            await self.release(slot)
        except AenvError as error:
            _log.warning("of a slot that nobody waits for: %s", error)

    async def _remove(self, entry: Entry) -> None:
        """Remove a slot once, however many ask for it."""
        task = self._removals.get(_lease(entry))
        if task is None:
            task = self._begin(self._destroy(entry))
            self._removals[_lease(entry)] = task
            task.add_done_callback(lambda _: self._removals.pop(_lease(entry), None))
        await asyncio.shield(task)

    async def _destroy(self, entry: Entry) -> None:
        wiring = self._wiring(entry)
        applied = self._at(entry)

        def destroy(host: Rtnetlink) -> None:
            applied.close()
            namespace.destroy(wiring, host)

        try:
            async with applied.lock:
                await self._run(destroy)
        except OSError as error:
            raise HostFault(f"slot {entry.name} could not be removed: {error}") from error
        self._forget(entry)

    async def _recollect(self) -> None:
        """Take up the recorded slots, but for those that no machine can be using.

        Those of an earlier boot of the host are gone with it, though a file may be left where
        /run is not in memory; those of another index belong to nobody's addresses.
        """
        for entry in self._ledger.entries(kind=KIND):
            current = entry.name == self.identity.slot_name(entry.detail["number"])
            if entry.boot_id == self._ledger.boot_id and current:
                self._entries[entry.detail["number"]] = entry
            else:
                await self._remove(entry)
        known = {entry.name for entry in self._entries.values()}
        for name in await self._run(lambda host: left_behind(self.identity, host)) - known:
            suffix = name.rpartition("-")[2]
            if suffix.isdecimal():
                self._foreign.add(int(suffix))
            _log.warning("the namespace or link %s is on no record; it is left alone", name)

    def _claim(self, host: Rtnetlink, before: NodeIdentity | None) -> NodeIdentity:
        return self._registry.claim(
            self._settings.home,
            self._settings.network_range,
            lambda identity: in_use(identity, host),
            before=before,
        )

    def _leave_host(self, host: Rtnetlink) -> None:
        side = self._host_side
        try:
            if side is not None:
                side.take_down(host)
        finally:
            self._registry.free(self._settings.home, side.restore_shared if side is not None else None)

    def _let_go(self, workers: ThreadPoolExecutor) -> None:
        workers.shutdown()
        for applied in self._applied.values():
            applied.close()
        while not self._sockets.empty():
            self._sockets.get().close()

    async def _run(self, work: Callable[[Rtnetlink], T]) -> T:
        """Do blocking work in a thread, with a socket to the host's namespace."""
        if self._workers is None:
            raise HostFault("the network is not running")
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._with_socket, work)

    def _with_socket(self, work: Callable[[Rtnetlink], T]) -> T:
        host = self._sockets.get()
        try:
            return work(host)
        finally:
            self._sockets.put(host)

    def _begin(self, operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run an operation that goes on when the one who waits for it is cancelled."""
        task = asyncio.ensure_future(operation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
