"""Files there and back, with the agent as a process on this host: what is kept, resumed and refused."""

from __future__ import annotations

import io
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentenv.cli.attached.parcel import LARGE, Packer, Refused, Unpacker
from agentenv.cli.attached.parcel import __file__ as PROGRAM
from agentenv.cli.attached.processes import running
from agentenv.cli.attached.transfers import End, Transfer
from agentenv.cli.attached.wire import Agent
from agentenv.errors import GuestFault, HostFault, InvalidRequest, NotFound
from support.core_agent import core_agent

INTERPRETER = (sys.executable, "-I", "-S", "-X", "utf8", "-c")


@pytest.fixture(scope="module")
def end() -> Iterator[End]:
    with core_agent() as url:
        yield End(Agent(url, "here", direct=True))


class Counted:
    """A meter that keeps the figures."""

    def __init__(self) -> None:
        self.expected = (0, 0)
        self.done = 0

    def total(self, files: int, size: int) -> None:
        self.expected = (files, size)

    def add(self, size: int) -> None:
        self.done += size


@pytest.fixture
def meter() -> Counted:
    return Counted()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def transfer(meter: Counted, said: list[str]) -> Transfer:
    return Transfer("test-copy", meter, said.append, INTERPRETER)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with a bit of everything that is kept."""
    top = tmp_path / "tree"
    (top / "sub/deep").mkdir(parents=True)
    (top / "empty").mkdir(mode=0o555)
    (top / "file").write_text("content")
    (top / "file").chmod(0o640)
    os.utime(top / "file", ns=(10**18 + 1, 10**18 + 123_456_789))
    os.link(top / "file", top / "sub/hard")
    (top / "sub/run").write_text("#!/bin/sh\n")
    (top / "sub/run").chmod(0o4755)
    (top / "link").symlink_to("sub/run")
    (top / "dead").symlink_to("/nowhere/at/all")
    (top / "sub/deep/large").write_bytes(os.urandom(LARGE + 12345))
    (top / "sub/deep/nothing").touch()
    (top / os.fsdecode(b"odd \xff\n name")).write_text("x")
    os.utime(top / "sub/deep", ns=(5 * 10**9, 5 * 10**9))
    return top


def facts(top: Path) -> dict[str, object]:
    """All that is to be the same."""
    seen: dict[str, object] = {}
    for directory, directories, files in os.walk(top):
        for name in (*directories, *files):
            path = Path(directory, name)
            found = path.lstat()
            what: object = None
            if stat.S_ISLNK(found.st_mode):
                what = os.readlink(path)
            elif stat.S_ISREG(found.st_mode):
                what = (path.read_bytes(), found.st_nlink)
            seen[str(path.relative_to(top))] = (found.st_mode, found.st_mtime_ns, what)
    return seen


def test_a_tree_there_and_back(
    end: End, transfer: Transfer, meter: Counted, said: list[str], tree: Path, tmp_path: Path
) -> None:
    transfer.upload(end, [str(tree)], str(tmp_path / "there"))
    assert facts(tmp_path / "there") == facts(tree)
    count = sum(1 for _, _, names in os.walk(tree) for name in names) - 2  # the links
    assert meter.expected == (count, meter.done + 7)  # the hard link's seven bytes are not sent
    transfer.download(end, [str(tmp_path / "there")], str(tmp_path / "back") + "/")
    assert facts(tmp_path / "back/there") == facts(tree)
    transfer.between(end, [str(tree / "sub"), str(tree / "file")], end, str(tmp_path / "both"))
    assert sorted(os.listdir(tmp_path / "both")) == ["file", "sub"]
    assert facts(tmp_path / "both/sub").keys() == facts(tree / "sub").keys()
    assert said == []


def test_where_things_go(end: End, transfer: Transfer, tmp_path: Path) -> None:
    source = tmp_path / "one"
    source.write_text("1")
    (tmp_path / "there").mkdir()
    for destination, place in (
        ("there", "there/one"),
        ("new", "new"),
        ("made/up/name", "made/up/name"),
        ("deep/er/", "deep/er/one"),
    ):
        transfer.upload(end, [str(source)], f"{tmp_path}/{destination}")
        assert (tmp_path / place).read_text() == "1"
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/inner").write_text("2")
    transfer.upload(end, [f"{tmp_path}/dir/."], f"{tmp_path}/there")
    assert sorted(os.listdir(tmp_path / "there")) == ["inner", "one"]
    alias = tmp_path / "alias"
    alias.symlink_to("one")
    transfer.upload(end, [str(alias)], f"{tmp_path}/followed")
    assert not (tmp_path / "followed").is_symlink()


def test_what_is_there_is_replaced_when_the_new_one_is_whole(
    end: End, transfer: Transfer, tmp_path: Path
) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    reader = (tmp_path / "old").open()
    transfer.upload(end, [f"{tmp_path}/new"], f"{tmp_path}/old")
    assert ((tmp_path / "old").read_text(), reader.read()) == ("new", "old")
    reader.close()
    (tmp_path / "dir").mkdir()
    with pytest.raises(GuestFault, match=r"[Dd]irectory"):
        transfer.upload(end, [f"{tmp_path}/dir"], f"{tmp_path}/old")


def test_a_broken_transfer_is_gone_on_with(
    end: End, transfer: Transfer, meter: Counted, tmp_path: Path
) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    source.write_bytes(os.urandom(3 * LARGE))
    full = source.stat().st_size

    class Broken(Exception):
        pass

    class Breaking(Counted):
        def add(self, size: int) -> None:
            super().add(size)
            if self.done > 2 * LARGE:
                raise Broken

    with pytest.raises(Broken):
        Transfer("test-copy", Breaking(), print, INTERPRETER).upload(end, [str(source)], str(place))
    assert not place.exists()
    transfer.upload(end, [str(source)], str(place))
    assert place.read_bytes() == source.read_bytes()
    assert meter.done == full
    assert sorted(os.listdir(tmp_path)) == ["place", "source"]

    place.unlink()
    with pytest.raises(Broken):
        Transfer("test-copy", Breaking(), print, INTERPRETER).download(end, [str(source)], str(place))
    part = [name for name in os.listdir(tmp_path) if name.startswith(".place")]
    assert len(part) == 1 and 0 < (tmp_path / part[0]).stat().st_size < full
    transfer.download(end, [str(source)], str(place))
    assert place.read_bytes() == source.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["place", "source"]


def packed(pack: Callable[[Packer], None]) -> bytes:
    data = bytearray()
    pack(Packer(data.extend, lambda: 0, print))
    return bytes(data)


def unpack(data: bytes, destination: Path) -> None:
    stream = io.BytesIO(data)
    Unpacker(stream.read, lambda _: None).unpack(str(destination))


def record(kind: bytes, name: bytes, target: bytes = b"", size: int = 0) -> bytes:
    """One record of a parcel, by hand."""
    head = kind + (0o755).to_bytes(4, "big") + bytes(8) + size.to_bytes(8, "big")
    return head + len(name).to_bytes(2, "big") + len(target).to_bytes(2, "big") + name + target


END = record(b"e", b"")


def test_a_small_file_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(100_000))
    data = packed(lambda packer: packer.pack([f"{tmp_path}/source"]))
    for length in (10, 60, 50_000, len(data) - 26):
        with pytest.raises(Refused, match="broke off"):
            unpack(data[:length], tmp_path / "there/it")
        assert not (tmp_path / "there").exists() or os.listdir(tmp_path / "there") == []
    unpack(data, tmp_path / "there/it")
    assert os.listdir(tmp_path / "there") == ["it"]


@pytest.mark.parametrize(
    "data",
    [
        record(b"d", b"../out"),
        record(b"d", b"/out"),
        record(b"d", b"a") + record(b"d", b"a/../../out"),
        record(b"l", b"a", b"..") + record(b"f", b"a/out") + bytes(4),
        record(b"d", b"a") + record(b"l", b"a/b", b"/") + record(b"d", b"a/b") + record(b"f", b"a/b/out"),
        record(b"h", b"a", b"/etc/passwd"),
        record(b"h", b"a", b"../secret"),
        record(b"d", b"a//b"),
        record(b"d", b"a\0b"),
        record(b"f", b"") + bytes(4),
        record(b"x", b"a"),
        b"no parcel at all, but some text",
    ],
)
def test_a_parcel_that_would_get_out_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "in").mkdir()
    with pytest.raises((Refused, OSError)):
        unpack(data + END, tmp_path / "in")
    assert sorted(os.listdir(tmp_path)) == ["in", "secret"]
    for path in (tmp_path / "in").rglob("*"):
        assert path.is_symlink() or not path.is_file()


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").symlink_to("../outside")
    with pytest.raises(OSError, match=r"[Dd]irectory"):
        unpack(record(b"d", b"a") + record(b"f", b"a/x") + bytes(4) + END, tmp_path / "in")
    assert os.listdir(tmp_path / "outside") == []
    (tmp_path / "in/file").symlink_to("../outside/target")
    unpack(record(b"f", b"file") + bytes(4) + END, tmp_path / "in")
    assert not (tmp_path / "in/file").is_symlink()


def test_what_cannot_be_read_is_left_out_and_told(
    end: End, transfer: Transfer, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/good").write_text("1")
    os.mkfifo(tmp_path / "dir/pipe")
    transfer.download(end, [f"{tmp_path}/dir"], f"{tmp_path}/there")
    assert os.listdir(tmp_path / "there") == ["good"]
    assert len(said) == 1 and "pipe" in said[0]


def test_mistakes_are_told(end: End, transfer: Transfer, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a").write_text("1")
    with pytest.raises(NotFound, match="no-such"):
        transfer.upload(end, [f"{tmp_path}/no-such"], "/x")
    with pytest.raises(GuestFault, match="no-such"):
        transfer.download(end, [f"{tmp_path}/no-such"], str(tmp_path / "x"))
    with pytest.raises(GuestFault, match="no-such"):
        transfer.between(end, [f"{tmp_path}/no-such"], end, str(tmp_path / "x"))
    with pytest.raises(GuestFault, match="/proc/x"):
        transfer.between(end, [f"{tmp_path}/a"], end, "/proc/x/y")
    with pytest.raises(GuestFault, match="/proc/x"):
        transfer.upload(end, [f"{tmp_path}/a"], "/proc/x/y")
    with pytest.raises(HostFault, match="/proc/x"):
        transfer.download(end, [f"{tmp_path}/a"], "/proc/x/y")
    with pytest.raises(InvalidRequest, match="both be"):
        transfer.upload(end, [f"{tmp_path}/a", f"{tmp_path}/sub/a"], f"{tmp_path}/there")
    with pytest.raises(GuestFault, match="is a directory"):
        transfer.download(end, [f"{tmp_path}/sub"], "-")


def test_streams(
    end: End, transfer: Transfer, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    data = os.urandom(2 * LARGE)
    reading, writing = os.pipe()
    kept = os.dup(0)
    os.dup2(reading, 0)
    os.close(reading)

    def feed() -> None:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(data)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        transfer.upload(end, ["-"], f"{tmp_path}/streamed")
    finally:
        feeder.join()
        os.dup2(kept, 0)
        os.close(kept)
    assert (tmp_path / "streamed").read_bytes() == data
    assert stat.S_IMODE((tmp_path / "streamed").stat().st_mode) == 0o644
    transfer.download(end, [f"{tmp_path}/streamed"], "-")
    assert capfdbinary.readouterr().out == data


def test_nothing_is_left_running(end: End, transfer: Transfer, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    transfer.upload(end, [f"{tmp_path}/a"], f"{tmp_path}/b")
    line = end.agent.line()
    assert [row for row in running(line).values() if "copy" in str(row["tag"])] == []
    line.close()


def test_the_program_imports_what_the_tools_drive_has() -> None:
    source = Path(PROGRAM).read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"__future__", "errno", "fcntl", "os", "select", "stat", "sys"}
