"""Many sandboxes from one: of a running sandbox, or of a snapshot."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentenv.errors import AenvError, InvalidRequest
from agentenv.identity.caller import CALLER
from agentenv.sandbox import source
from agentenv.sandbox.checkpointing import Checkpointing
from agentenv.sandbox.core import Core, need_of, outcome
from agentenv.sandbox.creating import Creating
from agentenv.sandbox.launch import inherited, new_machine_id
from agentenv.sandbox.observing import Change
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Sandbox, new_sandbox_id
from agentenv.sandbox.requests import Answer, NewSandbox
from agentenv.sandbox.source import Source
from agentenv.sandbox.transitions import Operation, State
from agentenv.snapshot.records import Snapshot

log = logging.getLogger(__name__)

COUNT_MAX = 100


class Results(list[Answer | AenvError]):
    """One for each sandbox, in the order that was asked. `phases` are those of the capture, if there was
    one: what the source stood still for is among them."""

    phases: Phases | None = None


@dataclass(frozen=True)
class Child:
    """What one child has of its own: added to what it inherits, and winning over it."""

    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


class Forking:
    """Starts many."""

    def __init__(self, core: Core, creating: Creating, checkpointing: Checkpointing) -> None:
        self._core = core
        self._creating = creating
        self._checkpointing = checkpointing

    async def fork(
        self, sandbox_id: str, count: int = 1, timeout_s: int | None = None, children: Sequence[Child] = ()
    ) -> Results:
        """See Sandboxes.fork."""
        wishes = _wishes(count, children)
        if (source_of := self._core.all.find(sandbox_id)) is not None:
            # For one at least, before anything is done.
            self._core.require_quota(replace(source_of.record, id="", key=CALLER.get().key_id))
            self._core.admission.check(need_of(source_of.record))
        async with self._checkpointing.passing(sandbox_id, Operation.FORK) as (point, phases):
            parent = self._core.all.find(sandbox_id)
            if parent is None:  # killed meanwhile; what it was is there all the same
                raise self._core.all.missing(sandbox_id)
            record = parent.record
            lived_s = max(1, round(record.end_at - self._core.clock.now()))
            after = lived_s if record.state is not State.PAUSED else record.timeout_s
            records = [self._child(record, point, wish, timeout_s or after) for wish in wishes]
            results = await self._start(records, source.of_snapshot(point))
            results.phases = phases
            made = (each.sandbox.id for each in results if isinstance(each, Answer))
            self._core.tell(Change.FORKED, record, children=", ".join(made))
            return results

    async def batch(self, request: NewSandbox, count: int = 1, children: Sequence[Child] = ()) -> Results:
        """See Sandboxes.batch."""
        wishes = _wishes(count, children)
        self._core.refuse_when_stopping()
        async with self._creating.sources.of(request) as found:
            records = [
                self._creating.new_record(
                    replace(
                        request,
                        metadata={**request.metadata, **wish.metadata},
                        env={**request.env, **wish.env},
                    ),
                    found,
                )
                for wish in wishes
            ]
            return await self._start(records, found)

    async def _start(self, records: list[Sandbox], found: Source) -> Results:
        """Start them side by side; each has its own result, and those that there is no room for as well.

        Raises:
            AenvError: none can even be begun.
        """
        begun = [self._begin(record, found) for record in records]
        if isinstance(begun[0], AenvError):  # the first has the most room
            raise begun[0]
        waiting = [_given(each) if isinstance(each, AenvError) else outcome(each) for each in begun]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        answers = Results()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, AenvError):
                raise result
            answers.append(result)
        return answers

    def _begin(self, record: Sandbox, found: Source) -> asyncio.Task[Answer] | AenvError:
        try:
            return self._creating.begin(record, found)
        except AenvError as error:
            return error

    def _child(self, parent: Sandbox, point: Snapshot, wish: Child, timeout_s: int) -> Sandbox:
        """The record of a child: what it inherits, and what it must not share."""
        now = self._core.clock.now()
        return replace(
            parent,
            id=new_sandbox_id(),
            state=State.CREATING,
            started_at=now,
            end_at=now + timeout_s,
            timeout_s=timeout_s,
            generation=1,
            metadata={**parent.metadata, **wish.metadata},
            env={**parent.env, **wish.env},
            guest=replace(parent.guest, env=inherited(parent.guest.env, wish.env)),
            key=CALLER.get().key_id,
            machine_id=new_machine_id(),
            snapshot=point.id,
            start=point.id,
            target=None,
            fingerprint=None,
            pause_mode=None,
            agent_answered=True,
            paused_until=None,
            access_token=secrets.token_hex(32) if parent.access_token is not None else None,
            traffic_token=None if parent.network.public else secrets.token_hex(32),
            machine=None,
            slot=None,
            boot_id=self._core.boot_id,
            reason=None,
        )


async def _given(error: AenvError) -> Answer:
    raise error


def _wishes(count: int, children: Sequence[Child]) -> list[Child]:
    if not 1 <= count <= COUNT_MAX:
        raise InvalidRequest(f"count: must be 1 to {COUNT_MAX}, is {count}")
    if len(children) > count:
        raise InvalidRequest(f"children: {len(children)} are described, {count} are wanted")
    return [*children, *(Child() for _ in range(count - len(children)))]
