"""The templates of a node: names and tags in the database, root filesystems in the images directory."""

from __future__ import annotations

import json
import secrets
import sqlite3
import string
import time
from dataclasses import replace
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import Conflict, InvalidRequest, NotFound
from agentenv.records.database import Database
from agentenv.template import names
from agentenv.template.names import DEFAULT_TAG, check_name
from agentenv.template.records import Build, Named, Tag, Template, decode, encode
from agentenv.template.states import BuildState

__all__ = ["ENDED", "GRACE_S", "Template", "Templates", "check_name", "new_id"]

ID_LENGTH = 20
_ALPHABET = string.ascii_lowercase + string.digits

# Sandboxes in these states use no template any more.
ENDED = ("killed", "failed")

# A sandbox that is being created may have looked a template up and not be recorded yet.
GRACE_S = 60.0

_TAGGED = (
    "SELECT builds.document FROM template_tags JOIN builds ON builds.id = template_tags.build"
    " JOIN templates ON templates.id = template_tags.template"
)


def new_id() -> str:
    """A template id: 20 lowercase letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))


class Templates:
    """The tables of templates and tags, and the files that their builds name."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    # Finding

    def list(self) -> list[Template]:
        """What each name shows, by name: its `default`, or the newest build that is ready."""
        shown = [named.shown for named in self.all()]
        return [build.made for build in shown if build is not None and build.made is not None]

    def find(self, reference: str) -> Template | None:
        """The template of that id, or else of that name, as the build with the tag made it."""
        try:
            wanted = names.parse(reference)
        except InvalidRequest:
            return None
        rows = self._database.query(
            f"{_TAGGED} WHERE (templates.id = ?1 OR templates.name = ?1) AND tag = ?2"
            " ORDER BY templates.id = ?1 DESC LIMIT 1",
            (wanted.name, wanted.tag_or_default),
        )
        return _made(rows[0]) if rows else None

    def get(self, reference: str) -> Template:
        """The same, or raise NotFound; says whether it is the name or the tag that there is not."""
        found = self.find(reference)
        if found is None:
            named = self.find_named(reference)
            if named is not None:
                has = ", ".join(sorted(named.tags)) or "no build that is ready"
                raise NotFound(f'template "{reference}" not found', remedy=f"{named.name} has {has}")
            raise NotFound(f'template "{reference}" not found', remedy="`aenv template list` shows them")
        return found

    def find_named(self, reference: str) -> Named | None:
        """The name behind a reference, whatever its builds have come to; a tag is passed over."""
        try:
            wanted = names.parse(reference)
        except InvalidRequest:
            return None
        rows = self._database.query(
            "SELECT * FROM templates WHERE id = ?1 OR name = ?1 ORDER BY id = ?1 DESC LIMIT 1",
            (wanted.name,),
        )
        return self._named(rows[0]) if rows else None

    def named(self, reference: str) -> Named:
        """The same, or raise NotFound."""
        found = self.find_named(reference)
        if found is None:
            raise NotFound(f'template "{reference}" not found', remedy="`aenv template list` shows them")
        return found

    def all(self) -> tuple[Named, ...]:
        """Every name with its builds, by name."""
        rows = self._database.query("SELECT * FROM templates ORDER BY name")
        return tuple(self._named(row) for row in rows)

    def serves(self, build_id: str, now: float | None = None) -> bool:
        """Whether sandboxes may be started from a build, or one may just have looked it up."""
        since = (time.time() if now is None else now) - GRACE_S
        rows = self._database.query(
            "SELECT 1 FROM builds WHERE id = ?1 AND (document ->> 'updated_at' > ?2"
            " OR EXISTS (SELECT 1 FROM template_tags WHERE build = ?1))",
            (build_id, since),
        )
        return bool(rows)

    def _named(self, row: sqlite3.Row) -> Named:
        builds = self._database.query(
            "SELECT document FROM builds WHERE template = ? ORDER BY created_at DESC, id", (row["id"],)
        )
        tags = {tag.tag: tag.build_id for tag in self._tags(row["id"])}
        return Named(
            row["id"],
            row["name"],
            bool(row["public"]),
            row["created_at"],
            tuple(decode(build["document"]) for build in builds),
            tags,
        )

    # Changing

    def claim_name(self, cursor: sqlite3.Cursor, name: str, now: float) -> str:
        """The id of the template of a name, which is made where there is none, and is not published.

        Raises:
            Conflict: a snapshot has the name.
        """
        row = cursor.execute("SELECT id FROM templates WHERE name = ?", (name,)).fetchone()
        if row is not None:
            return str(row["id"])
        if cursor.execute(
            "SELECT 1 FROM snapshot_names WHERE substr(name, 1, length(?1) + 1) = ?1 || ':'", (name,)
        ).fetchone():
            raise Conflict(f'"{name}" is the name of a snapshot', remedy="give the template another name")
        template_id = new_id()
        cursor.execute("INSERT INTO templates VALUES (?, ?, 0, ?)", (template_id, name, now))
        return template_id

    def register(self, template: Template) -> Template:
        """Record a template that is ready, in the place of one of the same name if there is one; a new one
        is published, since the node's own commands make it.

        The id and time of creation of the one before are kept, and its files retired: they
        go with `sweep` when no sandbox can be using them. Returns the record as it is now.
        """
        check_name(template.name)
        with self._database.transaction() as cursor:
            row = cursor.execute("SELECT * FROM templates WHERE name = ?", (template.name,)).fetchone()
            if row is not None:
                template = replace(template, id=row["id"], created_at=row["created_at"])
            else:
                cursor.execute(
                    "INSERT INTO templates VALUES (?, ?, 1, ?)",
                    (template.id, template.name, template.created_at),
                )
            build = Build(
                template.build_id,
                template.id,
                BuildState.READY,
                template.updated_at,
                template.updated_at,
                (DEFAULT_TAG,),
                template.vcpus,
                template.memory_mib,
                made=template,
            )
            insert(cursor, build)
            assign(cursor, build, DEFAULT_TAG, template.updated_at)
        self._database.sync()
        return template

    def set_public(self, reference: str, public: bool) -> Named:
        """Say whether other projects may use a template."""
        named = self.named(reference)
        with self._database.transaction() as cursor:
            cursor.execute("UPDATE templates SET public = ? WHERE id = ?", (public, named.id))
        return replace(named, public=public)

    def delete(self, reference: str) -> Named:
        """Remove a template with all its builds and their files.

        Raises:
            NotFound: there is none.
            InvalidRequest: a tag is named, and not the whole.
            Conflict: sandboxes use it.
        """
        named = self.named(reference)
        if ":" in reference:
            raise InvalidRequest(
                f"{reference} is a tag of the template {named.name}",
                remedy="DELETE /templates/tags takes tags away; without a tag all of the template is deleted",
            )
        gone: list[Path] = []
        with self._database.transaction() as cursor:
            users = _live(cursor, named.id, None) + _live(cursor, named.name, None)
            if users:
                raise Conflict(
                    f'template "{named.name}" is used by {users} sandbox{"es" if users > 1 else ""}',
                    remedy="kill them first",
                )
            cursor.execute("DELETE FROM templates WHERE id = ?", (named.id,))
            for build in named.builds:
                if build.made is None or build.made.rootfs is None:
                    continue
                if self._is_needed(cursor, build.made.rootfs, build.id):
                    _retire(cursor, build, time.time())
                elif self._is_own(build.made.rootfs):
                    gone.append(build.made.rootfs)
        for rootfs in gone:
            rootfs.unlink(missing_ok=True)
        self.sweep()
        return named

    # Tags

    def tags(self, reference: str) -> tuple[Tag, ...]:
        """A template's tags, by name."""
        return self._tags(self.named(reference).id)

    def _tags(self, template_id: str) -> tuple[Tag, ...]:
        rows = self._database.query(
            "SELECT tag, build, assigned_at FROM template_tags WHERE template = ? ORDER BY tag",
            (template_id,),
        )
        return tuple(Tag(row["tag"], row["build"], row["assigned_at"]) for row in rows)

    def assign_tags(self, target: str, tags: tuple[str, ...]) -> Template:
        """Have tags point to the build that `target` means.

        Raises:
            NotFound: there is no such build.
        """
        template = self.get(target)
        with self._database.transaction() as cursor:
            row = cursor.execute("SELECT document FROM builds WHERE id = ?", (template.build_id,)).fetchone()
            for tag in tags:
                assign(cursor, decode(row["document"]), tag, time.time())
        return template

    def remove_tags(self, name: str, tags: tuple[str, ...]) -> None:
        """Take tags away from a template; those that it has not are passed over.

        Raises:
            NotFound: there is no such template. Conflict: sandboxes are named by the last tag's build.
        """
        named = self.named(name)
        with self._database.transaction() as cursor:
            for tag in tags:
                _remove(cursor, named.id, tag, time.time())

    # Files

    def sweep(self, now: float | None = None) -> tuple[Path, ...]:
        """Remove the files of replaced templates that no sandbox uses; returns those removed.

        `now` is seconds since the epoch. A node calls this at its start and from time to time.
        """
        now = time.time() if now is None else now
        removed: tuple[Path, ...] = ()
        with self._database.transaction() as cursor:
            rows = cursor.execute(
                "SELECT id, owner, name, detail FROM resources WHERE kind = 'retired-image'"
            )
            for row in rows.fetchall():
                detail = json.loads(row["detail"])
                until = float(detail["retired_at"]) + GRACE_S
                if now < until or _live(cursor, row["owner"], until):
                    continue
                if self._is_needed(cursor, Path(row["name"]), detail.get("build")):
                    continue
                cursor.execute("DELETE FROM resources WHERE id = ?", (row["id"],))
                if self._is_own(Path(row["name"])):
                    Path(row["name"]).unlink(missing_ok=True)
                    removed += (Path(row["name"]),)
        return removed

    def _is_own(self, rootfs: Path) -> bool:
        """Whether the file was made for a template alone. One in the image cache is the cache's to remove."""
        return not rootfs.is_relative_to(self._settings.cache_dir)

    def _is_needed(self, cursor: sqlite3.Cursor, rootfs: Path, build_id: str | None) -> bool:
        """Whether something else than the build itself rests on a file: another build that sandboxes start
        from, or a snapshot. A build's own first one goes with it."""
        cursor.execute(
            "SELECT 1 FROM builds WHERE document ->> '$.made.rootfs' = ?1 AND id IS NOT ?2"
            " AND EXISTS (SELECT 1 FROM template_tags WHERE build = builds.id) LIMIT 1",
            (str(rootfs), build_id),
        )
        if cursor.fetchone() is not None:
            return True
        if not rootfs.is_relative_to(self._settings.home):
            return False
        cursor.execute(
            "SELECT 1 FROM snapshots, json_each(document, '$.disk') AS layer"
            " WHERE deleted_at IS NULL AND NOT (kind = 'template' AND build_id IS ?2)"
            " AND layer.value ->> 'path' = ?1 LIMIT 1",
            (str(rootfs.relative_to(self._settings.home)), build_id),
        )
        return cursor.fetchone() is not None


def insert(cursor: sqlite3.Cursor, build: Build) -> None:
    """Put a build into the table, or put it there anew."""
    cursor.execute(
        "INSERT INTO builds (id, template, state, created_at, document) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET state = excluded.state, document = excluded.document",
        (build.id, build.template_id, build.state, build.created_at, encode(build)),
    )


def assign(cursor: sqlite3.Cursor, build: Build, tag: str, now: float) -> None:
    """Have a tag point to a build; the one that loses its last tag by that is retired."""
    _remove(cursor, build.template_id, tag, now, but=build)
    cursor.execute(
        "INSERT INTO template_tags (template, tag, build, assigned_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (template, tag)"
        " DO UPDATE SET build = excluded.build, assigned_at = excluded.assigned_at",
        (build.template_id, tag, build.id, now),
    )


def tagged(cursor: sqlite3.Cursor, template_id: str, tag: str) -> Build | None:
    """The build that a tag points to."""
    row = cursor.execute(
        "SELECT document FROM builds JOIN template_tags ON build = id"
        " WHERE template_tags.template = ? AND tag = ?",
        (template_id, tag),
    ).fetchone()
    return None if row is None else decode(row["document"])


def _remove(cursor: sqlite3.Cursor, template_id: str, tag: str, now: float, but: Build | None = None) -> None:
    before = tagged(cursor, template_id, tag)
    if before is None or (but is not None and before.id == but.id):
        return
    cursor.execute("DELETE FROM template_tags WHERE template = ? AND tag = ?", (template_id, tag))
    if cursor.execute("SELECT 1 FROM template_tags WHERE build = ?", (before.id,)).fetchone():
        return
    insert(cursor, replace(before, updated_at=now))
    rootfs = before.made and before.made.rootfs
    if rootfs is not None and not (but and but.made and but.made.rootfs == rootfs):
        _retire(cursor, before, now)


def _retire(cursor: sqlite3.Cursor, build: Build, at: float) -> None:
    assert build.made is not None
    cursor.execute(
        "INSERT OR IGNORE INTO resources (owner, kind, name, detail, boot_id)"
        " VALUES (?, 'retired-image', ?, ?, '')",
        (build.template_id, str(build.made.rootfs), json.dumps({"retired_at": at, "build": build.id})),
    )


def _live(cursor: sqlite3.Cursor, template: str, until: float | None) -> int:
    """Sandboxes of a template, by id or name, that have not ended."""
    marks = ", ".join("?" * len(ENDED))
    query = f"SELECT count(*) FROM sandboxes WHERE template = ? AND state NOT IN ({marks})"
    parameters: tuple[object, ...] = (template, *ENDED)
    if until is not None:
        query, parameters = f"{query} AND started_at <= ?", (*parameters, until)
    return int(cursor.execute(query, parameters).fetchone()[0])


def _made(row: sqlite3.Row) -> Template:
    made = decode(row["document"]).made
    assert made is not None, "a tag points to a build that is not ready"
    return made
