"""The API keys of a node, in its database and by digest in memory."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Callable
from dataclasses import replace

from agentenv.errors import Conflict, Forbidden, InvalidRequest, NotFound
from agentenv.identity.records import (
    DEFAULT,
    KEYS,
    UNLIMITED,
    Key,
    Quota,
    Rate,
    Scope,
    check_key_name,
    check_project,
    digest_of,
    new_secret,
    shown_of,
)
from agentenv.records.database import Database

# The key in the data directory's file or in the settings: whoever has it has the node.
FIRST = "first"

_LETTERS = string.ascii_lowercase + string.digits
_NAMESPACED = (
    "SELECT name FROM templates WHERE substr(name, 1, length(?1)) = ?1"
    " UNION SELECT name FROM snapshot_names WHERE substr(name, 1, length(?1)) = ?1 LIMIT 1"
)

Revoked = Callable[[str], object]
"""Told the id of a key that holds no longer, or no longer with the secret of before."""


class Keys:
    """All keys; `first` is the secret of the first one, which is not in the database."""

    def __init__(self, database: Database, first: str) -> None:
        self._database = database
        self._first = Key(FIRST, "node", DEFAULT, ("admin", "use"), digest_of(first), shown_of(first), 0.0)
        self._by_digest: dict[str, Key] = {self._first.digest: self._first}
        self._projects = {DEFAULT}
        self._listeners: list[Revoked] = []
        for row in database.query("SELECT document FROM api_keys"):
            self._remember(KEYS.decode(row["document"]))

    def _remember(self, key: Key) -> None:
        self._projects.add(key.project)
        if key.revoked_at is None:
            self._by_digest[key.digest] = key

    @property
    def projects(self) -> frozenset[str]:
        """All that there ever was a key of."""
        return frozenset(self._projects)

    def find(self, secret: bytes) -> Key | None:
        """The key that a client sent, if it holds. A look-up by digest says nothing by its time."""
        return self._by_digest.get(digest_of(secret))

    def list(self) -> list[Key]:
        """All keys that hold, the first one at first, others by their age."""
        return sorted(self._by_digest.values(), key=lambda key: key.created_at)

    def get(self, key_id: str) -> Key:
        """The key of that id, or of that name where only one has it.

        Raises:
            NotFound: none that holds. Conflict: several have the name.
        """
        found = [key for key in self._by_digest.values() if key_id == key.id]
        found = found or [key for key in self._by_digest.values() if key_id == key.name]
        if not found:
            raise NotFound(f'there is no API key "{key_id}"', remedy="`aenv key list` shows them")
        if len(found) > 1:
            raise Conflict(f'{len(found)} API keys are named "{key_id}"', remedy="give the id of one")
        return found[0]

    def create(
        self,
        name: str,
        project: str = DEFAULT,
        scopes: tuple[Scope, ...] = ("use",),
        quota: Quota = UNLIMITED,
        rate: Rate | None = None,
    ) -> tuple[Key, str]:
        """A new key, and its secret, which nobody can ask for again.

        Raises:
            InvalidRequest: a value cannot be. Conflict: the project's name is a namespace of another's.
        """
        check_key_name(name)
        self._begin_project(check_project(project))
        if not scopes:
            raise InvalidRequest("scopes: a key needs at least one of admin and use")
        secret = new_secret()
        key_id = "k" + "".join(secrets.choice(_LETTERS) for _ in range(11))
        key = Key(
            key_id, name, project, scopes, digest_of(secret), shown_of(secret), time.time(), quota, rate
        )
        self._put(key)
        return key, secret

    def _begin_project(self, project: str) -> None:
        if project in self._projects:
            return
        taken = self._database.query(_NAMESPACED, (f"{project}/",))
        if taken:
            raise Conflict(
                f'the project "{DEFAULT}" has "{taken[0]["name"]}", whose namespace is "{project}"',
                remedy="choose another name for the project, or delete that",
            )

    def rename(self, key_id: str, name: str) -> Key:
        """Give a key another name."""
        key = replace(self._changeable(key_id), name=check_key_name(name))
        self._put(key)
        return key

    def rotate(self, key_id: str) -> tuple[Key, str]:
        """Give a key another secret; the one before does not hold any more, and what it was used for ends.

        Raises:
            NotFound: there is none. Forbidden: it is the node's first.
        """
        before, secret = self._changeable(key_id), new_secret()
        key = replace(before, digest=digest_of(secret), shown=shown_of(secret))
        self._put(key)
        del self._by_digest[before.digest]
        self._tell(key.id)
        return key, secret

    def revoke(self, key_id: str) -> Key:
        """Let a key hold no longer, from now on. What was made with it stays the project's.

        Raises:
            NotFound: there is none. Forbidden: it is the node's first.
        """
        key = replace(self._changeable(key_id), revoked_at=time.time())
        self._put(key)
        del self._by_digest[key.digest]
        self._tell(key.id)
        return key

    def quota_of(self, key_id: str | None) -> Quota:
        """The quota of a key that holds; none else."""
        return next((key.quota for key in self._by_digest.values() if key.id == key_id), UNLIMITED)

    def on_revoked(self, listener: Revoked) -> None:
        """Have `listener` told of each key that is revoked or rotated."""
        self._listeners.append(listener)

    def _changeable(self, key_id: str) -> Key:
        key = self.get(key_id)
        if key.id == FIRST:
            raise Forbidden(
                "the node's first API key is changed where the node runs",
                remedy="remove its file (secrets/api-key in the data directory), or set another"
                " AENV_API_KEY, and restart the node",
            )
        return key

    def _put(self, key: Key) -> None:
        with self._database.transaction() as cursor:
            cursor.execute("INSERT OR REPLACE INTO api_keys VALUES (?, ?)", (key.id, KEYS.encode(key)))
        self._database.sync()
        self._remember(key)

    def _tell(self, key_id: str) -> None:
        for listener in self._listeners:
            listener(key_id)
