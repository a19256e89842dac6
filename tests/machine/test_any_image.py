"""The agent relies on nothing of the image: small ones, one without a shell, one static program work."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from support.archives import Layout, directory, file, symlink, tarball
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]


def busybox() -> str:
    found = shutil.which("busybox")
    assert found is not None
    return found


def busybox_tree(tree: Path) -> None:
    """A small distribution without glibc or bash, as Alpine: a busybox with its links, a passwd, profiles."""
    for name in ("bin", "etc/profile.d", "home/dev", "tmp"):
        (tree / name).mkdir(parents=True)
    shutil.copy(busybox(), tree / "bin/busybox")
    for applet in ("sh", "ash", "cat", "ls", "echo", "id", "pwd", "sleep", "hostname"):
        (tree / "bin" / applet).symlink_to("busybox")
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/ash\ndev:x:1200:1200::/home/dev:/bin/ash\n")
    (tree / "etc/group").write_text("root:x:0:\ndev:x:1200:\nextra:x:1300:dev\n")
    (tree / "etc/profile").write_text("for file in /etc/profile.d/*.sh; do . $file; done\n")
    (tree / "etc/profile.d/hello.sh").write_text("export HELLO=profile\n")


def fedora_tree(tree: Path) -> None:
    """A distribution with glibc and bash whose directories are merged as Fedora's, without a resolv.conf."""
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc/pki/tls/certs", "etc/skel", "root", "run", "var"):
        (tree / name).mkdir(parents=True)
    links = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin", "usr/sbin": "bin"}
    for name, target in {**links, "var/run": "../run", "etc/os-release": "../usr/lib/os-release"}.items():
        (tree / name).symlink_to(target)
    (tree / "usr/lib/os-release").write_text("ID=fedora\n")
    for name in ("bash", "cat", "id", "readlink", "stat"):
        with_libraries(tree, name)
    (tree / "usr/bin/sh").symlink_to("bash")
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (tree / "etc/pki/tls/certs/ca-bundle.crt").write_text("# none\n")


def with_libraries(tree: Path, name: str) -> None:
    """Add a program of the host's with what it is linked to."""
    program = shutil.which(name)
    assert program is not None
    shutil.copy(program, tree / "usr/bin")
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"(/\S+) \(0x", linked):
        shutil.copy(library, tree / "usr/lib64")
    folder = tree / "usr/lib/x86_64-linux-gnu"  # where a loader of Debian's looks
    if not folder.is_symlink():
        folder.parent.mkdir(exist_ok=True)
        folder.symlink_to("../lib64")


def shell_less_image(layout: Path) -> None:
    """Libraries, accounts and one program, as in a distroless image; with a configuration."""
    tree = layout.with_suffix(".tree")
    for name in ("usr/bin", "usr/lib64"):
        (tree / name).mkdir(parents=True)
    with_libraries(tree, "cat")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(tree, ".")
    Layout(layout).image(
        [
            packed.getvalue(),
            tarball(
                symlink("lib64", "usr/lib64"),
                file(
                    "etc/passwd",
                    b"root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:\n",
                ),
                directory("home/nonroot", uid=65532, gid=65532, mode=0o700),
                file("etc/os-release", b"ID=distroless\n"),
            ),
        ],
        config={
            "User": "nonroot",
            "WorkingDir": "/home/nonroot",
            "Entrypoint": ["/usr/bin/cat"],
            "Env": ["A=1"],
        },
    )


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
    assert sandbox.commands.run("echo $HELLO").stdout == "profile\n"


def test_an_image_with_merged_directories(started: Callable[..., Sandbox]) -> None:
    sandbox = started("merged", fedora_tree)
    run = sandbox.commands.run
    assert run("echo ${BASH_VERSION:+bash}; cat /etc/os-release; id -u").stdout == "bash\nID=fedora\n0\n"
    assert "nameserver" in run("cat /etc/resolv.conf").stdout
    assert sandbox.sandbox_id in run("cat /etc/hosts").stdout
    assert run("stat -c %a /tmp; readlink /bin /sbin /usr/sbin /lib64 /var/run").stdout.split() == [
        "1777",
        *("usr/bin", "usr/sbin", "bin", "usr/lib64", "../run"),
    ]


def test_an_image_without_a_shell(started: Callable[..., Sandbox]) -> None:
    sandbox = started("shell-less", shell_less_image)
    said = sandbox.commands.run("/usr/bin/cat /etc/os-release; pwd; echo $A; echo ~").stdout
    assert said == "ID=distroless\n/home/nonroot\n1\n/home/nonroot\n"
    sandbox.files.write("note", "kept")
    info = sandbox.files.get_info("/home/nonroot/note")
    assert (info.owner, info.group) == ("nonroot", "65532")


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
