"""The templates of a node: records in the database, root filesystems in the images directory."""

from __future__ import annotations

import json
import re
import secrets
import sqlite3
import string
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agentenv.config import Settings
from agentenv.errors import Conflict, InvalidRequest, NotFound, StoreCorrupt
from agentenv.records.database import Database

ID_LENGTH = 20
_ALPHABET = string.ascii_lowercase + string.digits
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}")

# Sandboxes in these states use no template any more.
ENDED = ("killed", "failed")

# A sandbox that is being created may have looked a template up and not be recorded yet.
GRACE_S = 60.0


@dataclass(frozen=True)
class Template:
    """What sandboxes are started from.

    `recipe` names what the filesystem was made from, so that the same request is known again;
    `digest` names its content. Times are seconds since the epoch.
    """

    id: str
    name: str
    build_id: str
    rootfs: Path
    disk_mib: int
    memory_mib: int
    vcpus: int
    source: str
    recipe: str
    digest: str
    size_bytes: int
    default_user: str
    default_workdir: str
    created_at: float
    updated_at: float
    env: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()

    def document(self) -> str:
        """The record as JSON."""
        return json.dumps({**asdict(self), "rootfs": str(self.rootfs)})

    @classmethod
    def from_document(cls, text: str) -> Template:
        """The inverse of `document`."""
        try:
            values: dict[str, Any] = json.loads(text)
            values["rootfs"] = Path(values["rootfs"])
            values["entrypoint"], values["cmd"] = tuple(values["entrypoint"]), tuple(values["cmd"])
            return cls(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreCorrupt(
                f"a template's record cannot be read: {error!r}", remedy="delete it and create it again"
            ) from error


def check_name(name: str) -> str:
    """The name, if it can be one.

    Raises:
        InvalidRequest: other characters than lowercase letters, digits, `-` and `_`, or too long.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be a template's name",
            remedy="up to 128 lowercase letters, digits, - and _, a letter or digit first",
        )
    return name


def new_id() -> str:
    """A template id: 20 lowercase letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))


class Templates:
    """The templates table, and the files that its rows name."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    def list(self) -> list[Template]:
        """All templates by name."""
        rows = self._database.query("SELECT document FROM templates ORDER BY name")
        return [Template.from_document(row["document"]) for row in rows]

    def find(self, name_or_id: str) -> Template | None:
        """The template of that id, or else of that name."""
        rows = self._database.query(
            "SELECT document FROM templates WHERE id = ?1 OR name = ?1 ORDER BY id = ?1 DESC LIMIT 1",
            (name_or_id,),
        )
        return Template.from_document(rows[0]["document"]) if rows else None

    def get(self, name_or_id: str) -> Template:
        """The same, or raise NotFound."""
        found = self.find(name_or_id)
        if found is None:
            raise NotFound(f'template "{name_or_id}" not found', remedy="`aenv template list` shows them")
        return found

    def register(self, template: Template) -> Template:
        """Record a template, in the place of one of the same name if there is one.

        The id and time of creation of the one before are kept, and its files retired: they
        go with `sweep` when no sandbox can be using them. Returns the record as it is now.
        """
        check_name(template.name)
        with self._database.transaction() as cursor:
            row = cursor.execute("SELECT document FROM templates WHERE name = ?", (template.name,)).fetchone()
            if row is not None:
                before = Template.from_document(row["document"])
                template = replace(template, id=before.id, created_at=before.created_at)
                if before.rootfs != template.rootfs:
                    _retire(cursor, before, template.updated_at)
            cursor.execute(
                "INSERT INTO templates (id, name, build_id, document, created_at) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET build_id = excluded.build_id, document = excluded.document",
                (
                    template.id,
                    template.name,
                    template.build_id,
                    template.document(),
                    template.created_at,
                ),
            )
        self._database.sync()
        return template

    def delete(self, name_or_id: str) -> Template:
        """Remove a template and its files.

        Raises:
            NotFound: there is none.
            Conflict: sandboxes use it.
        """
        template = self.get(name_or_id)
        with self._database.transaction() as cursor:
            users = _live(cursor, template, None)
            if users:
                raise Conflict(
                    f'template "{template.name}" is used by {users} sandbox{"es" if users > 1 else ""}',
                    remedy="kill them first",
                )
            cursor.execute("DELETE FROM templates WHERE id = ?", (template.id,))
            needed = self._is_needed(cursor, template.rootfs)
            if needed:
                _retire(cursor, template, time.time())
        if not needed and self._is_own(template.rootfs):
            template.rootfs.unlink(missing_ok=True)
        self.sweep()
        return template

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
                retired_at = float(json.loads(row["detail"])["retired_at"])
                if now < retired_at + GRACE_S or _live_id(cursor, row["owner"], retired_at + GRACE_S):
                    continue
                if self._is_needed(cursor, Path(row["name"])):
                    continue
                cursor.execute("DELETE FROM resources WHERE id = ?", (row["id"],))
                if self._is_own(Path(row["name"])):
                    Path(row["name"]).unlink(missing_ok=True)
                    removed += (Path(row["name"]),)
        return removed

    def _is_own(self, rootfs: Path) -> bool:
        """Whether the file was made for a template alone. One in the image cache is the cache's to remove."""
        return not rootfs.is_relative_to(self._settings.cache_dir)

    def _is_needed(self, cursor: sqlite3.Cursor, rootfs: Path) -> bool:
        """Whether a snapshot that somebody took rests on the file. A template's first one goes with it."""
        if not rootfs.is_relative_to(self._settings.home):
            return False
        cursor.execute(
            "SELECT 1 FROM snapshots, json_each(document, '$.disk') AS layer"
            " WHERE deleted_at IS NULL AND kind != 'template' AND layer.value ->> 'path' = ? LIMIT 1",
            (str(rootfs.relative_to(self._settings.home)),),
        )
        return cursor.fetchone() is not None


def _retire(cursor: sqlite3.Cursor, template: Template, at: float) -> None:
    cursor.execute(
        "INSERT OR IGNORE INTO resources (owner, kind, name, detail, boot_id)"
        " VALUES (?, 'retired-image', ?, ?, '')",
        (template.id, str(template.rootfs), json.dumps({"retired_at": at})),
    )


def _live(cursor: sqlite3.Cursor, template: Template, until: float | None) -> int:
    """Sandboxes of a template that have not ended, be it recorded by id or by name."""
    return _live_id(cursor, template.id, until) + _live_id(cursor, template.name, until)


def _live_id(cursor: sqlite3.Cursor, template: str, until: float | None) -> int:
    marks = ", ".join("?" * len(ENDED))
    query = f"SELECT count(*) FROM sandboxes WHERE template = ? AND state NOT IN ({marks})"
    parameters: tuple[object, ...] = (template, *ENDED)
    if until is not None:
        query, parameters = f"{query} AND started_at <= ?", (*parameters, until)
    return int(cursor.execute(query, parameters).fetchone()[0])
