"""API keys: made, found, rotated, revoked, and nowhere in the clear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import Conflict, Forbidden, InvalidRequest, NotFound
from agentenv.identity.keys import FIRST, Keys
from agentenv.identity.records import Quota, Rate
from agentenv.records.database import Database

SECRET = "e2b_first"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "aenv.db")
    yield made
    made.close()


@pytest.fixture
def keys(database: Database) -> Keys:
    return Keys(database, SECRET)


def test_the_first_key_is_an_admin_of_the_default_project(keys: Keys) -> None:
    found = keys.find(SECRET.encode())
    assert found is not None
    assert (found.id, found.project, found.is_admin) == (FIRST, "default", True)
    assert keys.find(b"e2b_other") is None
    assert keys.find(b"") is None


def test_a_key_is_found_by_its_secret_also_in_the_next_life(keys: Keys, database: Database) -> None:
    key, secret = keys.create("alice", "blue", ("use",), Quota(sandboxes=3), Rate(5.0, 10))
    assert keys.find(secret.encode()) == key
    again = Keys(database, SECRET)
    assert again.find(secret.encode()) == key
    assert again.projects == {"default", "blue"}
    assert again.quota_of(key.id) == Quota(sandboxes=3)
    assert again.quota_of("unknown") == again.quota_of(None) == Quota()


def test_no_secret_is_on_the_disk(keys: Keys, database: Database) -> None:
    _, secret = keys.create("alice")
    database.sync()
    files = [path.read_bytes() for path in database.path.parent.iterdir()]
    assert files
    assert not any(secret.removeprefix("e2b_").encode() in content for content in files)
    assert not any(secret.encode() in content for content in files)


def test_a_rotated_key_holds_with_its_new_secret_alone(keys: Keys, database: Database) -> None:
    told: list[str] = []
    keys.on_revoked(told.append)
    key, before = keys.create("alice", "blue")
    same, after = keys.rotate("alice")
    assert (same.id, same.project) == (key.id, "blue")
    for each in (keys, Keys(database, SECRET)):
        assert each.find(before.encode()) is None
        assert each.find(after.encode()) == same
    assert told == [key.id]


def test_a_revoked_key_holds_no_longer_and_its_project_stays(keys: Keys, database: Database) -> None:
    told: list[str] = []
    keys.on_revoked(told.append)
    key, secret = keys.create("alice", "blue")
    keys.revoke(key.id)
    for each in (keys, Keys(database, SECRET)):
        assert each.find(secret.encode()) is None
        assert each.projects == {"default", "blue"}
        assert [known.id for known in each.list()] == [FIRST]
    assert told == [key.id]
    with pytest.raises(NotFound):
        keys.revoke(key.id)


def test_names_that_several_have_name_none(keys: Keys) -> None:
    one, _ = keys.create("same")
    keys.create("same")
    with pytest.raises(Conflict, match="2 API keys"):
        keys.revoke("same")
    assert keys.revoke(one.id).id == one.id
    assert keys.rename("same", "other").name == "other"


def test_the_first_key_is_changed_elsewhere(keys: Keys) -> None:
    for change in (keys.rotate, keys.revoke):
        with pytest.raises(Forbidden, match="where the node runs"):
            change(FIRST)


@pytest.mark.parametrize("project", ["", "Blue", "a/b", "-a", "a" * 64, "blue\n"])
def test_what_cannot_be_a_project(keys: Keys, project: str) -> None:
    with pytest.raises(InvalidRequest, match="project"):
        keys.create("alice", project)


@pytest.mark.parametrize("name", ["", "a\nb", "a" * 101])
def test_what_cannot_be_a_name(keys: Keys, name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        keys.create(name)


def test_a_project_does_not_take_a_namespace_over(keys: Keys, database: Database) -> None:
    with database.transaction() as cursor:
        cursor.execute("INSERT INTO templates VALUES ('t1', 'blue/app', 0, 0)")
    with pytest.raises(Conflict, match="blue/app"):
        keys.create("alice", "blue")
    assert keys.create("alice", "blu")[0].project == "blu"
