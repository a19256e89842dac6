"""Creating templates: doing it, not doing it twice, and what is left when it goes wrong."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.errors import AenvError, InvalidRequest, NotFound, StoreCorrupt
from agentenv.image import cache
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.template import base, create
from agentenv.template.records import Template
from agentenv.template.store import Templates
from support.archives import Layout, file, tarball
from support.sandbox_parts import rootfs_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root filesystems are built as root")

SMALL = 64  # MiB


class Node:
    """Settings, records and the last progress of a node that has no sandboxes."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings(home=home, disk_mib=256)
        self.database = Database(self.settings.database)
        self.ledger = Ledger(self.database)
        self.templates = Templates(self.database, self.settings)
        self.told: list[str] = []

    async def create(self, name: str, source: object, **options: object) -> Template:
        values = {"disk_mib": SMALL, "progress": self.told.append, **options}
        return await create.create(
            self.settings,
            self.database,
            self.ledger,
            name,
            str(source),
            **values,  # type: ignore[arg-type]
        )

    def files(self) -> list[str]:
        """Root filesystems, of templates' own and in the cache, and what is under construction."""
        images = self.settings.images_dir
        names = (str(path.relative_to(images)) for path in images.rglob("*") if path.is_file())
        return sorted(name for name in names if name.endswith(".ext4") or name.startswith("."))

    def name(self, template: Template) -> str:
        return str(rootfs_of(template).relative_to(self.settings.images_dir))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "home")


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    path = tmp_path / "rootfs.tar"
    path.write_bytes(tarball(file("etc/passwd", b"user:x:1000:1000::/home/user:/bin/sh\n"), file("bin/sh")))
    return path


async def test_created_and_recorded(node: Node, rootfs: Path) -> None:
    made = await node.create("mine", rootfs, vcpus=2, memory_mib=256)
    assert node.templates.get("mine") == made
    assert rootfs_of(made).parent.parent == node.settings.cache_dir
    assert rootfs_of(made).stat().st_size == SMALL << 20
    assert rootfs_of(made).stat().st_mode & 0o777 == 0o444
    assert (made.vcpus, made.memory_mib, made.disk_mib) == (2, 256, SMALL)
    assert (made.default_user, made.default_workdir) == ("user", "/home/user")
    assert node.files() == [node.name(made)]
    assert node.ledger.entries() == []


async def test_the_nodes_defaults_are_taken(node: Node, rootfs: Path) -> None:
    made = await node.create("mine", rootfs, disk_mib=None)
    assert (made.vcpus, made.memory_mib) == (node.settings.vcpus, node.settings.memory_mib)
    assert made.disk_mib >= node.settings.disk_mib


async def test_what_an_image_says_is_kept(node: Node, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    config = {"Env": ["A=b"], "Cmd": ["serve"], "Entrypoint": ["/init"], "WorkingDir": "/srv"}
    layout.image([tarball(file("bin/sh"))], config=config, tag="v1")
    made = await node.create("mine", f"{layout.directory}:v1")
    assert (made.env, made.cmd, made.entrypoint) == ({"A": "b"}, ("serve",), ("/init",))
    assert (made.default_user, made.default_workdir) == ("root", "/srv")


async def test_the_same_again_does_nothing(node: Node, rootfs: Path) -> None:
    first = await node.create("mine", rootfs)
    node.told.clear()
    assert await node.create("mine", rootfs) == first
    assert node.told == [f"{rootfs} is here already", "mine is up to date"]


async def test_templates_of_the_same_content_share_a_filesystem(
    node: Node, rootfs: Path, tmp_path: Path
) -> None:
    first = await node.create("mine", rootfs)
    copy = tmp_path / "copy.tar"
    copy.write_bytes(rootfs.read_bytes())
    second = await node.create("yours", copy)
    assert (second.rootfs, second.id != first.id) == (first.rootfs, True)
    node.templates.delete("mine")
    node.templates.sweep(9e9)
    assert rootfs_of(first).exists()
    renamed = await node.create("yours", rootfs)
    assert (renamed.build_id, renamed.source) == (second.build_id, str(rootfs))


async def test_other_numbers_over_the_same_filesystem(node: Node, rootfs: Path) -> None:
    first = await node.create("mine", rootfs)
    second = await node.create("mine", rootfs, vcpus=4)
    assert (second.vcpus, second.rootfs, second.id) == (4, first.rootfs, first.id)
    assert second.build_id != first.build_id
    assert node.templates.sweep(9e9) == ()
    assert rootfs_of(first).exists()


@pytest.mark.parametrize("change", ["source", "disk", "force", "lost"])
async def test_a_change_makes_another_build_under_the_same_id(node: Node, rootfs: Path, change: str) -> None:
    first = await node.create("mine", rootfs)
    options: dict[str, object] = {}
    if change == "source":
        rootfs.write_bytes(tarball(file("other")))
    elif change == "disk":
        options["disk_mib"] = SMALL * 2
    elif change == "force":
        options["force"] = True
    else:
        rootfs_of(first).unlink()
    second = await node.create("mine", rootfs, **options)
    assert second.id == first.id
    assert second.build_id != first.build_id
    assert (second.rootfs == first.rootfs) == (change == "force")
    node.templates.sweep(9e9)
    remaining = {node.name(first), node.name(second)} if change != "lost" else {node.name(second)}
    assert node.files() == sorted(remaining), "what is cached stays"


async def test_a_failure_leaves_what_was_there(node: Node, rootfs: Path) -> None:
    first = await node.create("mine", rootfs)
    rootfs.write_bytes(rootfs.read_bytes()[:700])
    with pytest.raises(StoreCorrupt):
        await node.create("mine", rootfs)
    assert node.templates.get("mine") == first
    assert node.files() == [node.name(first)]
    assert node.ledger.entries() == []


BAD: list[tuple[str, str, dict[str, object], type[AenvError]]] = [
    ("Bad Name", "{rootfs}", {}, InvalidRequest),
    ("mine", "{rootfs}", {"vcpus": 65}, InvalidRequest),
    ("mine", "{rootfs}", {"vcpus": -1}, InvalidRequest),
    ("mine", "{rootfs}", {"memory_mib": 5}, InvalidRequest),
    ("mine", "{rootfs}", {"disk_mib": 5}, InvalidRequest),
    ("mine", "/nowhere", {}, NotFound),
    ("mine", "debootstrap:buzz", {}, InvalidRequest),
]


@pytest.mark.parametrize(("name", "source", "options", "error"), BAD)
async def test_bad_requests(
    node: Node, rootfs: Path, name: str, source: str, options: dict[str, object], error: type[AenvError]
) -> None:
    with pytest.raises(error):
        await node.create(name, source.format(rootfs=rootfs), **options)
    assert node.files() == []
    assert node.ledger.entries() == []


async def test_a_cancelled_build_leaves_nothing(node: Node, tmp_path: Path) -> None:
    big = tmp_path / "big.tar"
    big.write_bytes(tarball(*(file(f"f{n}", os.urandom(4096)) for n in range(5000))))
    begun = asyncio.Event()

    def progress(text: str) -> None:
        if text.startswith("unpacking"):
            begun.set()

    task = asyncio.create_task(node.create("mine", big, progress=progress))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert node.files() == []
    assert node.ledger.entries() == []
    assert node.templates.list() == []


BUILDER = """
import asyncio, os, sys
from pathlib import Path
from agentenv.config import Settings
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.template.create import create

def progress(text):
    if text.startswith(sys.argv[3]):
        print("there", flush=True)
        os.read(0, 1)  # until killed, or told to go on

settings = Settings(home=Path(sys.argv[1]))
database = Database(settings.database)
asyncio.run(create(settings, database, Ledger(database), "mine", sys.argv[2], disk_mib=64, progress=progress))
"""


@pytest.mark.parametrize("step", ["unpacking", "writing"])
def test_what_a_killed_builder_left_is_reaped_and_a_running_ones_is_not(
    node: Node, rootfs: Path, step: str
) -> None:
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(node.settings.home), str(rootfs), step],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"there\n"
        assert create.reap(node.ledger, node.database) == [], "its builder lives"
        (entry,) = node.ledger.entries(kind=cache.KIND)
        worker = os.pidfd_open(entry.detail["worker"])
        builder.send_signal(signal.SIGKILL)
        builder.wait()
    try:
        assert select.select([worker], [], [], 30)[0], "its worker ends by itself"
    finally:
        os.close(worker)
    create.reap(node.ledger, node.database)
    assert [name for name in node.files() if name.startswith(".")] == []
    assert node.ledger.entries() == []
    assert node.templates.list() == []


async def test_reaping_spares_what_was_registered(node: Node, rootfs: Path) -> None:
    """The builder died between recording the template and striking its entry."""
    made = await node.create("mine", rootfs)
    scratch = str(node.settings.images_dir / ".gone")
    tree = f"{scratch}/tree"
    node.ledger.record(
        made.build_id, create.KIND, scratch, tree=tree, rootfs=str(made.rootfs), pid=1, started=-1
    )
    assert create.reap(node.ledger, node.database) == [made.build_id]
    assert rootfs_of(made).exists()


def test_recipes_of_packages_tell_suite_definition_and_disk_apart() -> None:
    recipes = {
        create.recipe_of("debootstrap:bookworm", 2048, base.SYSTEM),
        create.recipe_of("debootstrap:trixie", 2048, base.SYSTEM),
        create.recipe_of("debootstrap:bookworm", 4096, base.SYSTEM),
    }
    assert len(recipes) == 3
    assert create.recipe_of("debootstrap:bookworm", 2048, base.SYSTEM) in recipes
