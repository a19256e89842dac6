"""COPY, from an uploaded archive to its place: what is packed, and what the guest's program makes of it."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.building.packing import pack, relative, static_part
from agentenv.building.programs import collect, place
from agentenv.errors import InvalidRequest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners are given as root")

PROGRAMS = Path(place.__file__).parent
LIMIT = 64 << 20

Member = tuple[tarfile.TarInfo, bytes]


def file(name: str, content: bytes = b"content", mode: int = 0o644, **facts: object) -> Member:
    return _member(name, tarfile.REGTYPE, mode, content, facts)


def directory(name: str, mode: int = 0o755, **facts: object) -> Member:
    return _member(name, tarfile.DIRTYPE, mode, b"", facts)


def link(name: str, target: str) -> Member:
    return _member(name, tarfile.SYMTYPE, 0o777, b"", {"linkname": target})


def hard(name: str, target: str) -> Member:
    return _member(name, tarfile.LNKTYPE, 0o644, b"", {"linkname": target})


def _member(name: str, kind: bytes, mode: int, content: bytes, facts: dict[str, object]) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.mtime = kind, mode, len(content), 1_000_000_000
    for fact, value in facts.items():
        setattr(info, fact, value)
    return info, content


Copy = Callable[..., Path]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Copies members of an archive to a destination; returns the directory that stands for the machine's."""

    def run(*members: Member, source: str, to: str, owner: str = "7:8", mode: str = "") -> Path:
        archive, stream = tmp_path / "archive.tar.gz", tmp_path / "stream"
        with tarfile.open(archive, "w:gz") as tar:
            for info, content in members:
                tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
        with stream.open("wb") as out:
            size = pack(archive, source, out, limit_bytes=LIMIT)
        assert stream.stat().st_size == size
        root = tmp_path / "root"
        root.mkdir(exist_ok=True)
        placed(stream, to, root, owner, mode)
        assert not stream.exists()
        return root

    return run


def placed(stream: Path, to: str, workdir: Path, owner: str = "7:8", mode: str = "") -> None:
    program([str(PROGRAMS / "place.py"), str(stream), to, str(workdir), owner, mode])


def program(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-I", "-S", *words], capture_output=True, text=True, umask=0o022)
    if done.returncode:
        raise SystemExit(done.stderr.strip())


def facts(path: Path) -> tuple[str, int, int]:
    status = path.lstat()
    return oct(stat.S_IMODE(status.st_mode)), status.st_uid, status.st_gid


# A directory's content


def test_a_directory_s_content_is_merged(copy: Copy, tmp_path: Path) -> None:
    there = tmp_path / "root" / "to"
    there.mkdir(parents=True)
    (there / "sub").mkdir(mode=0o700)
    (there / "sub" / "kept").write_text("kept")
    (there / "elsewhere").mkdir()
    (there / "by-link").symlink_to("elsewhere")
    (there / "replaced").symlink_to("sub/kept")
    root = copy(
        directory("from"),
        directory("from/sub", 0o750),
        file("from/sub/new", b"new", 0o4711),
        directory("from/by-link"),
        file("from/by-link/through"),
        file("from/replaced", b"replaced"),
        directory("from/made", 0o750),
        link("from/link", "sub/new"),
        file("other"),
        source="from",
        to="to",
    )
    assert sorted(os.listdir(root)) == ["to"]
    assert (there / "sub" / "kept").read_text() == "kept"
    assert facts(there / "sub") == ("0o700", 0, 0), "a directory that exists keeps what it is"
    assert facts(there / "sub" / "new") == ("0o4711", 7, 8)
    assert (there / "elsewhere" / "through").exists() and (there / "by-link").is_symlink()
    assert (there / "replaced").read_text() == "replaced" and not (there / "replaced").is_symlink()
    assert facts(there / "made") == ("0o750", 7, 8)
    assert os.readlink(there / "link") == "sub/new" and facts(there / "link")[1:] == (7, 8)
    assert (there / "made").stat().st_mtime == (there / "sub" / "new").stat().st_mtime == 1_000_000_000


@pytest.mark.parametrize("source", ["from", "./from/", "from/*"])
def test_patterns_were_resolved_by_the_client(copy: Copy, source: str) -> None:
    root = copy(file("from/a"), file("from/deep/b"), source=source, to="new/place")
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == [
        "new",
        "new/place",
        "new/place/a",
        "new/place/deep",
        "new/place/deep/b",
    ]
    assert (
        facts(root / "new") == facts(root / "new/place") == facts(root / "new/place/deep") == ("0o755", 7, 8)
    )


def test_all_of_the_context(copy: Copy) -> None:
    root = copy(directory("."), file("./a"), file("b/c"), source=".", to=".")
    assert (root / "a").exists() and (root / "b/c").exists()


def test_a_mode_is_for_files_and_directories_but_not_for_links(copy: Copy) -> None:
    root = copy(directory("d/e"), file("d/e/f"), link("d/l", "/etc/passwd"), source="d", to="x", mode="0700")
    before = Path("/etc/passwd").stat()
    assert facts(root / "x/e") == facts(root / "x/e/f") == ("0o700", 7, 8)
    assert Path("/etc/passwd").stat() == before


def test_owners_of_the_archive(copy: Copy) -> None:
    root = copy(file("d/a", uid=11, gid=12), link("d/l", "a"), source="d", to="x", owner="=")
    assert facts(root / "x/a")[1:] == (11, 12)
    assert facts(root / "x/l")[1:] == (0, 0)


def test_hard_links_stay_links(copy: Copy) -> None:
    root = copy(file("d/a"), hard("d/b", "d/a"), source="d", to="x")
    assert (root / "x/a").stat().st_ino == (root / "x/b").stat().st_ino


# One file


@pytest.mark.parametrize(
    ("to", "there", "expected"),
    [
        ("b", None, "b"),
        ("new/b", None, "new/b"),
        ("new/", None, "new/a"),
        ("dir", "directory", "dir/a"),
        ("dir/.", None, "dir/a"),
        ("b", "file", "b"),
        ("b", "link", "b"),
    ],
)
def test_where_one_file_goes(copy: Copy, tmp_path: Path, to: str, there: str | None, expected: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "target").write_text("untouched")
    if there == "directory":
        (root / to).mkdir()
    elif there == "file":
        (root / to).write_text("before")
    elif there == "link":
        (root / to).symlink_to("target")
    copy(file("a", b"new"), source="a", to=to)
    assert (root / expected).read_text() == "new" and not (root / expected).is_symlink()
    assert (root / "target").read_text() == "untouched"
    assert facts(root / expected) == ("0o644", 7, 8)


def test_one_link(copy: Copy) -> None:
    root = copy(link("l", "nowhere"), source="l", to="m")
    assert os.readlink(root / "m") == "nowhere"


def test_absolute_destinations(copy: Copy, tmp_path: Path) -> None:
    copy(file("a"), source="a", to=str(tmp_path / "absolute"))
    assert (tmp_path / "absolute").exists()


def test_a_file_does_not_replace_a_directory(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "root" / "to" / "a").mkdir(parents=True)
    with pytest.raises(SystemExit, match="over the directory"):
        copy(file("d/a"), source="d", to="to")


@pytest.mark.parametrize(
    ("owner", "words"), [("nobody-like-that", "no user"), ("0:no-such-group", "no group")]
)
def test_owners_that_there_are_not(copy: Copy, owner: str, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        copy(file("a"), source="a", to="b", owner=owner)


# What cannot be packed


def packed(tmp_path: Path, *members: Member, source: str, limit: int = LIMIT) -> None:
    archive = tmp_path / "archive.tar"
    with tarfile.open(archive, "w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
    pack(archive, source, io.BytesIO(), limit_bytes=limit)


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist: b"):
        packed(tmp_path, file("a"), file("bb"), source="b")


@pytest.mark.parametrize("member", [file("../a"), file("a/../../b"), hard("d/x", "../../etc/passwd")])
def test_members_that_lead_outside(tmp_path: Path, member: Member) -> None:
    with pytest.raises(InvalidRequest, match="leads out"):
        packed(tmp_path, member, source=".")


def test_devices(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="neither a file"):
        packed(tmp_path, _member("d", tarfile.CHRTYPE, 0o644, b"", {}), source=".")


def test_more_than_there_is_room_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="more than 1 MiB"):
        packed(tmp_path, file("a", bytes(2 << 20)), source=".", limit=1 << 20)


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"\x1f\x8b\x08 broken gzip"])
def test_what_is_no_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(InvalidRequest):
        pack(tmp_path / "archive", ".", io.BytesIO(), limit_bytes=LIMIT)


def test_an_archive_that_is_cut_off(tmp_path: Path) -> None:
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(file("a", os.urandom(100_000))[0], io.BytesIO(os.urandom(100_000)))
    archive.write_bytes(archive.read_bytes()[:50_000])
    with pytest.raises(InvalidRequest, match=r"archive|cut off"):
        pack(archive, ".", io.BytesIO(), limit_bytes=LIMIT)


def test_a_stream_that_is_cut_off_is_told(tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    stream.write_bytes(b"\nF 420 0 0 0 1 0 5\nabc")
    with pytest.raises(SystemExit, match="incomplete"):
        placed(stream, "x", tmp_path)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a/b", "a/b"),
        ("a/*", "a"),
        ("*.txt", ""),
        (".", ""),
        ("./a//b/", "a/b"),
        ("a/{b,c}/d", "a"),
        ("a?/b", ""),
    ],
)
def test_the_static_part_of_a_source(source: str, expected: str) -> None:
    assert static_part(source) == expected


# As `_normal` leaves them.
NAMES = st.lists(st.sampled_from(["a", "b", "ab", "a.", ".b"]), max_size=3).map("/".join)


@given(NAMES, NAMES)
def test_relative_names_are_below(name: str, base: str) -> None:
    found = relative(name, base)
    if found is not None:
        assert (f"{base}/{found}" if base and found else base or found) == name


# From another file system


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "other"
    (root / "app/dist/deep").mkdir(parents=True)
    (root / "app/dist/a.js").write_text("a")
    (root / "app/dist/deep/b.js").write_text("b")
    (root / "app/dist/deep/b.js").chmod(0o755)
    os.link(root / "app/dist/a.js", root / "app/dist/same.js")
    (root / "app/dist/link").symlink_to("a.js")
    (root / "app/dist/fifo").touch()
    (root / "app/dist/fifo").unlink()
    os.mkfifo(root / "app/dist/fifo")
    (root / "app/latest").symlink_to("dist")
    os.chown(root / "app/dist/a.js", 11, 12)
    return root


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("app/dist", ["a.js", "deep", "deep/b.js", "link", "same.js"]),
        ("app/latest", ["a.js", "deep", "deep/b.js", "link", "same.js"]),
        ("app/*/a.js", ["a.js"]),
        ("app/dist/[ab]*.js", ["a.js"]),
        ("app/dist/*.js", ["a.js", "same.js"]),
        ("app/d*", ["a.js", "deep", "deep/b.js", "link", "same.js"]),
    ],
)
def test_collected_from_another_file_system(
    tree: Path, tmp_path: Path, source: str, expected: list[str]
) -> None:
    stream, root = tmp_path / "stream", tmp_path / "root"
    root.mkdir()
    program([str(PROGRAMS / "collect.py"), f"{tree}/{source}", str(stream)])
    placed(stream, "to/", root, "=")
    assert sorted(str(path.relative_to(root / "to")) for path in (root / "to").rglob("*")) == expected
    assert facts(root / "to/a.js")[1:] == (11, 12)
    if "same.js" in expected:
        assert (root / "to/a.js").stat().st_ino == (root / "to/same.js").stat().st_ino


def test_what_is_not_there_is_not_collected(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not exist"):
        program([str(PROGRAMS / "collect.py"), f"{tree}/app/*.css", str(tmp_path / "stream")])


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("abc", "a*", True),
        ("abc", "*c", True),
        ("abc", "a?c", True),
        ("abc", "ab", False),
        ("abc", "[a-b]bc", True),
        ("abc", "[^a]bc", False),
        ("abc", "[^x-z]*", True),
        ("a*c", "a\\*c", True),
        ("abc", "a\\*c", False),
        ("", "*", True),
        ("a]", "a[]]", True),
    ],
)
def test_patterns(name: str, pattern: str, expected: bool) -> None:
    assert collect.matches(name, pattern) is expected
