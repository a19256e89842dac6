"""A template exported with the command line and read by others: what its sandboxes find, nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from support.archives import Layout, directory, file, hardlink, symlink, tarball
from support.running import RunningNode
from support.trees import described

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

CONFIG = {"Env": ["COLOUR=blue"], "Cmd": ["/bin/app"], "Labels": {"org.example": "yes"}, "User": "12345"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of all kinds of files."""
    layout = Layout(tmp_path_factory.mktemp("image") / "layout")
    members = (
        directory("bin"),
        file("bin/app", b"\x7fELF" + bytes(100), mode=0o4755),
        hardlink("bin/again", "bin/app"),
        symlink("bin/sh", "app", uid=7),
        directory("srv"),
        file("srv/data", os.urandom(300_000), uid=12345, gid=3_000_000),
        file("srv/" + "n" * 150, b"long", mode=0o600),
        file("srv/holes", bytes(3 << 20) + b"x" + bytes(3 << 20)),
    )
    layout.image([tarball(*members)], config=CONFIG)
    return layout.directory


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode], image: Path) -> RunningNode:
    node = node_factory("export")
    aenv(node, "template", "create", "exported", "--from", str(image), "--disk", "64")
    return node


def aenv(node: RunningNode, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentenv", *arguments],
        env={**node.environment, **node.client_environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def unpacked(source: str, into: Path) -> Path:
    """What skopeo and umoci make of an image."""
    layout, bundle = into / "layout", into / "bundle"
    into.mkdir()
    command = ["skopeo", "copy", "--quiet", source, f"oci:{layout}:latest"]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["umoci", "unpack", "--image", f"{layout}:latest", str(bundle)], check=True)
    return bundle / "rootfs"


def test_what_is_exported_is_what_was_imported(node: RunningNode, image: Path, tmp_path: Path) -> None:
    archive = tmp_path / "exported.tar"
    aenv(node, "template", "export", "exported", "-o", str(archive))
    inspected = subprocess.run(
        ["skopeo", "inspect", "--config", f"oci-archive:{archive}"], check=True, capture_output=True
    )
    config = json.loads(inspected.stdout)["config"]
    assert {key: config[key] for key in CONFIG} == CONFIG
    found = described(unpacked(f"oci-archive:{archive}", tmp_path / "there"))
    wanted = described(unpacked(f"oci:{image}:latest", tmp_path / "here"))
    places = {"etc", "etc/resolv.conf", "proc", "sys", "dev", "run", "tmp"}  # that every guest has
    assert {name: entry for name, entry in found.items() if name not in places} == wanted
    assert set(found) <= places | set(wanted)


def test_a_client_that_goes_away_leaves_nothing(node: RunningNode) -> None:
    machines = node.home / "machines"
    with node.client() as client:
        gone = threading.Event()

        def ask() -> None:
            with pytest.raises(httpx.ReadTimeout):
                client.get("/templates/exported/export", timeout=0.3)
            gone.set()

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
    assert gone.is_set()
    deadline = time.monotonic() + 30
    while any(machines.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)  # the machine's end has no event for a test to await
    assert list(machines.iterdir()) == []
