"""A template's first snapshot: booted cold once, captured when its agent is ready, then started from."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from agentenv.errors import AenvError, StoreCorrupt
from agentenv.network.slot import Slot
from agentenv.sandbox import starting
from agentenv.sandbox.admission import Need
from agentenv.sandbox.agent import Identity
from agentenv.sandbox.core import RETRY_S, Core, outcome
from agentenv.sandbox.guest import Guest, Output
from agentenv.sandbox.launch import spec_of
from agentenv.sandbox.parts import Template
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.source import IMAGE, settings_of
from agentenv.snapshot import keeping
from agentenv.snapshot.draft import Draft
from agentenv.snapshot.holds import Hold
from agentenv.snapshot.machine import stored
from agentenv.snapshot.records import Descent, Resources, Snapshot
from agentenv.vmm.machine import Layer, Machine

log = logging.getLogger(__name__)

FIRST_KINDS = ("template",)
USES_NOTED = 100  # how often, at most, within the time that one is kept


def _log(name: str) -> starting.Tell:
    return lambda level, message: log.debug("template %s: %s: %s", name, level, message)


def _nothing(_what: str) -> Output:
    """Nobody reads what a start command writes when it runs again."""
    return lambda _stream, _data: None


def size_of(template: Template) -> Resources:
    """What a template's sandboxes have unless they are asked for with another size."""
    return Resources(template.vcpus, template.memory_mib, template.disk_mib)


class Prepared:
    """The first snapshots of templates, each made when it is first asked for: one for each size of machine.

    Those of other sizes than the template's own, and those of images, expire when nobody uses them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._launcher = core.launcher
        self._snapshots = core.snapshots
        self._keep_s = core.settings.shape_keep_s
        self._budget = core.settings.shape_cache_mib << 20
        self._making: dict[tuple[str, Resources], asyncio.Task[Snapshot]] = {}

    def ready(self, template: Template, size: Resources | None = None) -> Snapshot | None:
        """The snapshot, for machines of that size or the template's, if it is there and whole."""
        found = self._snapshots.of_build(template.build_id, size or size_of(template))
        if found is None:
            return None
        try:
            self._snapshots.require_files(found)
        except StoreCorrupt as error:
            log.warning("the snapshot of template %s is made anew: %s", template.name, error)
            self._snapshots.delete(found.id)
            return None
        return self._used(found)

    def _used(self, found: Snapshot) -> Snapshot:
        """Put off its end, though not at every use: that is a write to the database."""
        if found.expires_at is None:
            return found
        expires_at = self._core.clock.now() + self._keep_s
        if expires_at - found.expires_at < self._keep_s / USES_NOTED:
            return found
        return self._snapshots.update(replace(found, expires_at=expires_at))

    async def of(
        self, template: Template, size: Resources | None = None, unusable: str | None = None
    ) -> Snapshot:
        """The snapshot of a template, made if there is none; callers at the same time share the making. With
        `size` it is of machines that have that.

        `unusable` is the id of one that could not be restored here: it is replaced, once. Where a build
        made it, by booting from its disk and running the start command again.

        Raises:
            AenvError: it could not be made; nothing is left of the attempt.
        """
        size = size or size_of(template)
        found = self.ready(template, size)
        if found is not None and found.id != unusable:
            return found
        below = found or self.ready(template)  # whose disk is booted where there is nothing else
        before = None if below is None else self._snapshots.keep(below)
        if found is not None:
            self._snapshots.delete(found.id)
        key = (template.build_id, size)
        task = self._making.get(key)
        if task is not None and before is not None:
            before.release()
        if task is None:
            task = asyncio.create_task(self._make(template, size, before), name=f"prepare {template.name}")
            self._making[key] = task
            task.add_done_callback(lambda done: self._made(template, key, done))
        return await outcome(task)

    def trim(self) -> None:
        """Delete what expires and is too much or too old, the longest unused first; machines run on."""
        now, home = self._core.clock.now(), self._snapshots.home
        kept = [
            keeping.Kept(record.id, keeping.bytes_added(home, record), record.expires_at - self._keep_s)
            for record in self._snapshots.of_kinds(FIRST_KINDS)
            if record.expires_at is not None
        ]
        for each in keeping.excess(kept, self._budget, self._keep_s, now):
            log.info("the first snapshot %s is kept no longer", each.key)
            self._snapshots.delete(each.key)
            self._core.collect_soon()

    async def stop(self) -> None:
        """Break off what is being made."""
        tasks = list(self._making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _made(self, template: Template, key: tuple[str, Resources], task: asyncio.Task[Snapshot]) -> None:
        del self._making[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("template %s could not be prepared: %s", template.name, error)

    async def _make(self, template: Template, size: Resources, before: Hold | None) -> Snapshot:
        phases = Phases("prepare", template.id)
        draft = self._snapshots.begin(template.id)
        try:
            layers = self._layers(template, before)
            record = await self._boot_and_capture(template, size, layers, draft, phases)
            with phases("publish"):
                made = await self._snapshots.publish(draft, record, durable=True)
        except BaseException:
            await self._snapshots.abandon(draft)
            raise
        finally:
            if before is not None:
                before.release()
        phases.finish()
        log.info("template %s is prepared after %s", template.name, phases)
        if made.expires_at is not None:
            self.trim()
        return made

    def _layers(self, template: Template, before: Hold | None) -> tuple[Layer, ...]:
        """The disk that it is booted from."""
        if template.rootfs is not None:
            stored(self._snapshots.home, template.rootfs)  # refused before anything is booted
            return (Layer(template.rootfs, "raw"),)
        if before is None:
            raise StoreCorrupt(f"the snapshot of template {template.name} is gone", remedy="build it again")
        return self._snapshots.layers(before.record)

    async def _boot_and_capture(
        self,
        template: Template,
        resources: Resources,
        layers: tuple[Layer, ...],
        draft: Draft,
        phases: Phases,
    ) -> Snapshot:
        launcher = self._launcher
        lasting = resources == size_of(template) and not template.build_id.startswith(IMAGE)
        settings = settings_of(template)
        # Whoever asked for it was admitted. A second machine beside is counted, not refused: a node with
        # room for one sandbox could never make the first.
        need = Need.running(
            vcpus=resources.vcpus, memory_mib=resources.memory_mib, disk_mib=resources.disk_mib
        )
        self._core.admission.adopt(draft.id, replace(need, sandboxes=0))
        try:
            slot = await launcher.slots.acquire(draft.id)
        except BaseException:
            self._core.admission.release(draft.id)
            raise
        machine: Machine | None = None
        try:
            spec = spec_of(draft.id, resources, slot, layers, launcher.guest_files(), settings.init)
            fingerprint = await launcher.hypervisor.fingerprint(spec)
            with phases("boot"):
                machine = await launcher.hypervisor.boot(spec)
            with phases("agent"):
                await self._until_ready(machine, slot)
            guest = Guest(machine, slot.address)
            if settings.init == "systemd":
                with phases("systemd"):
                    await starting.until_systemd(guest, _log(template.name))
            if template.start:
                with phases("start"):
                    await starting.start(guest, template.start, _log(template.name), _nothing)
            with phases("stop"):
                await machine.stop()
            with phases("capture"):
                contents = self._snapshots.describe(await machine.capture(draft.path, final=True))
        finally:
            await self._release(draft.id, machine, slot)
        return Snapshot(
            id=draft.id,
            kind="template",
            template=Descent(template.id, template.name, template.build_id),
            resources=resources,
            disk=contents.disk,
            created_at=time.time(),
            memory=contents.memory,
            state=contents.state,
            fingerprint=fingerprint,
            guest=settings,
            expires_at=None if lasting else self._core.clock.now() + self._keep_s,
        )

    async def _release(self, draft_id: str, machine: Machine | None, slot: Slot) -> None:
        """End the machine that was booted; tried again when it fails, which is not the snapshot's matter."""
        try:
            if machine is not None:
                await machine.end()
            await self._launcher.slots.release(slot)
            self._core.admission.release(draft_id)
        except AenvError as error:
            log.warning("a machine that a template was prepared in is not released yet: %s", error)
            self._core.clock.call_later(
                RETRY_S, lambda: self._core.spawn(self._release(draft_id, machine, slot), "release")
            )

    async def _until_ready(self, machine: Machine, slot: Slot) -> None:
        """The agent has answered, and has done once what every start will ask of it."""
        agent = self._launcher.agent_at(slot.address)
        try:
            await agent.wait_ready(machine, self._launcher.boot_timeout_s)
            await agent.take_over(machine, Identity(env={}), self._launcher.boot_timeout_s)
        finally:
            await agent.close()
