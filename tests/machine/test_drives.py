"""Images beside a sandbox's root disk, seen where they are wanted and kept through all of its life; sandboxes
straight from an image, and of another size than their template's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxException

from support.archives import Item, directory, file, symlink, tarball
from support.running import RunningNode
from support.wholeness import require_whole

pytestmark = pytest.mark.machine

BUSYBOX = "/.agentenv/bin/busybox"


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("drives", disk_mib="256", memory_mib="256", build_from_paths="true")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of some files, as a source."""
    return source(
        tmp_path_factory.mktemp("image") / "data.tar",
        directory("set"),
        file("set/one", b"first\n"),
        directory("set/deep"),
        file("set/deep/two", b"second\n", mode=0o4755, uid=1234),
        symlink("out", "/etc"),
        directory("work", mode=0o777),
    )


def source(path: Path, *items: Item) -> str:
    path.write_bytes(tarball(*items))
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


def create(client: httpx.Client, path: str = "/v2/sandboxes", **body: Any) -> httpx.Response:
    return client.post(path, json={"timeout": 600, **body})


def connected(node: RunningNode, answer: httpx.Response) -> Sandbox:
    assert answer.status_code == 201, answer.text
    sandbox: Sandbox = Sandbox.connect(
        answer.json()["sandboxID"],
        timeout=600,
        api_url=node.url,
        sandbox_url=node.url,
        api_key=node.key,
        request_timeout=120,
    )
    return sandbox


def said(sandbox: Sandbox, command: str, user: str = "root") -> str:
    return str(sandbox.commands.run(command, user=user).stdout)


def test_drives_are_seen_and_kept(node: RunningNode, client: httpx.Client, image: str) -> None:
    drives = [
        {"id": "data", "image": image},
        {"driveID": "part", "source": {"image": image}, "mountPath": "/srv/part", "subPath": "set/deep"},
        {"id": "work", "image": image, "readOnly": False, "diskSizeMB": 1024},
    ]
    sandbox = connected(node, create(client, templateID="base", attachedDrives=drives))
    shown = client.get(f"/sandboxes/{sandbox.sandbox_id}").json()["attachedDrives"]
    assert [(each["id"], each["mountPath"], each["readOnly"], each["diskSizeMB"]) for each in shown] == [
        ("data", "/mnt/data", True, 512),
        ("part", "/srv/part", True, 512),
        ("work", "/mnt/work", False, 1024),
    ]
    check_what_is_seen(sandbox)
    check_what_is_only_read(sandbox)
    said(sandbox, "echo kept > /mnt/work/work/file", user="user")
    sandbox.commands.run("while sleep 0.1; do date >> /mnt/work/work/log; done", background=True, timeout=0)
    said(sandbox, "until [ -s /mnt/work/work/log ]; do sleep 0.05; done")
    check_pauses(sandbox)
    check_checkpoints(node, client, sandbox, image)
    check_children(sandbox)
    check_adoption(node, sandbox)


def check_what_is_seen(sandbox: Sandbox) -> None:
    assert said(sandbox, "cat /mnt/data/set/one /srv/part/two; ls /srv/part") == "first\nsecond\ntwo\n"
    assert said(sandbox, "stat -c '%u %a' /srv/part/two") == "1234 4755\n"
    options = {
        place: set(how.split(","))
        for place, how in map(
            str.split, said(sandbox, "grep ' ext4 ' /proc/mounts | cut -d' ' -f2,4").splitlines()
        )
    }
    assert set(options) == {
        "/",
        "/.agentenv",
        "/mnt/data",
        "/srv/part",
        "/mnt/work",
    }  # no whole one elsewhere
    assert {"ro", "nosuid", "nodev"} <= options["/mnt/data"] & options["/srv/part"]
    assert {"rw", "nosuid", "nodev"} <= options["/mnt/work"]
    assert int(said(sandbox, "df -m --output=size /mnt/work | tail -1")) > 800


def check_what_is_only_read(sandbox: Sandbox) -> None:
    """Not even root can write to what is shared, by the filesystem or the device."""
    for command in (
        "touch /mnt/data/set/new",
        "mount -o remount,rw /mnt/data",
        "dd if=/dev/zero of=$(findmnt -no SOURCE /mnt/data) bs=4096 count=1 oflag=direct",
    ):
        with pytest.raises(SandboxException):
            said(sandbox, command)


def check_pauses(sandbox: Sandbox) -> None:
    sandbox.pause()
    sandbox.connect()
    log = said(sandbox, "cat /mnt/work/work/file; wc -l < /mnt/work/work/log").split()
    assert log[0] == "kept"
    said(sandbox, f"until [ $(wc -l < /mnt/work/work/log) -gt {log[1]} ]; do sleep 0.05; done")


def check_checkpoints(node: RunningNode, client: httpx.Client, sandbox: Sandbox, image: str) -> None:
    taken = client.post(f"/sandboxes/{sandbox.sandbox_id}/snapshots", json={}).json()["snapshotID"]
    said(sandbox, "rm /mnt/work/work/file; echo later > /mnt/work/later; sync")
    back = client.post(f"/sandboxes/{sandbox.sandbox_id}/rollback", json={"snapshotID": taken})
    assert back.status_code == 200, back.text
    assert said(sandbox, "cat /mnt/work/work/file; ls -d /mnt/work/l*") == "kept\n/mnt/work/lost+found\n"
    more = [{"id": "more", "image": image, "subPath": "work"}]
    other = connected(node, create(client, templateID=taken, attachedDrives=more))
    assert said(other, "cat /mnt/work/work/file /mnt/data/set/one; ls /mnt").split() == [
        "kept", "first", "data", "more", "work",
    ]  # fmt: skip
    assert said(other, "echo mine > /mnt/work/mine; ls -A /mnt/more") == ""
    other.kill()
    start = client.post(f"/sandboxes/{sandbox.sandbox_id}/rollback", json={})
    assert start.status_code == 200, start.text
    assert said(sandbox, "ls /mnt/work/work; cat /mnt/data/set/one") == "first\n"


def check_children(sandbox: Sandbox) -> None:
    said(sandbox, "echo shared > /mnt/work/shared")
    (child,) = sandbox.fork(count=1, timeout=600)
    assert isinstance(child, Sandbox), child
    said(sandbox, "echo parent > /mnt/work/own")
    said(child, "echo child > /mnt/work/own; sync")
    assert said(child, "cat /mnt/work/shared /mnt/work/own /mnt/data/set/one") == "shared\nchild\nfirst\n"
    assert said(sandbox, "cat /mnt/work/own") == "parent\n"
    child.kill()


def check_adoption(node: RunningNode, sandbox: Sandbox) -> None:
    """The next life of the node knows what the machine writes to."""
    node.kill()
    node.start()
    said(sandbox, "echo adopted >> /mnt/work/own; sync")
    sandbox.pause()
    sandbox.connect()
    assert said(sandbox, "cat /mnt/work/own") == "parent\nadopted\n"


def test_the_disks_alone_are_kept_whole(node: RunningNode, client: httpx.Client, image: str) -> None:
    drives = [{"id": "work", "image": image, "readOnly": False}, {"id": "data", "image": image}]
    sandbox = connected(node, create(client, templateID="base", attachedDrives=drives))
    said(sandbox, "echo kept | tee /root/file > /mnt/work/file")
    assert client.post(f"/sandboxes/{sandbox.sandbox_id}/pause", json={"memory": False}).status_code == 204
    answer = client.post(f"/v2/sandboxes/{sandbox.sandbox_id}/connect", json={"timeout": 600})
    assert answer.status_code == 201, answer.text
    assert said(sandbox, "cat /root/file /mnt/work/file /mnt/data/set/one") == "kept\nkept\nfirst\n"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"subPath": "set/none"}, "no directory 'set/none'"),
        ({"subPath": "out"}, "no directory 'out'"),
        ({"mountPath": "/etc/passwd"}, "Not a directory|exists"),
    ],
)
def test_a_drive_that_cannot_be_mounted(
    client: httpx.Client, image: str, given: dict[str, str], word: str
) -> None:
    answer = create(client, templateID="base", attachedDrives=[{"id": "data", "image": image, **given}])
    assert answer.status_code == 400, answer.text
    assert "drive 'data'" in answer.json()["message"]
    assert any(each in answer.json()["message"] for each in word.split("|")), answer.text
    assert client.get("/v2/sandboxes").json() == []


def test_a_sandbox_of_an_image(node: RunningNode, client: httpx.Client, tmp_path: Path, image: str) -> None:
    """Booted once for two who ask at once, and restored for the next; nothing in it is relied on."""
    small = source(tmp_path / "small.tar", directory("etc"), file("etc/motd", b"hello\n"))
    body: dict[str, Any] = {
        "image": small,
        "cpuCount": 1,
        "memoryMB": 192,
        "diskSizeMB": 1024,
        "envVars": {"A": "b"},
    }
    answers: list[httpx.Response] = []

    def ask() -> None:
        drives = [{"id": "data", "image": image}]
        answers.append(create(client, "/sandboxes-cold", **body, attachedDrives=drives))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.append(create(client, "/sandboxes-cold", **body))
    assert [answer.status_code for answer in answers] == [201] * 3, answers[0].text
    assert "prepare" not in answers[2].headers["Server-Timing"]
    assert "restore" in answers[2].headers["Server-Timing"]
    for answer in answers:
        shown = client.get(f"/sandboxes/{answer.json()['sandboxID']}").json()
        assert (shown["alias"], shown["memoryMB"], shown["diskSizeMB"]) == (small, 192, 1024)
    sandbox = connected(node, answers[0])
    assert said(sandbox, f"{BUSYBOX} cat /etc/motd /mnt/data/set/one; echo $A") == "hello\nfirst\nb\n"
    assert int(said(sandbox, f"{BUSYBOX} df -m / | {BUSYBOX} awk 'NR==2 {{print $2}}'")) > 800


def test_another_size_than_the_templates(node: RunningNode, client: httpx.Client) -> None:
    body: dict[str, Any] = {"templateID": "base", "cpuCount": 2, "memoryMB": 384, "diskSizeMB": 4096}
    first, second = (create(client, **body) for _ in range(2))
    assert "prepare" not in second.headers["Server-Timing"]
    for answer in (first, second):
        sandbox = connected(node, answer)
        told = said(
            sandbox, "nproc; awk '/MemTotal/ {print $2}' /proc/meminfo; df -m --output=size / | tail -1"
        )
        processors, memory, disk = map(int, told.split())
        assert processors == 2
        assert 300 << 10 < memory < 384 << 10
        assert disk > 3500
    sandbox.pause()
    sandbox.connect()
    assert int(said(sandbox, "df -m --output=size / | tail -1")) == disk
