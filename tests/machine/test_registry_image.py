"""From a registry to a sandbox: pulled, made a template of, started, with what the image says of itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.archives import Layout, directory, file, symlink, tarball, zstandard
from support.registry import PASSWORD, USER, Registry
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

CONFIG = {"Env": ["GREETING=hello", "PATH=/bin"], "User": "app", "WorkingDir": "/srv"}


def layers() -> list[bytes]:
    """A static busybox with its links, and a layer above that takes something away."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    applets = [symlink(f"bin/{name}", "busybox") for name in ("sh", "cat", "ls", "echo", "id", "pwd", "env")]
    passwd = b"root:x:0:0::/root:/bin/sh\napp:x:1500:1500::/srv:/bin/sh\n"
    lower = tarball(
        file("bin/busybox", Path(busybox).read_bytes(), mode=0o755),
        *applets,
        file("etc/passwd", passwd),
        file("etc/motd", b"gone\n"),
        directory("srv", uid=1500, gid=1500),
    )
    return [lower, tarball(file("etc/.wh.motd"), file("srv/data.txt", b"from above\n", uid=1500, gid=1500))]


@pytest.fixture
def image(tmp_path: Path) -> Iterator[str]:
    """An image in a registry that wants a password."""
    registry = Registry(tmp_path / "registry", users=True)
    layout = Layout(tmp_path / "layout")
    entry = layout.image(
        layers(), config=CONFIG, packed=zstandard, platform={"os": "linux", "architecture": "amd64"}
    )
    yield registry.push(layout, layout.index([entry]), "tools/box", "v1")
    registry.close()


def test_an_image_of_a_private_registry_becomes_a_sandbox(
    node_factory: Callable[..., RunningNode], image: str
) -> None:
    node = node_factory("registry", insecure_registries=f'["{image.partition("/")[0]}"]')
    command = [sys.executable, "-m", "agentenv", "template", "create", "box", "--from", image]
    credentials = ["--username", USER, "--password-stdin"]
    refused = subprocess.run(command, env=node.environment, capture_output=True, text=True)
    assert (refused.returncode, "without credentials" in refused.stderr) == (7, True), refused.stderr
    made = subprocess.run(
        [*command, *credentials], env=node.environment, input=PASSWORD, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    sandbox = node.sandbox("box")
    try:
        said = sandbox.commands.run("id -u; pwd; ls /etc; cat data.txt")
        assert said.stdout.split()[:2] == ["1500", "/srv"]
        assert "motd" not in said.stdout
        assert "from above" in said.stdout
    finally:
        sandbox.kill()
