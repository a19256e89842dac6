"""Images beside a sandbox's root disk: seen where they are wanted, kept through all of its life."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from support.archives import directory, file, symlink, tarball
from support.running import RunningNode
from support.wholeness import require_whole

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("drives", disk_mib="256", build_from_paths="true")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of some files, as a source."""
    path = tmp_path_factory.mktemp("image") / "data.tar"
    path.write_bytes(
        tarball(
            directory("set"),
            file("set/one", b"first\n"),
            directory("set/deep"),
            file("set/deep/two", b"second\n", mode=0o4755, uid=1234),
            symlink("out", "/etc"),
            directory("work", mode=0o777),
        )
    )
    return f"rootfs:{path}"


@pytest.fixture
def client(node: RunningNode, host_audit: None) -> Iterator[httpx.Client]:
    """Plain HTTP; afterwards no sandbox is left."""
    with node.client() as client:
        yield client
        for each in client.get("/v2/sandboxes").json():
            client.delete(f"/sandboxes/{each['sandboxID']}")
        for each in client.get("/snapshots").json():
            client.delete(f"/templates/{each['snapshotID']}")
    require_whole(node)


def created(node: RunningNode, client: httpx.Client, path: str = "/v2/sandboxes", **body: Any) -> Sandbox:
    answer = client.post(path, json={"timeout": 600, **body})
    assert answer.status_code == 201, answer.text
    return connected(node, answer.json()["sandboxID"])


def connected(node: RunningNode, sandbox_id: str) -> Sandbox:
    return Sandbox.connect(
        sandbox_id, timeout=600, api_url=node.url, sandbox_url=node.url, api_key=node.key, request_timeout=120
    )


def said(sandbox: Sandbox, command: str, user: str = "root") -> str:
    return str(sandbox.commands.run(command, user=user).stdout)


def test_drives(node: RunningNode, client: httpx.Client, image: str) -> None:
    drives = [
        {"id": "data", "image": image},
        {"driveID": "part", "source": {"image": image}, "mountPath": "/srv/part", "subPath": "set/deep"},
        {"id": "work", "image": image, "readOnly": False, "diskSizeMB": 512},
    ]
    sandbox = created(node, client, templateID="base", attachedDrives=drives)
    print(said(sandbox, "cat /proc/mounts; df -m; lsblk -o NAME,SERIAL,RO,SIZE; dmesg | tail -20"))
    print(client.get(f"/sandboxes/{sandbox.sandbox_id}").json())
    assert said(sandbox, "cat /mnt/data/set/one /srv/part/two") == "first\nsecond\n"
