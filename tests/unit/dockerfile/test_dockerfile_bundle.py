"""Packing: the same content gives the same bytes, and what is packed is what was there."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.dockerfile.bundle import Archive, Bundle, Entry, inside
from agentenv.dockerfile.context import Context
from agentenv.errors import Conflict, StoreFault


def bundle_of(root: Path) -> Bundle:
    context = Context(root)
    return Bundle(tuple(context.tree(context.find(".")[0], "files")))


def packed(bundle: Bundle) -> bytes:
    out = io.BytesIO()
    bundle.pack(out, bundle.digest())
    return out.getvalue()


def make(root: Path, content: dict[str, bytes]) -> Path:
    root.mkdir()
    for name, data in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def test_time_and_owner_do_not_count(tmp_path: Path) -> None:
    content = {"a": b"1", "d/b": b"2", "d/e/c": b"3"}
    one = make(tmp_path / "one", content)
    other = make(tmp_path / "other", dict(reversed(content.items())))
    os.utime(other / "a", (1, 1))
    os.chown(other / "d", 1234, 1234)
    assert packed(bundle_of(one)) == packed(bundle_of(other))
    assert len(bundle_of(one).digest()) == 64


@pytest.mark.parametrize("change", ["content", "mode", "name", "link"])
def test_everything_else_does(tmp_path: Path, change: str) -> None:
    root = make(tmp_path / "r", {"a": b"1", "b": b"2"})
    (root / "l").symlink_to("a")
    before = bundle_of(root).digest()
    if change == "content":
        (root / "a").write_bytes(b"9")
    elif change == "mode":
        (root / "a").chmod(0o755)
    elif change == "name":
        (root / "a").rename(root / "c")
    else:
        (root / "l").unlink()
        (root / "l").symlink_to("b")
    assert bundle_of(root).digest() != before


def test_what_is_packed(tmp_path: Path) -> None:
    root = make(tmp_path / "r", {"plain": b"text", "d/run": b"#!"})
    (root / "d/run").chmod(0o4755)
    (root / "d/l").symlink_to("../plain")
    bundle = bundle_of(root)
    bundle = Bundle((*bundle.parts, Entry("files/made", "file", 0o644, content=b"made", size=4)))
    with tarfile.open(fileobj=io.BytesIO(packed(bundle)), mode="r:gz") as tar:
        members = {member.name: member for member in tar}
        run = tar.extractfile("files/d/run")
        assert run is not None
        assert run.read() == b"#!"
    assert list(members) == ["files/d", "files/d/l", "files/d/run", "files/plain", "files/made"]
    assert members["files/d/run"].mode == 0o4755
    assert members["files/d/l"].linkname == "../plain"
    assert {(each.uid, each.gid, each.uname, each.mtime) for each in members.values()} == {
        (0, 0, "", 1_000_000_000)
    }
    assert bundle.size == 4 + 2 + 4


NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=60
).filter(lambda name: name not in (".", "..") and len(name.encode()) <= 255)


@given(st.lists(st.tuples(NAMES, st.binary(max_size=3000)), max_size=4, unique_by=lambda item: item[0]))
def test_any_name_and_content_comes_through(files: list[tuple[str, bytes]]) -> None:
    bundle = Bundle(tuple(Entry(name, "file", 0o644, content=data, size=len(data)) for name, data in files))
    with tarfile.open(fileobj=io.BytesIO(packed(bundle)), mode="r:gz") as tar:
        found = [(member.name, tar.extractfile(member)) for member in tar]
        assert [(name, file.read() if file else None) for name, file in found] == files


def test_names_that_are_not_text(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/r"
    os.mkdir(name)
    with open(name + b"/\xff\xfe", "wb") as file:
        file.write(b"x")
    with tarfile.open(fileobj=io.BytesIO(packed(bundle_of(tmp_path / "r"))), mode="r:gz") as tar:
        assert os.fsencode(tar.getnames()[0]) == b"files/\xff\xfe"


def test_a_file_that_changes_in_between(tmp_path: Path) -> None:
    root = make(tmp_path / "r", {"a": b"1"})
    bundle = bundle_of(root)
    digest = bundle.digest()
    (root / "a").write_bytes(b"2")
    with pytest.raises(Conflict, match="changed while it was read"):
        bundle.pack(io.BytesIO(), digest)
    (root / "a").unlink()
    with pytest.raises(StoreFault, match="cannot be packed"):
        bundle.digest()


@pytest.mark.parametrize("kind", ["w", "w:gz", "w:bz2", "w:xz"])
def test_archives_are_laid_out_with_their_owners(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, kind) as tar:  # type: ignore[call-overload]
        for name, type_, link in [
            ("d", tarfile.DIRTYPE, ""),
            ("d/f", tarfile.REGTYPE, ""),
            ("../climbs", tarfile.REGTYPE, ""),
            ("/absolute", tarfile.REGTYPE, ""),
            ("hard", tarfile.LNKTYPE, "d/f"),
            ("soft", tarfile.SYMTYPE, "/d/f"),
            ("pipe", tarfile.FIFOTYPE, ""),
        ]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.uid, member.gid, member.mode = type_, link, 7, 8, 0o640
            member.uname = "somebody"
            member.size = 2 if type_ == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"ok"))
    bundle = Bundle((Entry("files", "directory", 0o755), Archive(path, "files")))
    with tarfile.open(fileobj=io.BytesIO(packed(bundle)), mode="r:gz") as tar:
        members = {member.name: member for member in tar}
        file = tar.extractfile("files/climbs")
        assert file is not None
        assert file.read() == b"ok"
    assert set(members) == {
        "files",
        *(f"files/{name}" for name in ("d", "d/f", "climbs", "absolute", "hard", "soft", "pipe")),
    }
    assert members["files/hard"].linkname == "files/d/f"
    assert members["files/soft"].linkname == "/d/f"
    assert (members["files/d/f"].uid, members["files/d/f"].gid, members["files/d/f"].uname) == (7, 8, "")


def test_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("x")
        member.size = 100_000
        tar.addfile(member, io.BytesIO(os.urandom(100_000)))
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(StoreFault, match=r"damaged|cannot be read"):
        Bundle((Archive(path, "files"),)).digest()


@given(st.text("a./", max_size=20))
def test_no_member_leaves_its_directory(name: str) -> None:
    path = inside("files", name)
    assert path == "files" or path.startswith("files/")
    assert ".." not in path.split("/")
