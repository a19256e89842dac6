"""New sandboxes, one or many at a time."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import replace

from agentenv.errors import AenvError, Conflict
from agentenv.sandbox.agent import cause
from agentenv.sandbox.core import Core, outcome
from agentenv.sandbox.launch import identity_after, inherited, new_machine_id
from agentenv.sandbox.live import Live
from agentenv.sandbox.observing import Change
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.prepare import Prepared
from agentenv.sandbox.records import Claim, Sandbox, new_sandbox_id
from agentenv.sandbox.requests import Answer, Key, KeyReused, NewSandbox
from agentenv.sandbox.source import Source
from agentenv.sandbox.sources import Sources
from agentenv.sandbox.transitions import Outcome, State, settle
from agentenv.snapshot.records import Snapshot
from agentenv.vmm.machine import Incompatible

log = logging.getLogger(__name__)


class Creating:
    """Creates sandboxes."""

    def __init__(self, core: Core, sources: Sources, prepared: Prepared) -> None:
        self._core = core
        self.sources = sources
        self._prepared = prepared

    async def create(self, request: NewSandbox, key: Key | None = None) -> Answer:
        """See Sandboxes.create."""
        core = self._core
        if key is not None and (claim := core.all.records.claim(key.value)) is not None:
            return await self._repeat(claim, key)
        core.refuse_when_stopping()
        core.launcher.slots.check(request.network.policy)
        async with self.sources.of(request) as found:
            # It may have been asked for again while an image was pulled.
            if key is not None and (claim := core.all.records.claim(key.value)) is not None:
                return await self._repeat(claim, key)
            core.refuse_when_stopping()
            core.prune()
            record = self.new_record(request, found)
            new = None if key is None else Claim(key.value, key.request, record.id, record.started_at)
            return await outcome(self.begin(record, found, new))

    def new_record(self, request: NewSandbox, found: Source) -> Sandbox:
        """The record of a sandbox that is to be made."""
        now = self._core.clock.now()
        guest = replace(found.guest, env=inherited(found.guest.env, request.env))
        return Sandbox(
            id=new_sandbox_id(),
            state=State.CREATING,
            template=found.origin,
            started_at=now,
            end_at=now + request.timeout_s,
            timeout_s=request.timeout_s,
            vcpus=found.resources.vcpus,
            memory_mib=found.resources.memory_mib,
            disk_mib=found.resources.disk_mib,
            metadata=request.metadata,
            env=request.env,
            guest=guest,
            machine_id=new_machine_id(),
            snapshot=found.snapshot.id if found.snapshot else None,
            start=found.snapshot.id if found.snapshot else None,
            drives=found.drives,
            access_token=secrets.token_hex(32) if request.secure else None,
            traffic_token=None if request.network.public else secrets.token_hex(32),
            lifecycle=request.lifecycle,
            network=request.network,
            limits=request.limits,
            project=request.project,
            key=request.key,
            boot_id=self._core.boot_id,
        )

    def begin(self, record: Sandbox, found: Source, claim: Claim | None = None) -> asyncio.Task[Answer]:
        """Admit a new sandbox, record it and begin to start it.

        Raises:
            CapacityExceeded: there is no room for it. StoreFault: it cannot be recorded.
        """
        self._core.admit(record)
        try:
            live = self._core.all.add(record, claim)
        except BaseException:
            self._core.admission.release(record.id)
            raise
        self._core.hold(live)
        return live.begin(self._create(live, found), "create")

    async def _create(self, live: Live, found: Source) -> Answer:
        core = self._core
        phases = Phases("create", live.record.id)
        try:
            snapshot = await self._first(live, found, phases)
            try:
                await self._launch(live, snapshot, phases)
            except Incompatible as error:
                if found.template is None:
                    raise
                log.warning("template %s is prepared anew: %s", found.origin.name, error)
                with phases("prepare"):
                    snapshot = await self._prepared.of(found.template, found.first, unusable=snapshot.id)
                await self._launch(live, snapshot, phases)
            self._commit_running(live)
        except BaseException as error:
            await self._undo(live, f"it could not be started: {cause(error)}")
            raise
        core.watch(live)
        core.expiry.set(live.record.id, live.record.end_at)
        if snapshot.kind == "checkpoint" and snapshot.memory is not None and snapshot.memory.deltas:
            core.tend(snapshot.id)  # which may be worth a flat file by now
        core.finish(phases)
        core.tell(Change.CREATED, live.record)
        log.info("sandbox %s from %s runs after %s", live.record.id, found.origin.name, phases)
        return Answer(live.record, phases)

    async def _first(self, live: Live, found: Source, phases: Phases) -> Snapshot:
        if found.snapshot is not None:
            return found.snapshot
        assert found.template is not None
        ready = self._prepared.ready(found.template, found.first)
        if ready is not None:
            return ready
        with phases("prepare"):
            return await self._prepared.of(found.template, found.first)

    async def _launch(self, live: Live, snapshot: Snapshot, phases: Phases) -> None:
        core = self._core
        core.commit(live, replace(live.record, snapshot=snapshot.id, start=snapshot.id))
        # A snapshot that somebody took is not booted once for all others of that size: it boots each time.
        usual, asked = snapshot.resources, live.record.resources
        memory = (usual.vcpus, usual.memory_mib) == (asked.vcpus, asked.memory_mib)
        identity = identity_after(live.record, snapshot, memory=memory)
        await core.launcher.launch(
            live, snapshot, identity, phases, lambda record: core.commit(live, record), memory=memory
        )

    def _commit_running(self, live: Live) -> None:
        now = self._core.clock.now()
        state = settle(Outcome.DONE, live.record.state)
        end_at = now + live.record.timeout_s
        self._core.commit(live, live.record.with_state(state, started_at=now, end_at=end_at))

    async def _undo(self, live: Live, reason: str) -> None:
        core = self._core
        core.commit_failed(live, Outcome.UNDONE, reason)
        try:
            await core.release(live)
        except AenvError as error:  # it is tried again; the caller hears what went wrong first
            log.warning("sandbox %s could not be released yet: %s", live.record.id, error)

    async def _repeat(self, claim: Claim, key: Key) -> Answer:
        """The answer to a request that was made before."""
        if claim.request != key.request:
            raise KeyReused("this Idempotency-Key was used before with another request")
        live = self._core.all.find(claim.sandbox_id)
        if live is not None and live.record.state is State.CREATING and live.operation is not None:
            creation: asyncio.Task[Answer] = live.operation
            return await outcome(creation)
        record = live.record if live is not None else self._core.all.records.find(claim.sandbox_id)
        if record is None:
            raise Conflict("the sandbox that this Idempotency-Key made is no longer known")
        return Answer(record)
