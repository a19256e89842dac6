"""Makes what a plan says: from the last step that is known, in a machine, to the snapshot of the whole."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.building.cache import StepCache
from agentenv.building.contexts import Contexts
from agentenv.building.definition import BASE, FINALIZE
from agentenv.building.ground import Ground
from agentenv.building.logs import Feed
from agentenv.building.plan import FORMAT, Plan, Planned
from agentenv.building.steps import StepFailed, Steps, following, program
from agentenv.building.workshop import Bench, Workshop
from agentenv.errors import AenvError, GuestFault
from agentenv.sandbox import starting
from agentenv.sandbox.core import outcome
from agentenv.sandbox.guest import CommandFailed, Output
from agentenv.sandbox.prepare import Prepared
from agentenv.snapshot.records import Descent, GuestSettings, Kind, Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.machine import Incompatible

log = logging.getLogger(__name__)

# Nothing is lost by booting again where a guest did not come up, and others may wait for it too.
BOOT_TRIES = 2
# Every start writes the changed pages into memory of its own; above this much a file for all is worth it.
FLATTEN_BYTES = 16 << 20
_COLLECTED = "/.agentenv-collected"


@dataclass(frozen=True)
class After:
    """What is done for a snapshot that sandboxes are to start from, by its id: `flatten` gives it a memory
    file that they share, `tend` sees to its layers by and by."""

    flatten: Callable[[str], Awaitable[None]]
    tend: Callable[[str], None]


class Maker:
    """Makes snapshots of plans."""

    def __init__(
        self,
        workshop: Workshop,
        cache: StepCache,
        snapshots: Snapshots,
        prepared: Prepared,
        steps: Steps,
        contexts: Contexts,
        after: After,
    ) -> None:
        self._after = after
        self._workshop = workshop
        self._cache = cache
        self._snapshots = snapshots
        self._prepared = prepared
        self._steps = steps
        self._contexts = contexts
        self._roots: dict[str, asyncio.Task[Snapshot]] = {}

    def known(self, plan: Plan) -> Snapshot | None:
        """The snapshot of the whole, if it was made before and may be used."""
        return self._cache.find(plan.key) if plan.forced is None else None

    async def make(self, plan: Plan, ground: Ground, feed: Feed) -> Snapshot:
        """The snapshot of the whole; what is made on the way is kept.

        Raises:
            StepFailed: a step failed. AenvError: there is no machine for it, or no room.
        """
        with ground.held():
            done, snapshot = await self._known_part(plan, ground, feed)
            hold = self._snapshots.keep(snapshot)
            try:
                made = await self._from(plan, done, snapshot, ground, feed)
            finally:
                hold.release()
            self._cache.put(plan.key, made)
            return await self._flat(made)

    async def _from(self, plan: Plan, done: int, snapshot: Snapshot, ground: Ground, feed: Feed) -> Snapshot:
        """Make the rest after step `done`, of which `snapshot` is the outcome."""
        self._tell_known(plan, done, feed)
        rest = plan.rest(done)
        for planned in rest:
            if planned.number in ground.origins:  # before there is a machine that would wait for another
                await self._collect(planned, ground.origins[planned.number], feed)
        systemd = plan.init == "systemd"
        if rest or plan.login_path or (plan.start and not systemd):
            return await self._in_a_machine(plan, done, snapshot, ground, feed)
        if systemd:
            return await self._under_systemd(plan, snapshot, feed)
        return await self._as_it_is(plan, snapshot)

    async def _known_part(self, plan: Plan, ground: Ground, feed: Feed) -> tuple[int, Snapshot]:
        """The last step of which the outcome is known (0: the base), and that."""
        for planned in plan.usable():
            if (found := self._cache.find(planned.key)) is not None:
                return planned.number, found
        return 0, ground.snapshot or await self._root(ground, feed, forced=plan.forced == 0)

    def _tell_known(self, plan: Plan, done: int, feed: Feed) -> None:
        for planned in plan.steps[:done]:
            feed.tell(
                "info", f"CACHED [{planned.number}/{len(plan.steps)}] {planned.step}", str(planned.number)
            )

    async def _root(self, ground: Ground, feed: Feed, *, forced: bool = False) -> Snapshot:
        """The base, booted; those who want the same at once share it."""
        key = ground.root.key
        if not forced and (found := self._cache.find(key)) is not None:
            return found
        task = self._roots.get(key)
        if task is None:
            task = asyncio.create_task(self._boot(ground, feed), name=f"boot {key[:12]}")
            self._roots[key] = task
            task.add_done_callback(lambda _done: self._roots.pop(key, None))
        return await outcome(task)

    async def _boot(self, ground: Ground, feed: Feed) -> Snapshot:
        feed.tell("info", "Booting the base", BASE)
        root = ground.root
        try:
            with ground.held():
                made = await self._booted(ground, feed)
        except AenvError as error:
            raise StepFailed(BASE, str(error)) from error
        self._cache.put(root.key, made)
        return made

    async def _booted(self, ground: Ground, feed: Feed) -> Snapshot:
        root, tries = ground.root, BOOT_TRIES
        while True:
            tries -= 1
            try:
                async with self._workshop.booted(root.resources, ground.layers, grows=ground.grows) as bench:
                    if ground.account is not None:
                        arguments = (ground.account, "sudo")
                        await program(bench.guest, "failed to create user", feed, BASE, "account", *arguments)
                    return await bench.keep(root.key, root.context.settings, final=True)
            except GuestFault as error:
                if isinstance(error, CommandFailed) or not tries:
                    raise
                log.warning("the base %s is booted again: %s", root.identity, error)

    async def _collect(self, planned: Planned, origin: Ground, feed: Feed) -> None:
        """Have the files here that a step copies from somewhere else."""
        key = _collection(planned, origin)
        if self._contexts.find(key) is not None:
            return
        name = str(planned.number)
        feed.tell("info", f"Collecting {planned.step.args[0]} from {planned.step.source}", name)
        try:
            snapshot = origin.snapshot or await self._root(origin, feed)
            async with self._workshop.restored(snapshot) as bench:
                arguments = (planned.step.args[0], _COLLECTED)
                await program(bench.guest, "failed to copy files", feed, name, "collect", *arguments)
                await bench.guest.fetch(_COLLECTED, lambda body: self._contexts.receive(key, body))
        except AenvError as error:
            raise StepFailed(name, str(error)) from error

    async def _in_a_machine(
        self, plan: Plan, done: int, snapshot: Snapshot, ground: Ground, feed: Feed
    ) -> Snapshot:
        disk: Snapshot | None = None
        async with AsyncExitStack() as stack:
            try:
                bench = await stack.enter_async_context(self._workshop.restored(snapshot))
            except Incompatible as error:
                feed.tell("warn", f"What was kept cannot be used any more: {error}")
                await self._let_go(plan, done, snapshot, ground)
            except AenvError as error:
                step = next((str(planned.number) for planned in plan.rest(done)), FINALIZE)
                raise StepFailed(step, str(error)) from error
            else:
                try:
                    await self._go_on(plan, done, bench, ground, feed)
                    if plan.init == "agent":
                        return await self._finish(plan, done, bench, feed)
                    disk = await self._steps_done(plan, bench, feed)
                except StepFailed as error:
                    if bench.trouble is None:
                        raise
                    raise StepFailed(error.step, str(bench.trouble)) from error
        if disk is not None:  # and the machine of the steps is gone
            try:
                return await self._under_systemd(plan, disk, feed)
            finally:  # its layers stay with what was made of it
                self._cache.forget(_disk(plan))
        if ground.snapshot is not None and done == 0:
            assert ground.template is not None
            ground = replace(ground, snapshot=await self._prepared.of(ground.template))
        return await self.make(plan, ground, feed)

    async def _let_go(self, plan: Plan, done: int, snapshot: Snapshot, ground: Ground) -> None:
        """Forget a snapshot that is of another host or hypervisor, so that it is made anew."""
        if done:
            self._cache.forget(plan.steps[done - 1].key)
        elif ground.snapshot is None:
            self._cache.forget(plan.root.key)
        else:
            assert ground.template is not None
            await self._prepared.of(ground.template, unusable=snapshot.id)

    async def _go_on(self, plan: Plan, done: int, bench: Bench, ground: Ground, feed: Feed) -> None:
        """Carry out what is left to do after step `done`."""

        def files(planned: Planned) -> Path:
            origin = ground.origins.get(planned.number)
            return self._contexts.get(_collection(planned, origin) if origin else planned.step.files or "")

        resources = plan.root.resources
        for planned in plan.rest(done):
            name = str(planned.number)
            feed.tell("info", f"[{name}/{len(plan.steps)}] {planned.step}", name)
            await self._steps.carry_out(
                planned,
                bench.guest,
                feed,
                files,
                memory_mib=resources.memory_mib,
                disk_mib=resources.disk_mib,
            )
            if planned.kept:
                try:
                    self._cache.put(planned.key, await bench.keep(planned.key, planned.after.settings))
                except AenvError as error:
                    raise StepFailed(name, f"its outcome cannot be kept: {error}") from error

    async def _finish(self, plan: Plan, done: int, bench: Bench, feed: Feed) -> Snapshot:
        feed.tell("info", "Finalizing template build", FINALIZE)
        try:
            await self._keep_path(plan, bench, feed)
            if plan.start:
                await starting.start(bench.guest, plan.start, _teller(feed), _output(feed))
            left = plan.rest(done)
            if left and left[-1].kept and not (plan.start or plan.login_path):
                assert bench.standing is not None
                return await self._snapshots.make_durable(bench.standing.id)
            return await bench.keep(plan.key, plan.settings, final=True)
        except AenvError as error:
            raise StepFailed(FINALIZE, str(error)) from error

    async def _keep_path(self, plan: Plan, bench: Bench, feed: Feed) -> None:
        if plan.login_path:
            await program(bench.guest, "failed to keep PATH", feed, FINALIZE, "profile", plan.login_path)

    async def _steps_done(self, plan: Plan, bench: Bench, feed: Feed) -> Snapshot:
        """What a machine is booted from that has another process 1 than the one of the steps."""
        try:
            await self._keep_path(plan, bench, feed)
            made = await bench.keep(_disk(plan), plan.context.settings, final=True)
        except AenvError as error:
            raise StepFailed(FINALIZE, str(error)) from error
        self._cache.put(_disk(plan), made)
        return made

    async def _under_systemd(self, plan: Plan, disk: Snapshot, feed: Feed) -> Snapshot:
        """Boot with systemd as process 1 from the disk that the steps have left, and capture that."""
        feed.tell("info", "Booting with systemd as process 1", FINALIZE)
        hold = self._snapshots.keep(disk)
        try:
            layers = self._snapshots.layers(disk)
            async with self._workshop.booted(disk.resources, layers, plan.init) as bench:
                await starting.until_systemd(bench.guest, _teller(feed))
                if plan.start:
                    await starting.start(bench.guest, plan.start, _teller(feed), _output(feed))
                return await bench.keep(plan.key, plan.settings, final=True)
        except AenvError as error:
            raise StepFailed(FINALIZE, str(error)) from error
        finally:
            hold.release()

    async def _as_it_is(self, plan: Plan, snapshot: Snapshot) -> Snapshot:
        """A snapshot of its own over the files of one that has all of it already."""
        if snapshot.kind == "step":
            return await self._snapshots.make_durable(snapshot.id)
        descent = Descent("", "a step of a build", plan.key)
        return await self._second(snapshot, "build", "step", descent, plan.settings)

    async def _flat(self, made: Snapshot) -> Snapshot:
        memory = made.memory
        if memory is None or sum(delta.bytes for delta in memory.deltas) < FLATTEN_BYTES:
            return made
        try:
            await self._after.flatten(made.id)
        except AenvError as error:  # it is as good, only starts from it cost more
            log.warning("the memory of %s stays in layers: %s", made.id, error)
        return self._snapshots.get(made.id)

    async def for_template(self, made: Snapshot, descent: Descent, settings: GuestSettings) -> Snapshot:
        """The snapshot that a template's sandboxes start from: another record over the same files.

        Raises:
            StoreFull, StoreFault: it cannot be recorded.
        """
        record = await self._second(made, descent.id, "template", descent, settings)
        self._after.tend(record.id)
        return record

    async def _second(
        self, made: Snapshot, owner: str, kind: Kind, descent: Descent, settings: GuestSettings
    ) -> Snapshot:
        hold = self._snapshots.keep(made)
        try:
            draft = self._snapshots.begin(owner)
            try:
                record = replace(
                    made,
                    id=draft.id,
                    kind=kind,
                    template=descent,
                    guest=settings,
                    names=(),
                    parent=None,
                    created_at=self._workshop.now(),
                )
                return await self._snapshots.publish(draft, record, durable=True)
            except BaseException:
                await self._snapshots.abandon(draft)
                raise
        finally:
            hold.release()

    def recover(self) -> None:
        """Forget what an earlier life of the node made and did not get to keep."""
        self._cache.drop_orphans()

    def trim(self) -> None:
        """Let go of steps that are too many or too old."""
        if gone := self._cache.trim(self._workshop.now()):
            log.info("%d steps of builds are kept no longer", gone)

    async def stop(self) -> None:
        """Break off what is being booted."""
        tasks = list(self._roots.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _disk(plan: Plan) -> str:
    """The key of the disk that a build's steps leave, where that is booted from."""
    return hashlib.sha256(json.dumps(["disk", plan.key]).encode()).hexdigest()


def _collection(planned: Planned, origin: Ground) -> str:
    """The key of the files that a step copies from somewhere else."""
    parts = ["collected", str(FORMAT), origin.root.identity, planned.step.args[0]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _teller(feed: Feed) -> starting.Tell:
    return lambda level, message: feed.tell(level, message, FINALIZE)


def _output(feed: Feed) -> starting.OutputOf:
    def of(what: str) -> Output:
        return following(feed, FINALIZE, "info" if what == "start" else "debug", what).feed

    return of
