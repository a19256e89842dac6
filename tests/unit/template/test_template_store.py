"""Records of templates, and which files may go when."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.config import Settings
from agentenv.errors import Conflict, InvalidRequest, NotFound, StoreCorrupt
from agentenv.records.database import Database
from agentenv.template.records import Build, Reason, Template, decode, encode
from agentenv.template.states import BuildState
from agentenv.template.store import GRACE_S, Templates, check_name, new_id
from support.sandbox_parts import rootfs_of


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "aenv.db")


@pytest.fixture
def templates(database: Database, tmp_path: Path) -> Templates:
    return Templates(database, Settings(home=tmp_path))


def template(tmp_path: Path, name: str = "base", **fields: object) -> Template:
    build_id = str(uuid.uuid4())
    rootfs = tmp_path / f"{name}-{build_id}.ext4"
    rootfs.write_bytes(b"disk")
    made = Template(
        id=new_id(),
        name=name,
        build_id=build_id,
        rootfs=rootfs,
        disk_mib=2048,
        memory_mib=512,
        vcpus=1,
        source="debootstrap:bookworm",
        recipe="r",
        digest="sha256:0",
        size_bytes=4,
        default_user="user",
        default_workdir="/home/user",
        created_at=1000.0,
        updated_at=1000.0,
        env={"A": "b"},
        cmd=("run", "it"),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def add_sandbox(database: Database, template_id: str, state: str, started_at: float = 1000.0) -> None:
    with database.transaction() as cursor:
        cursor.execute(
            "INSERT INTO sandboxes (id, state, template, started_at, document) VALUES (?, ?, ?, ?, '{}')",
            (uuid.uuid4().hex, state, template_id, started_at),
        )


def test_found_by_name_and_by_id(templates: Templates, tmp_path: Path) -> None:
    made = templates.register(template(tmp_path))
    assert templates.find("base") == templates.find(made.id) == templates.get("base") == made
    assert templates.find("other") is None
    with pytest.raises(NotFound, match="aenv template list"):
        templates.get("other")


def test_an_id_wins_over_a_name(templates: Templates, tmp_path: Path) -> None:
    first = templates.register(template(tmp_path, "first"))
    templates.register(template(tmp_path, first.id))
    assert templates.get(first.id).name == "first"


def test_listed_by_name(templates: Templates, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        templates.register(template(tmp_path, name))
    assert [one.name for one in templates.list()] == ["a", "b", "c"]


def test_ids_are_lowercase_letters_and_digits() -> None:
    identity = new_id()
    assert len(identity) == 20
    assert identity.isalnum()
    assert identity == identity.lower()
    assert identity != new_id()


@pytest.mark.parametrize("name", ["base", "a", "0", "my-env_2", "x" * 128, "space/name"])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "A", "-a", "_a", "a/b/c", "/a", "a:b", "a b", "ü", "a\n", "x" * 129, ".."]
)
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_name(name)


def test_a_name_cannot_be_got_past_registering(templates: Templates, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        templates.register(replace(template(tmp_path), name="../up"))
    assert templates.list() == []


TEXT = st.text(max_size=8)


@given(st.dictionaries(TEXT, TEXT, max_size=3), st.lists(TEXT, max_size=3))
def test_documents_round_trip(env: dict[str, str], cmd: list[str]) -> None:
    numbers = {
        "disk_mib": 1,
        "memory_mib": 2,
        "vcpus": 3,
        "size_bytes": 4,
        "created_at": 5.5,
        "updated_at": 6.0,
    }
    words = dict.fromkeys(
        ("id", "name", "build_id", "source", "recipe", "digest", "default_user", "default_workdir"), "w"
    )
    made = Template(rootfs=Path("/r"), env=env, cmd=tuple(cmd), **words, **numbers)  # type: ignore[arg-type]
    build = Build("b", "t", BuildState.READY, 1.0, 2.5, ("default",), reason=Reason("w", "1"), made=made)
    assert decode(encode(build)) == build


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"id": "b", "state": "odd"}'])
def test_damaged_records(text: str) -> None:
    with pytest.raises(StoreCorrupt):
        decode(text)


def test_a_new_build_keeps_id_and_birth(templates: Templates, tmp_path: Path) -> None:
    old = templates.register(template(tmp_path))
    new = templates.register(template(tmp_path, created_at=2000.0, updated_at=2000.0))
    assert (new.id, new.created_at) == (old.id, old.created_at)
    assert new.build_id != old.build_id
    assert templates.list() == [new]


def test_files_of_the_build_before_go_when_nobody_can_use_them(
    templates: Templates, database: Database, tmp_path: Path
) -> None:
    old = templates.register(template(tmp_path))
    new = templates.register(template(tmp_path, updated_at=2000.0))
    assert templates.sweep(2000.0 + GRACE_S / 2) == ()
    assert rootfs_of(old).exists(), "a sandbox being created may have just looked it up"
    assert templates.sweep(2001.0 + GRACE_S) == (old.rootfs,)
    assert not rootfs_of(old).exists()
    assert rootfs_of(new).exists()
    assert templates.sweep(9e9) == ()


@pytest.mark.parametrize("state", ["creating", "running", "paused", "killing"])
def test_files_of_the_build_before_stay_while_a_sandbox_of_it_lives(
    templates: Templates, database: Database, tmp_path: Path, state: str
) -> None:
    old = templates.register(template(tmp_path))
    add_sandbox(database, old.id, state, 1500.0)
    templates.register(template(tmp_path, updated_at=2000.0))
    assert templates.sweep(9e9) == ()
    with database.transaction() as cursor:
        cursor.execute("UPDATE sandboxes SET state = 'killed'")
    add_sandbox(database, old.id, "running", 5000.0)  # of the new build
    assert templates.sweep(9e9) == (old.rootfs,)


def test_deleted_with_its_files(templates: Templates, database: Database, tmp_path: Path) -> None:
    made = templates.register(template(tmp_path))
    add_sandbox(database, made.id, "killed")
    add_sandbox(database, made.id, "failed")
    assert templates.delete("base").id == made.id
    assert not rootfs_of(made).exists()
    assert templates.list() == []
    with pytest.raises(NotFound):
        templates.delete("base")


@pytest.mark.parametrize("state", ["creating", "running", "pausing", "paused", "forking"])
def test_not_deleted_while_used(templates: Templates, database: Database, tmp_path: Path, state: str) -> None:
    made = templates.register(template(tmp_path))
    add_sandbox(database, made.id, state)
    with pytest.raises(Conflict, match="1 sandbox"):
        templates.delete("base")
    assert rootfs_of(made).exists()
    assert templates.find("base") == made


def test_deleting_what_has_lost_its_file(templates: Templates, tmp_path: Path) -> None:
    made = templates.register(template(tmp_path))
    rootfs_of(made).unlink()
    templates.delete(made.id)
    assert templates.list() == []
