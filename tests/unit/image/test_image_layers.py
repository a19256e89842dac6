"""Unpacking: what is kept, what layers do to each other, and what hostile archives cannot do."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.errors import AenvError, InvalidRequest, StoreCorrupt
from agentenv.image.layer import Unpacking
from agentenv.image.streams import read_faults, tar_stream
from agentenv.image.tree import Budget, Tree, host_faults
from support.archives import Item, directory, file, hardlink, symlink, tarball
from support.trees import described

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices need root")

# CAP_NET_RAW, permitted and effective, as `setcap cap_net_raw+ep` writes it.
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "outside" / "tree"
    path.mkdir(parents=True)
    return path


def unpack(root: Path, *layers: bytes, whiteouts: bool = True, budget: int = 1 << 30) -> None:
    tree = Tree(root, Budget(budget))
    for layer in layers:
        with host_faults("test"), read_faults("test"), tar_stream(io.BytesIO(layer)) as tar:
            Unpacking(tree, whiteouts=whiteouts).run(tar)


def names(root: Path) -> set[str]:
    return set(described(root))


def xattr(name: str, value: bytes) -> dict[str, str]:
    return {f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape")}


def test_owners_modes_times_and_links(root: Path) -> None:
    unpack(
        root,
        tarball(
            directory("srv", mode=0o2775, uid=7, gid=8, mtime=1_500_000_000),
            file("srv/tool", b"#!", mode=0o6755, uid=1000, gid=50),
            hardlink("srv/same", "srv/tool"),
            symlink("srv/soft", "/nowhere", uid=3, gid=4),
            Item("srv/pipe", tarfile.FIFOTYPE, mode=0o600),
            Item("srv/null", tarfile.CHRTYPE, mode=0o666, device=(1, 3)),
            Item("srv/disk", tarfile.BLKTYPE, mode=0o660, device=(7, 9)),
            file("srv/exact", pax={"mtime": "1234567890.123456789"}),
            file("srv/old", mtime=-5.0),
        ),
    )
    srv = os.lstat(root / "srv")
    assert (stat.S_IMODE(srv.st_mode), srv.st_uid, srv.st_gid, srv.st_mtime) == (0o2775, 7, 8, 1_500_000_000)
    tool = os.lstat(root / "srv/tool")
    assert (stat.S_IMODE(tool.st_mode), tool.st_uid, tool.st_gid, tool.st_nlink) == (0o6755, 1000, 50, 2)
    assert os.lstat(root / "srv/same").st_ino == tool.st_ino
    soft = os.lstat(root / "srv/soft")
    assert (os.readlink(root / "srv/soft"), soft.st_uid, soft.st_gid) == ("/nowhere", 3, 4)
    assert stat.S_ISFIFO(os.lstat(root / "srv/pipe").st_mode)
    assert os.lstat(root / "srv/null").st_rdev == os.makedev(1, 3)
    assert os.lstat(root / "srv/disk").st_rdev == os.makedev(7, 9)
    assert os.lstat(root / "srv/exact").st_mtime_ns == 1234567890_123456789
    assert os.lstat(root / "srv/old").st_mtime == -5


def test_extended_attributes(root: Path) -> None:
    unpack(
        root,
        tarball(
            file("ping", b"x", uid=5, pax=xattr("security.capability", CAPABILITY)),
            file("noted", pax={**xattr("user.bytes", b"\x00\xff\n="), **xattr("security.selinux", b"x")}),
            file("base64", pax={"LIBARCHIVE.xattr.user.a": "aGVsbG8"}),
            directory("d", pax=xattr("user.on", b"directory")),
        ),
        tarball(directory("d", pax=xattr("user.new", b"1"))),
    )
    assert os.getxattr(root / "ping", "security.capability") == CAPABILITY
    assert os.listxattr(root / "noted") == ["user.bytes"]
    assert os.getxattr(root / "noted", "user.bytes") == b"\x00\xff\n="
    assert os.getxattr(root / "base64", "user.a") == b"hello"
    assert os.listxattr(root / "d") == ["user.new"]


def test_holes_stay_holes(root: Path) -> None:
    content = b"head" + bytes(8 << 20) + b"tail"
    unpack(root, tarball(file("sparse", content)))
    assert (root / "sparse").read_bytes() == content
    assert os.lstat(root / "sparse").st_blocks * 512 < 1 << 20


def test_gnu_sparse_members(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "image").open("wb") as out:
        out.truncate(64 << 20)
        out.seek(40 << 20)
        out.write(b"island")
    for form in ("gnu", "posix"):
        archive = tmp_path / f"{form}.tar"
        assert os.system(f"tar -C {source} --format={form} --sparse -cf {archive} image") == 0
        assert archive.stat().st_size < 1 << 20
        unpack(root, archive.read_bytes())
        assert (root / "image").read_bytes() == (source / "image").read_bytes()
        assert os.lstat(root / "image").st_blocks * 512 < 1 << 20


def test_odd_names(root: Path) -> None:
    long = "/".join(["part" * 30] * 8)
    unpack(root, tarball(file("./a\udcff b\n"), file("//etc/./x"), file(long), file("ü")))
    assert os.path.lexists(root / "a\udcff b\n")
    assert (root / "etc/x").exists()
    assert (root / long).exists()
    assert (root / "ü").exists()


def test_the_root_itself_gets_its_attributes(root: Path) -> None:
    unpack(root, tarball(directory("./", mode=0o750, uid=4, gid=5), file("a")))
    status = os.lstat(root)
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o750, 4, 5)


def test_whiteouts_hide_lower_layers_only(root: Path) -> None:
    unpack(
        root,
        tarball(directory("d"), file("d/old"), file("d/kept"), directory("e"), file("e/x"), file("gone")),
        tarball(
            file(".wh.gone"),
            file("d/.wh.old"),
            file("d/.wh.never-there"),
            file("nowhere/.wh.x"),
            file("e/new"),
            file(".wh.e"),
        ),
    )
    assert names(root) == {"d", "d/kept", "e", "e/new"}


@pytest.mark.parametrize("first", [True, False])
def test_an_opaque_directory_keeps_its_own_layer_whatever_the_order(root: Path, first: bool) -> None:
    marker, own = file("d/.wh..wh..opq"), [directory("d"), directory("d/sub"), file("d/sub/new"), file("d/a")]
    upper = [own[0], marker, *own[1:]] if first else [*own, marker]
    unpack(
        root,
        tarball(directory("d"), directory("d/sub"), file("d/sub/old"), file("d/a", b"old"), file("d/b")),
        tarball(*upper),
    )
    assert names(root) == {"d", "d/sub", "d/sub/new", "d/a"}
    assert (root / "d/a").read_bytes() == b""


def test_the_times_of_directories_survive_what_happens_in_them(root: Path) -> None:
    unpack(
        root,
        tarball(directory("d", mtime=1_000_000_000), file("d/a"), file("d/b")),
        tarball(file("d/c"), file("d/.wh.a")),
    )
    assert os.lstat(root / "d").st_mtime == 1_000_000_000


def test_types_replace_each_other(root: Path) -> None:
    unpack(
        root,
        tarball(directory("a"), file("a/x"), file("b"), symlink("c", "a"), directory("e"), symlink("f", "e")),
        tarball(file("a", b"now"), directory("b"), directory("c"), file("c/y"), symlink("e", "b"), file("f")),
    )
    assert (root / "a").read_bytes() == b"now"
    assert (root / "b").is_dir()
    assert not (root / "c").is_symlink()
    assert (root / "c/y").exists()
    assert os.readlink(root / "e") == "b"
    assert (root / "f").is_file()
    assert not (root / "f").is_symlink()


def test_names_lead_through_the_trees_own_links(root: Path) -> None:
    unpack(
        root,
        tarball(directory("usr/lib"), symlink("lib", "usr/lib"), symlink("abs", "/usr/lib")),
        tarball(file("lib/a"), file("abs/b"), hardlink("c", "lib/a"), file("lib/.wh.nothing")),
        tarball(file("lib/.wh.a")),
    )
    assert names(root) == {"usr", "usr/lib", "usr/lib/b", "lib", "abs", "c"}


def test_in_a_tarball_that_is_no_layer_whiteouts_are_files(root: Path) -> None:
    unpack(root, tarball(file("a"), file(".wh.a"), file("d/.wh..wh..opq")), whiteouts=False)
    assert names(root) == {"a", ".wh.a", "d", "d/.wh..wh..opq"}


HOSTILE = {
    "climbing name": [file("../escaped", b"x")],
    "climbing in the middle": [file("a/../../escaped", b"x")],
    "hard link out": [hardlink("a", "../escaped")],
    "hard link to nothing": [hardlink("a", "etc/passwd")],
    "hard link to a directory": [directory("d"), hardlink("a", "d")],
    "hard link to the root": [hardlink("a", ".")],
    "whiteout of the parent": [directory("d"), file("d/.wh...")],
    "whiteout of itself": [directory("d"), file("d/.wh..")],
    "whiteout of nothing": [directory("d"), file("d/.wh.")],
    "a file as a directory": [file("f"), file("f/x")],
    "links that never end": [symlink("a", "b"), symlink("b", "a"), file("a/x")],
    "an impossible owner": [file("a", uid=1 << 33)],
    "a name too long": [file("n" * 300)],
}


@pytest.mark.parametrize("items", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_members_are_refused(root: Path, items: list[Item]) -> None:
    (root.parent / "witness").write_text("untouched")
    with pytest.raises(StoreCorrupt):
        unpack(root, tarball(*items))
    assert sorted(os.listdir(root.parent)) == ["tree", "witness"]


def test_links_that_point_out_lead_back_in(root: Path) -> None:
    outside = root.parent
    (outside / "witness").write_text("untouched")
    unpack(
        root,
        tarball(
            symlink("up", "../../.."),
            symlink("abs", str(outside)),
            symlink("target", str(outside / "witness")),
            file("up/in-root", b"1"),
            file("abs/in-tree", b"2"),
            file("target", b"replaced"),
        ),
    )
    assert (outside / "witness").read_text() == "untouched"
    assert sorted(os.listdir(outside)) == ["tree", "witness"]
    assert (root / "in-root").read_bytes() == b"1"
    assert (root / str(outside)[1:] / "in-tree").read_bytes() == b"2"
    assert (root / "target").read_bytes() == b"replaced"


def test_a_directory_swapped_for_a_link_misleads_nobody(root: Path) -> None:
    (root.parent / "victim").mkdir()
    unpack(
        root,
        tarball(directory("d"), file("d/a")),
        tarball(file("d/b"), symlink("d", str(root.parent / "victim")), file("d/c"), file("d/.wh.x")),
    )
    assert os.listdir(root.parent / "victim") == []


def test_a_directory_header_over_a_link_changes_nothing_outside(root: Path) -> None:
    victim = root.parent / "victim"
    victim.mkdir(mode=0o700)
    unpack(root, tarball(symlink("d", str(victim)), directory("d", mode=0o777, uid=9)))
    assert stat.S_IMODE(os.lstat(victim).st_mode) == 0o700
    assert os.lstat(root / "d").st_uid == 9


def test_what_does_not_fit_is_refused_early(root: Path) -> None:
    with pytest.raises(InvalidRequest, match="larger disk"):
        unpack(root, tarball(file("big", b"x" * (3 << 20))), budget=1 << 20)


def test_replaced_content_does_not_count(root: Path) -> None:
    layer = tarball(file("big", b"x" * 700_000))
    unpack(root, layer, layer, layer, layer, budget=1 << 20)
    assert (root / "big").stat().st_size == 700_000


def test_a_huge_header_is_refused(root: Path) -> None:
    with pytest.raises(StoreCorrupt, match="header of"):
        unpack(root, tarball(file("first"), file("a", pax={"comment": "x" * (2 << 20)})))


@pytest.mark.parametrize("position", [512, 700, 1024, 1700])
def test_damage_and_truncation_are_noticed(root: Path, position: int) -> None:
    whole = tarball(file("a", b"x" * 600), file("b", b"y" * 600))
    with pytest.raises(AenvError):
        unpack(root, whole[:position])
    damaged = bytearray(whole)
    damaged[1536 + 100] ^= 0xFF  # the second header
    with pytest.raises(StoreCorrupt, match="checksum"):
        unpack(root, bytes(damaged))


Step = tuple[str, list[str], list[str]]
MAKE: dict[str, Callable[[str, str], Item]] = {
    "file": lambda name, target: file(name, b"x"),
    "dir": lambda name, target: directory(name, mode=0o777),
    "link": symlink,
    "hard": hardlink,
}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(MAKE)),
            st.lists(st.sampled_from(["a", "b", "..", ".", "", ".wh.a", ".wh..wh..opq"]), max_size=4),
            st.lists(st.sampled_from(["a", "b", "..", ""]), max_size=4),
        ),
        max_size=8,
    )
)
def test_no_archive_reaches_out(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[str], list[str]]]
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "a").write_text("untouched")
    (outside / "b").mkdir()
    (outside / "tree").mkdir()
    items = [MAKE[kind]("/".join(name) or "a", "/".join(target) or "b") for kind, name, target in steps]
    try:
        unpack(outside / "tree", tarball(*items))
    except AenvError:
        pass
    assert sorted(os.listdir(outside)) == ["a", "b", "tree"]
    assert (outside / "a").read_text() == "untouched"
    assert os.listdir(outside / "b") == []
    assert os.lstat(outside / "a").st_nlink == 1
