"""The agent relies on nothing of the image: templates of a busybox, and of one static program, work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]


def busybox() -> str:
    found = shutil.which("busybox")
    assert found is not None
    return found


def busybox_tree(tree: Path) -> None:
    """A small distribution without glibc: a static busybox with its links, and a passwd."""
    for name in ("bin", "etc", "home/dev", "tmp"):
        (tree / name).mkdir(parents=True)
    shutil.copy(busybox(), tree / "bin/busybox")
    for applet in ("sh", "cat", "ls", "echo", "id", "pwd", "sleep", "hostname"):
        (tree / "bin" / applet).symlink_to("busybox")
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\ndev:x:1200:1200::/home/dev:/bin/sh\n")
    (tree / "etc/group").write_text("root:x:0:\ndev:x:1200:\nextra:x:1300:dev\n")


def single_program_tree(tree: Path) -> None:
    """One static program and nothing else, as in an image `FROM scratch`."""
    tree.mkdir()
    shutil.copy(busybox(), tree / "busybox")


@pytest.fixture(scope="module")
def image_node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("images")


@pytest.fixture
def started(image_node: RunningNode, tmp_path: Path) -> Iterator[Callable[..., Sandbox]]:
    """Makes a template of a tree with the command line, and a sandbox of it."""
    made: list[Sandbox] = []

    def start(name: str, fill: Callable[[Path], None]) -> Sandbox:
        tree = tmp_path / name
        fill(tree)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "agentenv",
                "template",
                "create",
                name,
                "--from",
                str(tree),
                "--disk",
                "64",
            ],
            env=image_node.environment,
            check=True,
            capture_output=True,
        )
        made.append(image_node.sandbox(name))
        return made[-1]

    yield start
    for sandbox in made:
        sandbox.kill()


def test_a_busybox_image(started: Callable[..., Sandbox]) -> None:
    sandbox = started("small", busybox_tree)
    assert sandbox.commands.run("id -u; pwd; echo $0").stdout.splitlines()[:1] == ["0"]
    assert sandbox.commands.run("id; cd; pwd", user="dev").stdout == (
        "uid=1200(dev) gid=1200(dev) groups=1200(dev),1300(extra)\n/home/dev\n"
    )
    # A number that passwd does not know is a user as well, as in Docker.
    assert sandbox.commands.run("id -u; id -g; cd; pwd", user="4321").stdout == "4321\n0\n/\n"
    sandbox.files.write("/home/dev/file", "text", user="dev")
    assert sandbox.files.get_info("/home/dev/file").owner == "dev"


def test_a_template_with_more_room(started: Callable[..., Sandbox], image_node: RunningNode) -> None:
    before = room(started("cramped", busybox_tree))
    image_node.build("roomy", {"fromTemplate": "cramped"}, minFreeDiskMb=300)
    sandbox = image_node.sandbox("roomy")
    try:
        assert before < 64
        assert room(sandbox) >= 280  # the filesystem takes some of it
    finally:
        sandbox.kill()


def room(sandbox: Sandbox) -> int:
    """MiB that are free on a sandbox's disk."""
    return int(sandbox.commands.run("set -- $(/.agentenv/bin/busybox df -m / | cat); echo ${11}").stdout)


def test_an_image_of_one_program(started: Callable[..., Sandbox]) -> None:
    sandbox = started("scratch", single_program_tree)
    assert sandbox.commands.run("/busybox echo only").stdout == "only\n"
    sandbox.files.write("/data/a.txt", "kept")
    assert sandbox.files.read("/data/a.txt") == "kept"
    assert sorted(entry.name for entry in sandbox.files.list("/data")) == ["a.txt"]
