"""What is exported, beside what skopeo and umoci make of it, and what comes of it imported again."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.building import programs
from agentenv.building.export import config_of, file_name
from agentenv.image.build import build_rootfs
from agentenv.image.config import INIT_LABEL, ImageConfig
from agentenv.image.layout import frame
from agentenv.snapshot.records import Start
from agentenv.template.records import Template
from support.trees import described

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices need root")

PROGRAM = Path(programs.__file__).parent / "export.py"
RESOLV_CONF = "nameserver 169.254.0.22\n"
CONFIG = ImageConfig(
    env={"PATH": "/opt/bin:/bin", "EMPTY": ""},
    workdir="/srv/app",
    user="12345",
    entrypoint=("/bin/app", "--serve"),
    cmd=("now",),
    exposed_ports=("53/udp", "8080/tcp"),
    labels={"org.example": "yes"},
)
# The program's own `main` binds the root; here a directory is written as it is.
_DRIVER = """
import os, runpy, sys
names = runpy.run_path(sys.argv[1])
os.chdir(sys.argv[2])
archive = names["Archive"](sys.stdout.buffer, sys.argv[3].encode())
archive.tree(".")
archive.finish()
"""


def layer_of(tree: Path, out: Path) -> Path:
    """The layer that the program writes of a tree, as a file."""
    with out.open("wb") as file:
        command = [sys.executable, "-I", "-S", "-c", _DRIVER, str(PROGRAM), str(tree), RESOLV_CONF]
        subprocess.run(command, stdout=file, check=True)
    return out


def archive_of(layer: Path, out: Path, config: ImageConfig = CONFIG) -> Path:
    """An OCI archive of a layer, as a file."""
    data = layer.read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    around = frame(config, digest, len(data), created="2026-01-02T03:04:05Z", name="latest")
    out.write_bytes(around.head + data + around.tail)
    return out


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Of everything that a root filesystem may hold some."""
    root = tmp_path / "root"
    for name in ("etc", "bin", "srv/app", "tmp", "var/empty", ".agentenv", "lost+found", "dev"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "bin/app").write_bytes(b"\x7fELF" + bytes(700))
    (root / "bin/app").chmod(0o4755)
    os.setxattr(root / "bin/app", "security.capability", b"\1\0\0\2\0\4\0\0" + bytes(12))
    os.setxattr(root / "srv/app", "user.colour", b"gr\xc3\xbcn=\n\xff")
    os.link(root / "bin/app", root / "bin/same")
    (root / "bin/sh").symlink_to("app")
    (root / "srv/long").symlink_to("x" * 180)
    os.link(root / "srv/long", root / "srv/long-again", follow_symlinks=False)
    deep = root / "srv" / ("d" * 90) / ("f" * 120)
    deep.parent.mkdir()
    deep.write_text("deep")
    os.link(deep, root / "srv/deep-again")
    (root / "srv/grün \udcff\nname").write_text("odd")
    os.mknod(root / "srv/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "srv/loop", stat.S_IFBLK | 0o660, os.makedev(7, 300))
    os.mkfifo(root / "srv/pipe", 0o622)
    with (root / "srv/holes").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"middle")
        file.truncate(32 << 20)
    with (root / "srv/only-a-hole").open("wb") as file:
        file.truncate(5000)
    (root / "srv/empty").touch()
    for name, uid, gid in (("srv/app", 12345, 0), ("srv/empty", 3_000_000_000, 2_500_000), ("bin/sh", 5, 6)):
        os.chown(root / name, uid, gid, follow_symlinks=False)
    os.utime(root / "srv/empty", ns=(0, 1_700_000_000_123_456_789))
    os.utime(root / "srv/pipe", ns=(0, 0))
    return root


def expected(root: Path) -> dict[str, object]:
    """What is to be found again."""
    found: dict[str, object] = dict(described(root))
    return {
        name: entry
        for name, entry in found.items()
        if name.partition("/")[0] not in (".agentenv", "lost+found")
    }


def test_umoci_unpacks_what_was_exported(tree: Path, tmp_path: Path) -> None:
    archive = archive_of(layer_of(tree, tmp_path / "layer"), tmp_path / "out.tar")
    source = f"oci-archive:{archive}"
    inspected = subprocess.run(["skopeo", "inspect", "--config", source], check=True, capture_output=True)
    assert ImageConfig.from_image(json.loads(inspected.stdout)) == CONFIG
    layout = tmp_path / "layout"
    subprocess.run(
        ["skopeo", "copy", "--quiet", source, f"oci:{layout}:latest"], check=True, capture_output=True
    )
    bundle = tmp_path / "bundle"
    command = ["umoci", "unpack", "--image", f"{layout}:latest", str(bundle)]
    subprocess.run(command, check=True, capture_output=True)
    assert described(bundle / "rootfs") == expected(tree)


async def test_it_can_be_imported_again(tree: Path, tmp_path: Path) -> None:
    layer = layer_of(tree, tmp_path / "layer")
    assert layer.stat().st_size < 1 << 20  # holes take nothing
    archive = archive_of(layer, tmp_path / "out.tar")
    built = await build_rootfs(
        str(archive),
        tmp_path / "rootfs.ext4",
        disk_mib=64,
        scratch=tmp_path / "scratch",
        progress=lambda text: None,
        tree=tmp_path / "again",
        keep_tree=True,
    )
    assert built.config == CONFIG
    assert (built.default_user, built.default_workdir) == ("12345", "/srv/app")
    again = expected(tmp_path / "again")
    for name in ("proc", "run", "sys"):  # which every guest needs
        del again[name]
    assert again == expected(tree)
    assert (tmp_path / "again/srv/holes").stat().st_blocks * 512 < 1 << 20


def test_what_the_guest_put_there_for_itself_is_left_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / ".agentenv-copy").touch()
    (root / "etc/resolv.conf").write_text(RESOLV_CONF)
    (root / "etc/hosts").write_text("127.0.0.1\tlocalhost\n127.0.1.1\tname\t# agentenv\n")
    unpacked = unpack(layer_of(root, tmp_path / "layer"), tmp_path / "unpacked")
    assert sorted(os.listdir(unpacked)) == ["etc"]
    assert (unpacked / "etc/resolv.conf").read_text() == ""
    assert (unpacked / "etc/hosts").read_text() == "127.0.0.1\tlocalhost\n"
    (root / "etc/resolv.conf").write_text("nameserver 192.0.2.1\n")
    kept = unpack(layer_of(root, tmp_path / "layer"), tmp_path / "kept")
    assert (kept / "etc/resolv.conf").read_text() == "nameserver 192.0.2.1\n"


def unpack(layer: Path, into: Path) -> Path:
    """What GNU tar makes of a layer."""
    into.mkdir()
    subprocess.run(["tar", "-xf", str(layer), "-C", str(into)], check=True)
    return into


@pytest.fixture
def template(tmp_path: Path) -> Callable[..., Template]:
    def make(**changes: object) -> Template:
        known = {"id": "i", "name": "n", "build_id": "b", "rootfs": None, "source": "s", "recipe": "r"}
        numbers = {
            "disk_mib": 1,
            "memory_mib": 1,
            "vcpus": 1,
            "size_bytes": 1,
            "created_at": 0,
            "updated_at": 0,
        }
        where = {"digest": "d", "default_user": "user", "default_workdir": "/srv"}
        return Template(**{**known, **numbers, **where, **changes})  # type: ignore[arg-type]

    return make


def test_an_image_of_a_template_is_run_as_its_sandboxes_are(template: Callable[..., Template]) -> None:
    plain = config_of(template(env={"A": "1"}, entrypoint=("app",), labels={"l": "v"}))
    assert (plain.user, plain.workdir, plain.env, plain.entrypoint) == ("user", "/srv", {"A": "1"}, ("app",))
    assert plain.labels == {"l": "v"}
    started = config_of(template(entrypoint=("app",), start=Start("serve --all")))
    assert (started.entrypoint, started.cmd) == ((), ("/bin/sh", "-c", "serve --all"))


@pytest.mark.parametrize("init", ["agent", "systemd"])
@pytest.mark.parametrize("cmd", [(), ("/sbin/init",)])
def test_process_1_survives_an_export(
    template: Callable[..., Template], init: str, cmd: tuple[str, ...]
) -> None:
    exported = config_of(template(init=init, cmd=cmd))
    assert exported.init == init
    says_anyway = init == ("systemd" if cmd else "agent")
    assert (INIT_LABEL in exported.labels) != says_anyway


def test_the_file_is_named_after_the_template() -> None:
    assert file_name('team/app:v1"\r\n') == "app-v1---"
