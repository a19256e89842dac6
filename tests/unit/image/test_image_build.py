"""From a source to a filesystem, whole: every kind of source, what the file holds, and failures."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import lzma
import os
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.errors import AenvError, InvalidRequest, NotFound, StoreCorrupt, StoreFull
from agentenv.image import ext4
from agentenv.image.build import BuiltImage, build_rootfs
from agentenv.image.programs import Outcome
from support.archives import (
    Item,
    Layout,
    directory,
    file,
    gzipped,
    hardlink,
    plain,
    symlink,
    tarball,
    zstandard,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root filesystems are built as root")

DISK = 64
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
PASSWD = b"root:x:0:0:root:/root:/bin/sh\napp:x:7:7::/srv/app:/bin/sh\n"

TREE = [
    directory("./", mode=0o751, uid=3, gid=4),
    directory("etc"),
    file("etc/passwd", PASSWD),
    directory("tmp", mode=0o700),
    directory("bin"),
    file("bin/sh", b"#!" * 5000, mode=0o4755, uid=1, gid=2),
    hardlink("bin/ash", "bin/sh"),
    symlink("link", "bin/sh"),
    Item("null", tarfile.CHRTYPE, mode=0o666, device=(1, 3)),
    file("ping", b"x", pax={"SCHILY.xattr.security.capability": CAPABILITY.decode("utf-8", "surrogateescape"),
                            "SCHILY.xattr.user.note": "kept"}),
    file("sparse", b"a" + bytes(4 << 20) + b"z"),
]  # fmt: skip


def debugfs(image: Path, command: str) -> str:
    return subprocess.run(
        ["debugfs", "-R", command, str(image)], check=True, capture_output=True, text=True
    ).stdout


def stat_of(image: Path, path: str) -> dict[str, str]:
    text = debugfs(image, f"stat {path}")
    return dict(re.findall(r"(Mode|User|Group|Links|Size|Blockcount): +(\S+)", text))


async def build(source: str | Path, tmp_path: Path, **options: object) -> BuiltImage:
    """Build into `tmp_path/out`; whatever happens, no scratch may be left."""
    values = {"disk_mib": DISK, "progress": lambda text: None, **options}
    try:
        return await build_rootfs(
            str(source),
            tmp_path / "out",
            scratch=tmp_path / "scratch",
            **values,  # type: ignore[arg-type]
        )
    finally:
        assert not (tmp_path / "scratch").exists() or os.listdir(tmp_path / "scratch") == []


def check_clean(image: Path) -> None:
    done = subprocess.run(["e2fsck", "-fn", str(image)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


async def test_everything_arrives_in_the_filesystem(tmp_path: Path) -> None:
    (tmp_path / "rootfs.tar").write_bytes(tarball(*TREE))
    built = await build(tmp_path / "rootfs.tar", tmp_path)
    image = built.path
    check_clean(image)
    assert image.stat().st_size == DISK << 20
    assert built.size_bytes == image.stat().st_blocks * 512 < 8 << 20
    assert image.stat().st_mode & 0o777 == 0o444
    root = stat_of(image, "/")
    assert (root["Mode"], root["User"], root["Group"]) == ("0751", "3", "4")
    shell = stat_of(image, "/bin/sh")
    assert (shell["Mode"], shell["User"], shell["Group"]) == ("04755", "1", "2")
    assert shell["Links"] == "2"
    assert 'Fast link dest: "bin/sh"' in debugfs(image, "stat /link")
    assert "Device major/minor number: 01:03" in debugfs(image, "stat /null")
    assert "security.capability" in (listed := debugfs(image, "ea_list /ping"))
    assert 'user.note (4) = "kept"' in listed
    assert int(stat_of(image, "/sparse")["Blockcount"]) * 512 < 1 << 20
    assert debugfs(image, "cat /etc/passwd").encode() == PASSWD


async def test_the_filesystem_suits_guests(tmp_path: Path) -> None:
    (tmp_path / "r.tar").write_bytes(tarball(*TREE))
    built = await build(tmp_path / "r.tar", tmp_path)
    header = subprocess.run(["dumpe2fs", str(built.path)], check=True, capture_output=True, text=True).stdout
    assert "INODE_UNINIT" not in header
    assert re.search(r"volume name: +rootfs", header)
    assert re.search(r"Reserved block count: +0\n", header)
    assert re.search(r"Default mount options: +user_xattr acl", header)
    features = re.search(r"Filesystem features: +(.*)", header)
    assert features
    assert "metadata_csum" not in features[1]
    assert {"has_journal", "resize_inode", "ext_attr", "dir_index"} <= set(features[1].split())
    again = await build_rootfs(
        str(tmp_path / "r.tar"),
        tmp_path / "two",
        disk_mib=DISK,
        scratch=tmp_path / "s",
        progress=lambda t: None,
    )
    uuid = re.compile(r"Filesystem UUID: +(\S+)|Directory Hash Seed: +(\S+)|Filesystem created: +(.*)")
    second = subprocess.run(["dumpe2fs", str(again.path)], check=True, capture_output=True, text=True).stdout
    assert uuid.findall(header) == uuid.findall(second)
    assert again.digest == built.digest


async def test_missing_mount_points_are_supplied_and_others_left(tmp_path: Path) -> None:
    (tmp_path / "r.tar").write_bytes(
        tarball(
            directory("tmp", mode=0o700, uid=5),
            symlink("run", "var/run"),
            directory("var/run"),
            file("sys", b"?"),
            symlink("proc", "nowhere"),
        )
    )
    built = await build(tmp_path / "r.tar", tmp_path)
    names = set(re.findall(r"/([^/\n]*)/\d+/\n|/([^/\n]*)/\d*/\n", debugfs(built.path, "ls -p /")))
    assert names
    assert stat_of(built.path, "/tmp")["Mode"] == "0700"
    assert 'dest: "var/run"' in debugfs(built.path, "stat /run")
    for name, mode in {
        "sys": "0555",
        "proc": "0555",
        "dev": "0755",
        ".agentenv": "0755",
        "etc": "0755",
    }.items():
        assert "Type: directory" in debugfs(built.path, f"stat /{name}")
        assert stat_of(built.path, f"/{name}")["Mode"] == mode


async def test_an_empty_image_boots_too(tmp_path: Path) -> None:
    (tmp_path / "r.tar").write_bytes(tarball(file("hello", b"static", mode=0o755)))
    built = await build(tmp_path / "r.tar", tmp_path)
    assert (built.default_user, built.default_workdir) == ("root", "/root")
    assert "Type: directory" in debugfs(built.path, "stat /tmp")
    assert stat_of(built.path, "/tmp")["Mode"] == "01777"


@pytest.mark.parametrize("packed", [plain, gzipped, zstandard, bz2.compress, lzma.compress])
async def test_tarballs_of_every_compression(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    (tmp_path / "rootfs").write_bytes(packed(tarball(*TREE)))
    built = await build(tmp_path / "rootfs", tmp_path)
    assert debugfs(built.path, "cat /etc/passwd").encode() == PASSWD


async def test_a_directory(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", str(tree), "--xattrs-include=*"], input=tarball(*TREE), check=True)
    os.mkfifo(tree / "pipe")
    before = sorted(os.listdir(tree))
    built = await build(tree, tmp_path)
    check_clean(built.path)
    assert (stat_of(built.path, "/bin/sh")["Links"], stat_of(built.path, "/bin/sh")["Mode"]) == ("2", "04755")
    assert "security.capability" in debugfs(built.path, "ea_list /ping")
    assert "Type: FIFO" in debugfs(built.path, "stat /pipe")
    assert int(stat_of(built.path, "/sparse")["Blockcount"]) * 512 < 1 << 20
    assert sorted(os.listdir(tree)) == before, "the directory itself is left alone"


CONFIG = {"Env": ["A=b"], "User": "app", "WorkingDir": "/work", "Cmd": ["x"], "Entrypoint": ["y"]}


@pytest.mark.parametrize("form", ["layout", "archive", "archive.gz", "archive.zst", "docker"])
async def test_images(tmp_path: Path, form: str) -> None:
    layout = Layout(tmp_path / "layout")
    entry = layout.image([tarball(*TREE), tarball(file(".wh.link"), file("new"))], config=CONFIG, tag="v1")
    source = layout.directory
    if form != "layout":
        source = tmp_path / "saved.tar"
        kind = "docker-archive" if form == "docker" else "oci-archive"
        subprocess.run(
            [
                "skopeo",
                "--insecure-policy",
                "copy",
                "-q",
                f"oci:{layout.directory}:v1",
                f"{kind}:{source}:x/app:v1",
            ],
            check=True,
        )
        pack = {"archive.gz": gzip.compress, "archive.zst": zstandard}.get(form, plain)
        source.write_bytes(pack(source.read_bytes()))
    built = await build(f"{source}:v1", tmp_path)
    check_clean(built.path)
    assert dict(built.config.env) == {"A": "b"}
    assert (built.config.entrypoint, built.config.cmd) == (("y",), ("x",))
    assert (built.default_user, built.default_workdir) == ("app", "/work")
    assert form == "docker" or built.digest == layout.config_digest(entry)
    assert (
        "File not found"
        in subprocess.run(
            ["debugfs", "-R", "stat /link", str(built.path)], capture_output=True, text=True
        ).stderr
    )
    assert "Type: regular" in debugfs(built.path, "stat /new")


async def test_the_disk_grows_only_when_allowed(tmp_path: Path) -> None:
    (tmp_path / "r.tar").write_bytes(tarball(file("big", os.urandom(90 << 20))))
    with pytest.raises(InvalidRequest, match="larger disk"):
        await build(tmp_path / "r.tar", tmp_path)
    assert not (tmp_path / "out").exists()
    built = await build(tmp_path / "r.tar", tmp_path, max_disk_mib=4096)
    assert built.disk_mib == 512
    assert built.path.stat().st_size == 512 << 20


async def test_many_small_files_get_their_inodes(tmp_path: Path) -> None:
    (tmp_path / "r.tar").write_bytes(tarball(*(file(f"d{n % 50}/{n}") for n in range(6000))))
    built = await build(tmp_path / "r.tar", tmp_path)
    check_clean(built.path)
    header = subprocess.run(["dumpe2fs", "-h", str(built.path)], check=True, capture_output=True, text=True)
    free = re.search(r"Free inodes: +(\d+)", header.stdout)
    assert free
    assert int(free[1]) > 1000


FAILURES: dict[str, tuple[Callable[[Path], str], type[AenvError]]] = {
    "nothing there": (lambda tmp: f"{tmp}/none", NotFound),
    "text": (lambda tmp: written(tmp, b"just text, and more of it\n" * 100), InvalidRequest),
    "an empty file": (lambda tmp: written(tmp, b""), InvalidRequest),
    "zeroes": (lambda tmp: written(tmp, bytes(10240)), InvalidRequest),
    "an empty directory": (lambda tmp: emptied(tmp), InvalidRequest),
    "a device": (lambda tmp: "/dev/null", InvalidRequest),
    "compressed text": (lambda tmp: written(tmp, gzipped(b"text" * 1000)), InvalidRequest),
    "cut short": (lambda tmp: written(tmp, gzipped(tarball(*TREE))[:-400]), StoreCorrupt),
    "zstd cut short": (lambda tmp: written(tmp, zstandard(tarball(*TREE))[:-40]), StoreCorrupt),
    "bzip2 damaged": (lambda tmp: written(tmp, damaged(bz2.compress(tarball(*TREE)))), StoreCorrupt),
    "xz damaged": (lambda tmp: written(tmp, damaged(lzma.compress(tarball(*TREE)))), StoreCorrupt),
    "hostile": (lambda tmp: written(tmp, tarball(file("a"), file("../../x"))), StoreCorrupt),
    "a tag on a tarball": (lambda tmp: written(tmp, tarball(*TREE)) + ":v1", InvalidRequest),
    "oci of a file": (lambda tmp: "oci:" + written(tmp, tarball(*TREE)), InvalidRequest),
    "oci of a plain directory": (lambda tmp: f"oci:{tmp}", InvalidRequest),
    "an unknown suite": (lambda tmp: "debootstrap:buzz", InvalidRequest),
}


def written(tmp: Path, data: bytes) -> str:
    (tmp / "source").write_bytes(data)
    return str(tmp / "source")


def emptied(tmp: Path) -> str:
    (tmp / "source").mkdir()
    return str(tmp / "source")


def damaged(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 40]) + data[middle + 40 :]


@pytest.mark.parametrize(("source", "error"), FAILURES.values(), ids=FAILURES.keys())
async def test_failures_are_typed_and_leave_nothing(
    tmp_path: Path, source: Callable[[Path], str], error: type[AenvError]
) -> None:
    with pytest.raises(error) as caught:
        await build(source(tmp_path), tmp_path)
    assert type(caught.value) is error
    assert not (tmp_path / "out").exists()


async def test_a_full_disk(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "r.tar").write_bytes(tarball(file("big", os.urandom(8 << 20))))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(scratch)], check=True)
    try:
        with pytest.raises(StoreFull):
            await build(tmp_path / "r.tar", tmp_path)
        assert os.listdir(scratch) == []
    finally:
        subprocess.run(["umount", str(scratch)], check=True)


@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        ("mkfs.ext4: No space left on device while writing", StoreFull),
        ("__populate_fs: Could not allocate block in ext2 filesystem while writing file", InvalidRequest),
    ],
)
def test_what_mkfs_says(stderr: str, error: type[AenvError]) -> None:
    with pytest.raises(error):
        ext4.check(Outcome(1, stderr), 64)


async def test_a_cancelled_build_stops_and_leaves_nothing(tmp_path: Path) -> None:
    big = tarball(*(file(f"f{n}", os.urandom(4096)) for n in range(20_000)))
    (tmp_path / "r.tar").write_bytes(big)
    unpacking = asyncio.Event()

    def progress(text: str) -> None:
        if text.startswith("unpacking"):
            unpacking.set()

    task = asyncio.create_task(build(tmp_path / "r.tar", tmp_path, disk_mib=512, progress=progress))
    await unpacking.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not (tmp_path / "out").exists()
