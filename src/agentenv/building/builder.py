"""The builds of a node: asked for, begun, looked at, cancelled."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from agentenv.building.contexts import Contexts
from agentenv.building.definition import BASE, Definition
from agentenv.building.export import Exporter
from agentenv.building.flights import Flights
from agentenv.building.ground import Ground, Grounds
from agentenv.building.logs import PAGE_MAX, Entry, Feed, Logs
from agentenv.building.maker import Maker
from agentenv.building.plan import Plan, plan
from agentenv.building.steps import StepFailed
from agentenv.config import Settings
from agentenv.errors import AenvError, Conflict, NotFound, StoreFault
from agentenv.progress import Seldom
from agentenv.sandbox.core import RETRY_S
from agentenv.sandbox.requests import Stopping
from agentenv.snapshot.records import Descent, Snapshot
from agentenv.template import names
from agentenv.template.builds import Builds
from agentenv.template.records import Build, Named, Reason, Template
from agentenv.template.sizes import DISK_MIB_MAX, MEMORY_MIB_MAX, MEMORY_MIB_MIN, VCPUS_MAX, within
from agentenv.template.states import ENDS, BuildState
from agentenv.template.store import Templates

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """A build, and a page of what it told."""

    build: Build
    entries: Sequence[Entry]


class Builder:
    """Builds templates. Each build is a task of its own; those that come to the same share its making."""

    def __init__(
        self,
        settings: Settings,
        templates: Templates,
        builds: Builds,
        logs: Logs,
        contexts: Contexts,
        grounds: Grounds,
        maker: Maker,
        exporter: Exporter,
    ) -> None:
        self.contexts = contexts
        self.exporter = exporter
        self._templates = templates
        self._builds = builds
        self._logs = logs
        self._grounds = grounds
        self._maker = maker
        self._flights = Flights()
        self._turns = asyncio.Semaphore(settings.builds_at_once or os.cpu_count() or 1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owed: dict[str, asyncio.TimerHandle] = {}
        self._stopping = False

    # Life

    def start(self) -> None:
        """Give the builds that an earlier life of the node was at their end. Its machines are reaped before
        this."""
        for build in self._builds.unended():
            if build.state is BuildState.BUILDING:
                self._end(build, Reason("the node ended while it was built"))
        self._maker.recover()

    async def stop(self) -> None:
        """Begin nothing new, and break off what is under way: it has failed."""
        self._stopping = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._maker.stop()
        for timer in self._owed.values():  # the next start makes up for it
            timer.cancel()

    def sweep(self, now: float | None = None) -> None:
        """Forget what nobody asks for any more: builds that were never begun, old ones, old uploads."""
        now = time.time() if now is None else now
        for build in self._builds.abandoned(now):
            self._end(build, Reason("nobody said what it is made of"))
        self._builds.prune(now)
        self.contexts.sweep(now)

    def observe(self, changed: Callable[[Build], None]) -> None:
        """Have `changed` called with each build that comes to another state from now on."""
        self._builds.listeners.append(changed)

    @property
    def under_way(self) -> int:
        """How many builds are being made."""
        return len(self._tasks)

    # Asking

    def open(
        self,
        name: str,
        tags: Sequence[str] = (),
        *,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        free_mib: int | None = None,
    ) -> tuple[Named, Build]:
        """A build that waits for `begin`.

        Raises:
            InvalidRequest: name, tags or sizes cannot be. Conflict: a snapshot has the name. Stopping.
        """
        if self._stopping:
            raise Stopping("the node is stopping", retry_after=10)
        reference = names.parse(name)
        if vcpus is not None:
            within("cpuCount", vcpus, 1, VCPUS_MAX)
        if memory_mib is not None:
            within("memoryMB", memory_mib, MEMORY_MIB_MIN, MEMORY_MIB_MAX)
        within("minFreeDiskMb", free_mib or 0, 0, DISK_MIB_MAX)
        known = self._templates.find_named(reference.name)
        build = self._builds.open(
            known.name if known else reference.name,
            names.wanted_tags(reference, tags),
            vcpus=vcpus,
            memory_mib=memory_mib,
            free_mib=free_mib or 0,
        )
        return self._templates.named(build.template_id), build

    def find(self, template: str, build_id: str) -> Build:
        """A build of a template, by the template's id or name.

        Raises:
            NotFound: there is none.
        """
        return self._builds.get(build_id, self._templates.named(template).id)

    def begin(self, build: Build, definition: Definition) -> None:
        """Begin to build; it goes on whatever its client does.

        Raises:
            Conflict: it was begun already. Stopping: the node begins nothing new.
        """
        if self._stopping:
            raise Stopping("the node is stopping", retry_after=10)
        begun = self._builds.begin(build.id)
        task = asyncio.create_task(self._run(begun, definition), name=f"build {build.id}")
        self._tasks[build.id] = task
        task.add_done_callback(lambda _done: self._tasks.pop(build.id, None))

    def refuse(self, build: Build, error: AenvError) -> None:
        """A build's definition was refused: it will not wait for another."""
        if build.state is BuildState.WAITING:
            self._end(build, Reason(str(error)))

    async def cancel(self, build: Build) -> Build:
        """Have a build come to nothing; one that has ended stays as it is.

        Raises:
            NotFound: it is gone.
        """
        if build.state in ENDS:
            return build
        cancelled = self._builds.cancel(build.id)
        if (task := self._tasks.get(build.id)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return cancelled

    async def deleted(self, named: Named) -> None:
        """A template is gone with all its builds: break off those under way."""
        tasks = [self._tasks[build.id] for build in named.builds if build.id in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def status(
        self, template: str, build_id: str, *, offset: int = 0, limit: int = PAGE_MAX, level: str = "debug"
    ) -> Status:
        """A build, and what it told from entry `offset` on.

        Raises:
            NotFound: there is none.
        """
        # The state before the log: what is told at the end is there when the end is seen.
        build = self.find(template, build_id)
        return Status(build, self._logs.page(build_id, offset, limit, level))

    # Building

    async def _run(self, build: Build, definition: Definition) -> None:
        def tell(entries: Sequence[Entry]) -> None:
            try:
                self._logs.add(build.id, entries)
            except StoreFault as error:  # no reason for a build to fail
                log.warning("what build %s tells is not kept: %s", build.id, error)

        feed = Feed()
        feed.listen(tell)
        try:
            feed.tell("info", f"Building from {definition.base}", BASE)
            template = await self._build(build, definition, feed)
            feed.tell("info", "The template is ready")
            self._builds.finish(build.id, template)
            self._maker.trim()
            log.info("template %s is built (build %s)", template.name, build.id)
        except asyncio.CancelledError:
            self._end(build, Reason("the node stopped" if self._stopping else "the build was cancelled"))
            raise
        except StepFailed as error:
            feed.tell("error", error.message, error.step)
            self._end(build, Reason(error.message, error.step))
        except AenvError as error:
            feed.tell("error", str(error))
            self._end(build, Reason(str(error)))
        except Exception:  # its client must not wait for ever for a fault of ours
            log.exception("build %s", build.id)
            self._end(build, Reason("an internal error; the node's log has more"))

    async def _build(self, build: Build, definition: Definition, feed: Feed) -> Template:
        ground = await self._grounds.of(definition, build, Seldom(lambda text: feed.tell("info", text, BASE)))
        copied = [ground.origins[number].root.identity for number in sorted(ground.origins)]
        planned = plan(definition, ground.root, copied)
        made = self._maker.known(planned)
        if made is not None:
            feed.tell("info", "CACHED all of it")
        else:
            key = planned.key if planned.forced is None else f"{planned.key} {build.id}"
            made = await self._flights.join(
                key, lambda told: self._take_turn(planned, ground, told), feed.pass_on
            )
        named = self._templates.named(build.template_id)
        descent = Descent(named.id, named.name, build.id)
        await self._maker.for_template(made, descent, planned.settings)
        return _template(named, build, definition, planned, made)

    async def _take_turn(self, planned: Plan, ground: Ground, feed: Feed) -> Snapshot:
        if self._turns.locked():
            feed.tell("info", "Waiting for other builds", BASE)
        with ground.held():
            async with self._turns:
                return await self._maker.make(planned, ground, feed)

    def _end(self, build: Build, reason: Reason) -> None:
        """A build has failed, unless it was cancelled or deleted meanwhile. What cannot be recorded now is
        tried again: a full disk is often why it failed."""
        self._owed.pop(build.id, None)
        try:
            self._builds.fail(build.id, reason)
        except (Conflict, NotFound):
            return
        except StoreFault as error:
            log.warning("build %s: its end is not recorded yet: %s", build.id, error)
            again = partial(self._end, build, reason)
            self._owed[build.id] = asyncio.get_running_loop().call_later(RETRY_S, again)
            return
        log.info("build %s failed: %s", build.id, reason.message)


def _template(named: Named, build: Build, definition: Definition, planned: Plan, made: Snapshot) -> Template:
    context, resources, config = planned.context, planned.root.resources, planned.root.config
    return Template(
        id=named.id,
        name=named.name,
        build_id=build.id,
        rootfs=None,
        disk_mib=resources.disk_mib,
        memory_mib=resources.memory_mib,
        vcpus=resources.vcpus,
        source=definition.base,
        recipe=planned.key,
        digest=made.id,
        size_bytes=made.added_bytes,
        default_user=context.user,
        default_workdir=context.workdir,
        created_at=named.created_at,
        updated_at=time.time(),
        env=dict(context.env),
        entrypoint=config.entrypoint,
        cmd=config.cmd,
        start=planned.start,
        labels=dict(config.labels),
        exposed_ports=config.exposed_ports,
        init=planned.init,
    )
