"""The sandboxes of this node: what can be done with them, one operation at a time each.

A state is decided and committed synchronously, then the operation runs as a task of its own that
finishes whatever its caller does. The rules are in `transitions`, the machines in `launch`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from agentenv.config import Settings
from agentenv.errors import AenvError, CapacityExceeded, Conflict, NotFound, NotImplementedYet
from agentenv.proxy.directory import Route
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.sandbox.agent import Agent, cause
from agentenv.sandbox.expiry import Expiry
from agentenv.sandbox.launch import AgentClient, Launcher
from agentenv.sandbox.listing import Page, Query, select
from agentenv.sandbox.live import Live
from agentenv.sandbox.parts import Clock, GuestFilesSource, Slots, SystemClock, Template, Templates
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Claim, Origin, Records, Sandbox, new_sandbox_id
from agentenv.sandbox.recovery import recover_all
from agentenv.sandbox.registry import Registry
from agentenv.sandbox.requests import Answer, Key, KeyReused, NewSandbox, Stopping, refuse_unsupported
from agentenv.sandbox.transitions import ENDS, SHOWN, Enter, Join, Operation, Outcome, State, settle
from agentenv.vmm.machine import Exit, Hypervisor

log = logging.getLogger(__name__)

T = TypeVar("T")

TURN_LIMIT_S = 60.0
EXPIRIES_AT_ONCE = 16
RETRY_S = 5.0
STOP_GRACE_S = 10.0
KEEP_CLAIMS_S = 24 * 3600.0
KEEP_ENDED_S = 24 * 3600.0
PRUNE_EVERY_S = 3600.0
KEEP_PHASES = 1000
EXPIRED = "its time-to-live ran out"

GenerationEnd = Callable[[str, int], None]


class Sandboxes:
    """All sandboxes of a node. It is also the data plane's `Directory`."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        ledger: Ledger,
        hypervisor: Hypervisor,
        slots: Slots,
        templates: Templates,
        guest_files: GuestFilesSource,
        *,
        clock: Clock | None = None,
        agent_at: Callable[[str], AgentClient] = Agent,
        turn_limit_s: float = TURN_LIMIT_S,
    ) -> None:
        self._settings = settings
        self._boot_id = ledger.boot_id
        self._hypervisor = hypervisor
        self._slots = slots
        self._templates = templates
        self._launcher = Launcher(
            hypervisor, slots, guest_files, agent_at, boot_timeout_s=settings.boot_timeout_s
        )
        self._clock = clock or SystemClock()
        self._turn_limit_s = turn_limit_s
        self._all = Registry(Records(database))
        self._expiry = Expiry(self._clock, self._expire)
        self._expiries = asyncio.Semaphore(EXPIRIES_AT_ONCE)
        self._background: set[asyncio.Task[None]] = set()
        self._listeners: list[GenerationEnd] = []
        self._stopping = False
        self._pruned_at = 0.0
        self.recent: deque[Phases] = deque(maxlen=KEEP_PHASES)

    # Life of the service

    async def start(self) -> None:
        """Adopt the sandboxes of an earlier life, reap what else is left of it, and let time run on."""
        adopted = await recover_all(
            self._all.records, self._hypervisor, self._slots, boot_id=self._boot_id, now=self._clock.now()
        )
        for each in adopted:
            live = self._all.take(Live(each.record, each.machine, each.slot))
            if live.machine is not None:
                self._watch(live)
            self._expiry.set(live.record.id, live.record.end_at)
        self._prune()

    async def stop(self, *, keep: bool = True) -> None:
        """Begin nothing new, let operations under way end, and let go of the machines.

        With `keep` the machines run on, to be adopted at the next start; else they are ended.
        """
        self._stopping = True
        self._expiry.stop()
        if not keep:
            kills = [self.kill(live.record.id, why="the node stopped") for live in self._all]
            await asyncio.gather(*kills, return_exceptions=True)  # each is logged where it happens
        await _let_end({live.operation for live in self._all if live.operation is not None})
        await _cut_off({live.watch for live in self._all if live.watch is not None} | self._background)
        for live in self._all:
            if live.machine is not None:
                live.machine.detach()
        self._all.clear()

    # Looking

    def get(self, sandbox_id: str) -> Sandbox:
        """The sandbox of that id.

        Raises:
            NotFound: there is none, or it has ended; the message says how where that is known.
        """
        live = self._all.find(sandbox_id)
        if live is None or live.record.state not in SHOWN:
            raise self._all.missing(sandbox_id)
        return live.record

    def list(self, query: Query) -> Page:
        """A page of sandboxes."""
        return select((live.record for live in self._all), query)

    @property
    def count(self) -> int:
        """Sandboxes that exist now, in whatever state."""
        return len(self._all)

    def route(self, sandbox_id: str) -> Route | None:
        """See proxy.directory.Directory."""
        return self._all.route(sandbox_id)

    def by_signature(
        self, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route | None:
        """See proxy.directory.Directory."""
        return self._all.by_signature(path, operation, username, signature, expiration)

    def on_generation_end(self, callback: GenerationEnd) -> None:
        """Have `callback(sandbox_id, generation)` called when a generation of a machine ends or is
        given up, after it has stopped to have a route: connections to it are to be aborted."""
        self._listeners.append(callback)

    # Operations

    async def create(self, request: NewSandbox, key: Key | None = None) -> Answer:
        """A new sandbox, running and with its agent ready.

        A `key` seen before with the same request gives the sandbox that was made then.

        Raises:
            NotFound: no such template. CapacityExceeded: the node is full. KeyReused: see there.
            GuestFault, HostFault, StoreFault: it could not be started; nothing is left of it.
        """
        if key is not None and (claim := self._all.records.claim(key.value)) is not None:
            return await self._repeat(claim, key)
        if self._stopping:
            raise Stopping("the node is stopping", retry_after=10)
        refuse_unsupported(request)
        template = self._templates.get(request.template)
        self._admit()
        record = self._new_record(request, template)
        claim = None if key is None else Claim(key.value, key.request, record.id, record.started_at)
        self._prune()
        live = self._all.add(record, claim)
        return await _outcome(live.begin(self._create(live, template), "create"))

    async def kill(self, sandbox_id: str, *, why: str = "killed") -> Phases:
        """End a sandbox and release all it had; a second caller waits for the same end.

        Raises:
            NotFound: there is none. Conflict: another operation on it does not end.
        """
        return await _outcome(await self._begin_kill(sandbox_id, why, None))

    async def connect(self, sandbox_id: str, timeout_s: int) -> Answer:
        """The sandbox, running, for at least `timeout_s` seconds from now (never less than it had).

        Raises:
            NotFound, Conflict: as for `kill`.
        """
        live, verdict = await self._turn(sandbox_id, Operation.CONNECT)
        if isinstance(verdict, Enter):
            raise NotImplementedYet("resuming a paused sandbox is not part of this version yet")
        self._set_end(live, max(live.record.end_at, self._clock.now() + timeout_s))
        return Answer(live.record)

    async def refresh(self, sandbox_id: str, duration_s: int) -> None:
        """Let the sandbox live for at least `duration_s` seconds from now."""
        live, _ = await self._turn(sandbox_id, Operation.TIMEOUT)
        self._set_end(live, max(live.record.end_at, self._clock.now() + duration_s))

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Let the sandbox live `timeout_s` seconds from now, more or less than before. With 0 or less
        its end has begun when this returns."""
        live, _ = await self._turn(sandbox_id, Operation.TIMEOUT)
        if timeout_s > 0:
            self._set_end(live, self._clock.now() + timeout_s)
        elif not live.busy:
            self._enter_kill(live, "its time-to-live was set to 0", None)
        else:  # a checkpoint or fork goes on first
            self._set_end(live, self._clock.now())

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> Phases:
        """Not part of this version yet."""
        self.get(sandbox_id)
        raise NotImplementedYet("pausing a sandbox is not part of this version yet")

    async def _turn(self, sandbox_id: str, operation: Operation) -> tuple[Live, object]:
        return await self._all.turn(sandbox_id, operation, self._turn_limit_s)

    # Creating

    def _admit(self) -> None:
        """Refuse when the node is full. What is admitted is counted before anybody else can ask."""
        limit = self._settings.max_sandboxes
        if len(self._all) >= limit:
            raise CapacityExceeded(
                f"the node holds {len(self._all)} sandboxes, its limit is {limit}",
                remedy="kill some, or raise AENV_MAX_SANDBOXES",
                retry_after=5,
            )

    def _new_record(self, request: NewSandbox, template: Template) -> Sandbox:
        now = self._clock.now()
        return Sandbox(
            id=new_sandbox_id(),
            state=State.CREATING,
            template=Origin(template.id, template.name, template.build_id),
            started_at=now,
            end_at=now + request.timeout_s,
            timeout_s=request.timeout_s,
            vcpus=template.vcpus,
            memory_mib=template.memory_mib,
            disk_mib=template.disk_mib,
            metadata=request.metadata,
            env=request.env,
            access_token=secrets.token_hex(32) if request.secure else None,
            traffic_token=None if request.network.public else secrets.token_hex(32),
            lifecycle=request.lifecycle,
            network=request.network,
            boot_id=self._boot_id,
        )

    async def _create(self, live: Live, template: Template) -> Answer:
        phases = Phases("create", live.record.id)
        try:
            await self._launcher.launch(live, template, phases, lambda record: self._all.commit(live, record))
            self._commit_running(live)
        except BaseException as error:
            await self._undo_create(live, f"it could not be started: {cause(error)}")
            raise
        self._watch(live)
        self._expiry.set(live.record.id, live.record.end_at)
        self._finish(phases)
        log.info("sandbox %s from template %s runs after %s", live.record.id, template.name, phases)
        return Answer(live.record, phases)

    def _commit_running(self, live: Live) -> None:
        now = self._clock.now()
        state = settle(Outcome.DONE, live.record.state)
        self._all.commit(
            live, live.record.with_state(state, started_at=now, end_at=now + live.record.timeout_s)
        )

    async def _undo_create(self, live: Live, reason: str) -> None:
        state = settle(Outcome.UNDONE, live.record.state)
        self._all.commit_end(live, state, reason, self._clock.now())
        try:
            await self._release(live)
        except AenvError as error:  # it is tried again; the caller hears what went wrong first
            log.warning("sandbox %s could not be released yet: %s", live.record.id, error)

    async def _repeat(self, claim: Claim, key: Key) -> Answer:
        """The answer to a request that was made before."""
        if claim.request != key.request:
            raise KeyReused("this Idempotency-Key was used before with another request")
        live = self._all.find(claim.sandbox_id)
        if live is not None and live.record.state is State.CREATING and live.operation is not None:
            answer: Answer = await _outcome(live.operation)
            return answer
        record = live.record if live is not None else self._all.records.find(claim.sandbox_id)
        if record is None:
            raise Conflict("the sandbox that this Idempotency-Key made is no longer known")
        return Answer(record)

    def _prune(self) -> None:
        now = self._clock.now()
        if now - self._pruned_at >= PRUNE_EVERY_S:
            self._pruned_at = now
            self._all.records.prune(ended_before=now - KEEP_ENDED_S, claims_before=now - KEEP_CLAIMS_S)

    # Ending

    async def _begin_kill(
        self, sandbox_id: str, why: str, bound: asyncio.Semaphore | None
    ) -> asyncio.Task[Phases]:
        live, verdict = await self._turn(sandbox_id, Operation.KILL)
        if isinstance(verdict, Join) and live.operation is not None:
            return live.operation
        return self._enter_kill(live, why, bound)

    def _enter_kill(self, live: Live, why: str, bound: asyncio.Semaphore | None) -> asyncio.Task[Phases]:
        if live.record.state is not State.KILLING:
            self._all.commit_leaving(live, State.KILLING, why)
            self._leave(live)
        return live.begin(self._kill(live, bound), "kill")

    async def _kill(self, live: Live, bound: asyncio.Semaphore | None) -> Phases:
        phases = Phases("kill", live.record.id)
        if bound is not None:
            await bound.acquire()
        try:
            with phases("release"):
                await self._release(live)
        finally:
            if bound is not None:
                bound.release()
        self._finish(phases)
        log.info("sandbox %s: %s, released after %s", live.record.id, live.record.reason, phases)
        return phases

    def _leave(self, live: Live) -> None:
        """The present generation is given up: no expiry, and an end to connections."""
        self._expiry.drop(live.record.id)
        for listener in self._listeners:
            listener(live.record.id, live.record.generation)

    async def _release(self, live: Live) -> None:
        """Release all that a sandbox has, and forget it. What fails is tried again later."""
        try:
            await self._launcher.release(live)
        except BaseException:
            self._retry_later(live.record.id)
            raise
        if live.record.state not in ENDS:
            end = settle(Outcome.DONE, live.record.state)
            self._all.commit_end(live, end, live.record.reason or "killed", self._clock.now())
        self._all.remove(live)
        self._expiry.drop(live.record.id)
        if live.watch is not None:
            live.watch.cancel()

    def _retry_later(self, sandbox_id: str) -> None:
        if self._all.find(sandbox_id) is not None:
            self._expiry.set(sandbox_id, self._clock.now() + RETRY_S)

    # Machines that end by themselves

    def _watch(self, live: Live) -> None:
        machine = live.machine
        assert machine is not None
        sandbox_id = live.record.id
        machine.on_event(
            lambda event, data: log.warning("sandbox %s: machine event %s %s", sandbox_id, event, data)
        )
        live.watch = asyncio.create_task(self._until_exit(live), name=f"watch {sandbox_id}")

    async def _until_exit(self, live: Live) -> None:
        assert live.machine is not None
        ended = await live.machine.wait()
        while live.operation is not None:  # it sees the exit itself
            await asyncio.wait({live.operation})
        if live.record.state is State.RUNNING:
            live.begin(self._fail(live, _exit_reason(ended)), "release")

    async def _fail(self, live: Live, reason: str) -> None:
        log.warning("sandbox %s failed: %s", live.record.id, reason)
        self._all.commit_end(live, settle(Outcome.DIED, live.record.state), reason, self._clock.now())
        self._leave(live)
        await self._release(live)

    # Time

    def _set_end(self, live: Live, end_at: float) -> None:
        if end_at != live.record.end_at:
            self._all.commit(live, replace(live.record, end_at=end_at))
            self._expiry.set(live.record.id, end_at)

    def _expire(self, sandbox_id: str) -> None:
        task = asyncio.create_task(self._expire_now(sandbox_id), name=f"expire {sandbox_id}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _expire_now(self, sandbox_id: str) -> None:
        try:
            live = self._all.find(sandbox_id)
            if live is not None and live.record.state in ENDS and not live.busy:
                await asyncio.shield(live.begin(self._release(live), "release"))
            else:
                await asyncio.shield(await self._begin_kill(sandbox_id, EXPIRED, self._expiries))
        except NotFound:
            pass
        except AenvError as error:  # nobody waits for an expiry: it is tried again
            log.warning("sandbox %s could not be ended yet: %s", sandbox_id, error)
            self._retry_later(sandbox_id)

    def _finish(self, phases: Phases) -> None:
        phases.finish()
        self.recent.append(phases)


async def _outcome(operation: asyncio.Task[T]) -> T:
    """The result of an operation, which goes on when the caller is cancelled."""
    try:
        return await asyncio.shield(operation)
    except asyncio.CancelledError:
        if operation.cancelled():
            raise Stopping("the node is stopping", retry_after=10) from None
        raise


async def _let_end(operations: set[asyncio.Task[T]]) -> None:
    """Wait for operations for a while, then cut them off; they undo what they did."""
    if operations:
        _, late = await asyncio.wait(operations, timeout=STOP_GRACE_S)
        await _cut_off(late)


async def _cut_off(tasks: set[asyncio.Task[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _exit_reason(ended: Exit) -> str:
    words = {
        "ended": "its machine was ended by something else than this node",
        "shutdown": "the guest shut itself down",
        "crashed": "its machine crashed",
    }
    status = "" if ended.status is None else f" (status {ended.status})"
    return words[ended.reason] + status + (f": {ended.detail}" if ended.detail else "")
