"""From a running machine to a snapshot on record, and back to running where that failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from agentenv.errors import AenvError, HostFault
from agentenv.sandbox.agent import cause
from agentenv.sandbox.core import Core
from agentenv.sandbox.live import Live
from agentenv.sandbox.observing import Change
from agentenv.sandbox.phases import Phases
from agentenv.sandbox.records import Sandbox
from agentenv.sandbox.transitions import Outcome, settle
from agentenv.snapshot.draft import Draft
from agentenv.snapshot.machine import Contents
from agentenv.snapshot.records import Descent, Kind, Snapshot
from agentenv.snapshot.store import Snapshots
from agentenv.vmm.stored import map_of

log = logging.getLogger(__name__)


async def capture(
    live: Live,
    draft: Draft,
    snapshots: Snapshots,
    phases: Phases,
    *,
    final: bool,
    memory: bool = True,
) -> Contents:
    """Stop a sandbox's machine and write its state into a draft; the machine stays stopped.

    Without `memory` only the disk is told of. On failure the draft is empty again.
    """
    machine = live.machine
    assert machine is not None
    with phases("stop"):
        await machine.stop()
    with phases("capture"):
        captured = await machine.capture(draft.path, final=final)
    contents = snapshots.describe(captured, parent_of(live.record, snapshots))
    if not memory:
        for file in (captured.device_state, captured.memory, map_of(captured.memory)):
            file.unlink(missing_ok=True)
    return contents


async def run_on(live: Live) -> None:
    """Let a stopped machine go on.

    Raises:
        HostFault: it is gone.
    """
    machine = live.machine
    if machine is None or machine.exited:
        detail = (await machine.wait()).detail if machine is not None else "it is gone"
        raise HostFault(f"its machine ended: {detail}")
    await machine.run()


async def undo(
    core: Core,
    live: Live,
    draft: Draft,
    error: BaseException,
    *,
    stopped: bool,
    done: str,
    change: Change = Change.CHECKPOINT_FAILED,
) -> bool:
    """Give a capture that failed up and let the sandbox run on, really; where that cannot be, it has failed,
    and the answer is False. `done` says what it was to be, as "paused", and `change` what those who watch are
    told."""
    try:
        await core.snapshots.abandon(draft)
        if stopped:
            await run_on(live)
    except BaseException as second:
        await core.lose(live, f"it could not be {done}: {cause(error)}; nor go on: {cause(second)}")
        if isinstance(second, AenvError):
            return False  # the caller hears what went wrong first
        raise
    core.commit_anyway(live, live.record.with_state(settle(Outcome.UNDONE, live.record.state), target=None))
    core.collect_soon()
    core.tell(change, live.record, reason=cause(error))
    log.warning("sandbox %s could not be %s and runs on: %s", live.record.id, done, cause(error))
    return True


def parent_of(record: Sandbox, snapshots: Snapshots) -> Snapshot | None:
    """The snapshot that a sandbox's machine stands on, although it be deleted."""
    return None if record.snapshot is None else snapshots.recorded(record.snapshot)


def snapshot_of(
    record: Sandbox,
    draft: Draft,
    contents: Contents,
    snapshots: Snapshots,
    *,
    kind: Kind,
    now: float,
    memory: bool = True,
    names: Sequence[str] = (),
) -> Snapshot:
    """The record of what was captured of a sandbox."""
    parent = parent_of(record, snapshots)
    inherited = parent.fingerprint if parent is not None else {}
    return Snapshot(
        id=draft.id,
        kind=kind,
        template=Descent(record.template.id, record.template.name, record.template.build_id),
        resources=record.resources,
        disk=contents.disk,
        created_at=now,
        memory=contents.memory if memory else None,
        state=contents.state if memory else None,
        fingerprint=(record.fingerprint or inherited) if memory else {},
        guest=record.guest,
        parent=record.snapshot,
        sandbox_id=record.id,
        names=tuple(names),
        folds=contents.folds,
        project=record.project,
        drives=tuple(
            replace(drive, disk=disk) for drive, disk in zip(record.drives, contents.drives, strict=True)
        ),
    )
