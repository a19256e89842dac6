"""The builds of templates: asked for, begun, ended, and forgotten after a while."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

from agentenv.errors import Conflict, NotFound
from agentenv.records.database import Database
from agentenv.template.records import Build, Reason, Template, decode
from agentenv.template.states import ENDS, BuildState, Event, after
from agentenv.template.store import Templates, assign, insert, tagged

KEEP_ENDED_S = 24 * 3600.0
KEEP_UNTAGGED_S = 3600.0
ABANDONED_S = 3600.0


class Builds:
    """The table of builds."""

    def __init__(self, database: Database, templates: Templates) -> None:
        self._database = database
        self._templates = templates
        self.listeners: list[Callable[[Build], None]] = []  # told of each build in another state

    def open(
        self,
        name: str,
        tags: tuple[str, ...],
        *,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        free_mib: int = 0,
    ) -> Build:
        """A build that waits to be told what it is made of, and gets the tags when it is ready. The template
        is made where there is none of that name.

        Raises:
            Conflict: a snapshot has the name.
        """
        now = time.time()
        with self._database.transaction() as cursor:
            template_id = self._templates.claim_name(cursor, name, now)
            build = Build(
                str(uuid.uuid4()),
                template_id,
                BuildState.WAITING,
                now,
                now,
                tags,
                vcpus,
                memory_mib,
                free_mib,
            )
            insert(cursor, build)
        return build

    def get(self, build_id: str, template_id: str | None = None) -> Build:
        """The build of an id, of that template.

        Raises:
            NotFound: there is none, or it is another template's.
        """
        rows = self._database.query("SELECT document FROM builds WHERE id = ?", (build_id,))
        if not rows:
            raise NotFound(f'build "{build_id}" not found')
        build = decode(rows[0]["document"])
        if template_id is not None and build.template_id != template_id:
            raise NotFound(f'template "{template_id}" has no build "{build_id}"')
        return build

    def unended(self) -> tuple[Build, ...]:
        """All that have not ended, oldest first."""
        marks = ", ".join("?" * len(ENDS))
        rows = self._database.query(
            f"SELECT document FROM builds WHERE state NOT IN ({marks}) ORDER BY created_at, id", tuple(ENDS)
        )
        return tuple(decode(row["document"]) for row in rows)

    def begin(self, build_id: str) -> Build:
        """It is being built from now on.

        Raises:
            NotFound: there is none. Conflict: it does not wait.
        """
        return self._change(build_id, Event.START)

    def fail(self, build_id: str, reason: Reason) -> Build:
        """It has failed.

        Raises:
            NotFound, Conflict: as `begin`.
        """
        return self._change(build_id, Event.FAIL, reason)

    def cancel(self, build_id: str) -> Build:
        """Somebody does not want it any more.

        Raises:
            NotFound, Conflict: as `begin`.
        """
        return self._change(build_id, Event.CANCEL, Reason("the build was cancelled"))

    def finish(self, build_id: str, made: Template) -> Build:
        """It is ready, and has its tags. A tag that a build has which was asked for later stays there.

        Raises:
            NotFound, Conflict: as `begin`.
        """
        now = time.time()
        with self._database.transaction() as cursor:
            build = self.get(build_id)
            build = replace(
                build, state=after(build.state, Event.FINISH), updated_at=now, made=made, reason=None
            )
            insert(cursor, build)
            for tag in build.tags:
                before = tagged(cursor, build.template_id, tag)
                if before is None or takes_over(build, before):
                    assign(cursor, build, tag, now)
        self._database.sync()
        self._tell(build)
        return build

    def _change(self, build_id: str, event: Event, reason: Reason | None = None) -> Build:
        with self._database.transaction() as cursor:
            build = self.get(build_id)
            build = replace(build, state=after(build.state, event), updated_at=time.time(), reason=reason)
            insert(cursor, build)
        self._tell(build)
        return build

    def _tell(self, build: Build) -> None:
        for listener in self.listeners:
            listener(build)

    def prune(self, now: float) -> None:
        """Forget builds that nobody asks for any more, and names that never came to anything."""
        with self._database.transaction() as cursor:
            rows = cursor.execute(
                "SELECT document FROM builds WHERE NOT EXISTS"
                " (SELECT 1 FROM template_tags WHERE build = builds.id)"
            )
            gone = forgettable((decode(row["document"]) for row in rows.fetchall()), now)
            cursor.executemany("DELETE FROM builds WHERE id = ?", [(build.id,) for build in gone])
            for template_id in {build.template_id for build in gone}:
                cursor.execute(
                    "DELETE FROM templates WHERE id = ?1"
                    " AND NOT EXISTS (SELECT 1 FROM builds WHERE template = ?1)",
                    (template_id,),
                )

    def abandoned(self, now: float) -> tuple[Build, ...]:
        """Those that wait to be told what they are made of, and will not be."""
        return tuple(
            build
            for build in self.unended()
            if build.state is BuildState.WAITING and build.created_at < now - ABANDONED_S
        )

    def refuse_unless_waiting(self, build: Build) -> None:
        """Raise Conflict for a build that was begun already."""
        if build.state is not BuildState.WAITING:
            raise Conflict(f"the build {build.id} is {build.state} already", remedy="ask for a new build")


def takes_over(build: Build, before: Build) -> bool:
    """Whether a build that is ready takes a tag from the one that has it: the last one asked for keeps it."""
    return (build.created_at, build.id) >= (before.created_at, before.id)


def forgettable(untagged: Iterable[Build], now: float) -> tuple[Build, ...]:
    """Which of the builds without a tag nobody asks for any more at `now`."""
    keep_s = {
        BuildState.READY: KEEP_UNTAGGED_S,
        BuildState.ERROR: KEEP_ENDED_S,
        BuildState.CANCELLED: KEEP_ENDED_S,
    }
    return tuple(
        build for build in untagged if build.state in keep_s and build.updated_at < now - keep_s[build.state]
    )
