"""`/files` over HTTP, with a served agent."""

from __future__ import annotations

import gzip
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentenv.guest import signature
from support.guest_agent import file_agent

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the agent hands files to users: it is root")

OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with file_agent() as url, httpx.Client(base_url=url, headers={"accept-encoding": ""}) as client:
        yield client


def _get(client: httpx.Client, path: object, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.get("/files", params={"path": str(path)}, headers=named)


def _put(client: httpx.Client, path: object, content: bytes, **query: str) -> httpx.Response:
    return client.post("/files", params={"path": str(path), **query}, content=content, headers=OCTETS)


def _error(response: httpx.Response) -> tuple[int, str]:
    body = response.json()
    assert body["code"] == response.status_code
    return response.status_code, body["message"]


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, 256 * 1024 + 1, 3_000_000])
def test_bytes_go_in_and_come_out(client: httpx.Client, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    stored = _put(client, tmp_path / "f", content)
    assert stored.json() == [{"path": str(tmp_path / "f"), "name": "f", "type": "file"}]
    answer = _get(client, tmp_path / "f")
    assert answer.content == content
    assert answer.headers["content-length"] == str(size)
    assert answer.headers["vary"] == "Accept-Encoding"
    assert answer.headers["content-disposition"] == "inline; filename=f"
    compressed = _get(client, tmp_path / "f", accept_encoding="gzip")
    assert compressed.headers["content-encoding"] == "gzip"
    assert compressed.content == content


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_ranges(client: httpx.Client, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "f").write_bytes(content)
    part = _get(client, tmp_path / "f", range="bytes=2-5", accept_encoding="gzip")
    assert (part.status_code, part.content) == (206, content[2:6])
    assert part.headers["content-range"] == f"bytes 2-5/{size}"
    assert "content-encoding" not in part.headers
    assert _get(client, tmp_path / "f", range="bytes=-4").content == content[-4:]
    beyond = _get(client, tmp_path / "f", range=f"bytes={size}-")
    assert _error(beyond)[0] == 416
    assert beyond.headers["content-range"] == f"bytes */{size}"


def test_conditions(client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    modified = _get(client, tmp_path / "f").headers["last-modified"]
    assert _get(client, tmp_path / "f", if_modified_since=modified).status_code == 304
    assert _get(client, tmp_path / "f", range="bytes=0-1", if_range=modified).status_code == 206
    whole = _get(client, tmp_path / "f", range="bytes=0-1", if_range='"tag"')
    assert (whole.status_code, whole.content) == (200, b"0123456789")


def test_plain_bytes_refused_for_a_range(client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    answer = _get(client, tmp_path / "f", range="bytes=0-1", accept_encoding="gzip, identity;q=0")
    assert _error(answer)[0] == 406


def test_head_sends_no_body(client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1_000_000)
    answer = client.head("/files", params={"path": str(tmp_path / "f")}, headers={"accept-encoding": "gzip"})
    assert answer.headers["content-length"] == "1000000"
    assert answer.content == b""


def test_files_whose_size_is_not_theirs(client: httpx.Client) -> None:
    assert _get(client, "/proc/self/cmdline").content.startswith(b"/")
    assert len(_get(client, "/sys/kernel/mm/transparent_hugepage/enabled").content) < 100
    big = _get(client, "/proc/kallsyms")
    assert big.headers["transfer-encoding"] == "chunked"
    assert big.content.count(b"\n") > 10_000


def test_what_is_no_file_to_read(client: httpx.Client, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert _error(_get(client, tmp_path)) == (400, f"path '{tmp_path}' is a directory")
    assert _error(_get(client, tmp_path / "no")) == (404, f"path '{tmp_path}/no' does not exist")
    assert _error(_get(client, tmp_path / "pipe"))[0] == 400
    assert _error(_get(client, "/dev/zero"))[0] == 400
    assert _error(_get(client, tmp_path / "loop"))[0] == 400
    for path in ("a\0b", "~other/x", "/" + "n" * 300, "/" + "n/" * 3000):
        assert _error(_get(client, path))[0] == 400


def test_names_that_are_not_utf8(client: httpx.Client, tmp_path: Path) -> None:
    target = f"/files?path={tmp_path}/%FF.txt"
    assert client.post(target, content=b"in", headers=OCTETS).json()[0]["name"] == "�.txt"
    assert client.get(target).content == b"in"
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff.txt"]


def test_parents_and_file_are_the_users(client: httpx.Client, tmp_path: Path) -> None:
    assert _put(client, tmp_path / "a/b/f", b"x", username="nobody").status_code == 200
    for name in ("a", "a/b", "a/b/f"):
        assert (tmp_path / name).owner() == "nobody"
    assert (tmp_path / "a/b/f").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755


def test_an_existing_file_keeps_its_inode_and_mode(client: httpx.Client, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"longer than what follows")
    path.chmod(0o755)
    before = path.stat()
    (tmp_path / "link").symlink_to("f")
    _put(client, tmp_path / "link", b"new", username="nobody")
    after = path.stat()
    assert (path.read_bytes(), path.owner(), after.st_ino) == (b"new", "nobody", before.st_ino)
    assert after.st_mode & 0o777 == 0o755
    assert (tmp_path / "link").is_symlink()


def test_paths_are_relative_to_the_home(client: httpx.Client) -> None:
    name = f".aenv-test-{os.getpid()}"
    try:
        assert _put(client, name, b"x").json()[0]["path"] == f"/root/{name}"
        assert _get(client, f"~/{name}").content == b"x"
    finally:
        Path("/root", name).unlink(missing_ok=True)


def test_what_is_no_place_to_write(client: httpx.Client, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    assert _error(_put(client, tmp_path, b"x")) == (400, f"path is a directory: {tmp_path}")
    assert _error(_put(client, tmp_path / "pipe", b"x"))[0] == 400
    assert _error(_put(client, tmp_path / "file/below", b"x"))[0] == 400
    assert _error(_put(client, "a\0b", b"x"))[0] == 400
    assert _error(_put(client, tmp_path / "f", b"x", username="nosuch")) == (
        401,
        "error looking up user 'nosuch': unknown user nosuch",
    )
    assert _error(client.post("/files", content=b"x", headers=OCTETS))[0] == 400
    unsupported = client.post("/files", content=b"x", headers={"content-type": "text/plain"})
    assert "unsupported content type: text/plain" in _error(unsupported)[1]
    assert (
        _error(client.post("/files", content=b"x", headers={"content-type": "multipart/form-data"}))[0] == 400
    )
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


def test_a_form_of_several_files(client: httpx.Client, tmp_path: Path) -> None:
    big = os.urandom(2_000_000)
    files = [("file", (str(tmp_path / "x y/a"), b"one")), ("file", (str(tmp_path / "b"), big))]
    other = [("note", ("ignored", b"ignored"))]
    answer = client.post("/files", files=other + files + other)
    assert [entry["path"] for entry in answer.json()] == [str(tmp_path / "x y/a"), str(tmp_path / "b")]
    assert (tmp_path / "x y/a").read_bytes() == b"one"
    assert (tmp_path / "b").read_bytes() == big
    assert client.post("/files", files=other).json() == []


def test_the_querys_path_wins_over_the_forms(client: httpx.Client, tmp_path: Path) -> None:
    query = {"path": str(tmp_path / "right")}
    client.post("/files", params=query, files=[("file", (str(tmp_path / "wrong"), b"x"))])
    body = b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\nnameless\r\n--B--\r\n'
    form = {"content-type": "multipart/form-data; boundary=B"}
    assert (tmp_path / "right").read_bytes() == b"x"
    assert client.post("/files", params=query, content=body, headers=form).status_code == 200
    assert (tmp_path / "right").read_bytes() == b"nameless"
    assert os.listdir(tmp_path) == ["right"]
    assert _error(client.post("/files", content=body, headers=form))[0] == 400


def test_two_parts_for_one_path(client: httpx.Client, tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    answer = client.post("/files", files=[("file", (path, b"1")), ("file", (path, b"2"))])
    assert "multiple files to the same path" in _error(answer)[1]
    assert (tmp_path / "f").read_bytes() == b"1"


def test_a_form_cut_short_leaves_no_file(client: httpx.Client, tmp_path: Path) -> None:
    head = f'--B\r\nContent-Disposition: form-data; name="file"; filename="{tmp_path}/f"\r\n\r\n'
    form = {"content-type": "multipart/form-data; boundary=B"}
    answer = client.post("/files", content=head.encode() + b"half", headers=form)
    assert _error(answer)[0] == 400
    assert os.listdir(tmp_path) == []


def test_compressed_bodies(client: httpx.Client, tmp_path: Path) -> None:
    content = b"text " * 500_000
    zipped = gzip.compress(content[:1000]) + gzip.compress(content[1000:])
    headers = {**OCTETS, "content-encoding": "gzip"}
    query = {"path": str(tmp_path / "f")}
    assert client.post("/files", params=query, content=zipped, headers=headers).status_code == 200
    assert (tmp_path / "f").read_bytes() == content
    for broken in (zipped[:-5], b"not gzip", b""):
        refused = client.post("/files", params={"path": str(tmp_path / "g")}, content=broken, headers=headers)
        assert "error decompressing request body" in _error(refused)[1]
    assert not (tmp_path / "g").exists()
    headers["content-encoding"] = "br"
    assert _error(client.post("/files", params=query, content=b"x", headers=headers))[0] == 400


def test_metadata(client: httpx.Client, tmp_path: Path) -> None:
    headers = {**OCTETS, "X-Metadata-Author": "me", "x-metadata-b": "2"}
    query = {"path": str(tmp_path / "f")}
    answer = client.post("/files", params=query, content=b"x", headers=headers)
    assert answer.json()[0]["metadata"] == {"author": "me", "b": "2"}
    assert os.getxattr(tmp_path / "f", "user.e2b.author") == b"me"
    assert "metadata" not in _put(client, tmp_path / "f", b"y").json()[0]
    headers = {**OCTETS, "x-metadata-k": "x" * 4096}
    refused = client.post("/files", params={"path": str(tmp_path / "g")}, content=b"x", headers=headers)
    assert _error(refused)[0] == 400
    assert not (tmp_path / "g").exists()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=8", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_no_room(client: httpx.Client, full_disk: Path) -> None:
    content = b"x" * 3_000_000
    status, message = _error(_put(client, full_disk / "f", content))
    assert status == 507
    assert message == "attempted to write 3000000 bytes: not enough disk space available"
    form = client.post("/files", files=[("file", (str(full_disk / "g"), content))])
    assert _error(form)[0] == 507
    assert os.listdir(full_disk) == []
    for number in range(7):
        (full_disk / str(number)).touch()
    assert _error(_put(client, full_disk / "h", b"")) == (507, "not enough inodes available")


def test_a_client_that_leaves_leaves_no_file(client: httpx.Client, tmp_path: Path) -> None:
    def half() -> Iterator[bytes]:
        yield b"x" * 100_000
        deadline = time.monotonic() + 30
        while not (tmp_path / "f").exists():
            assert time.monotonic() < deadline
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError), httpx.Client(base_url=client.base_url) as other:
        other.post("/files", params={"path": str(tmp_path / "f")}, content=half(), headers=OCTETS)
    deadline = time.monotonic() + 30
    while (tmp_path / "f").exists():
        assert time.monotonic() < deadline
        _get(client, tmp_path / "f")


def test_compose(client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"one")
    (tmp_path / "2").write_bytes(b"two" * 100_000)
    request = {
        "source_paths": [str(tmp_path / "1"), str(tmp_path / "2")],
        "destination": str(tmp_path / "d/all"),
        "username": "nobody",
    }
    answer = client.post("/files/compose", json=request)
    assert answer.json() == {"path": str(tmp_path / "d/all"), "name": "all", "type": "file"}
    assert (tmp_path / "d/all").read_bytes() == b"one" + b"two" * 100_000
    assert (tmp_path / "d/all").owner() == "nobody"
    assert os.listdir(tmp_path) == ["d"]
    assert os.listdir(tmp_path / "d") == ["all"]


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"source_paths": []}, 400),
        ({"source_paths": "1"}, 400),
        ({"destination": ""}, 400),
        ({"username": 3}, 400),
        ({"username": "nosuch"}, 401),
        ({"source_paths": ["/nonexistent"]}, 404),
        ({"source_paths": ["/tmp"]}, 400),
        ({"source_paths": ["/etc/passwd"], "destination": "/etc/passwd"}, 400),
        ({"destination": "/tmp\0"}, 400),
    ],
)
def test_compose_refusals(client: httpx.Client, changed: dict[str, object], status: int) -> None:
    request = {"source_paths": ["/etc/passwd"], "destination": "/nonexistent/x"} | changed
    assert _error(client.post("/files/compose", json=request))[0] == status
    assert _error(client.post("/files/compose", content=b"{"))[0] == 400


def test_who_may(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    path = str(tmp_path / "f")
    with file_agent(token="secret") as url, httpx.Client(base_url=url) as client:
        refused = client.get("/files", params={"path": path})
        assert _error(refused) == (401, "missing signature query parameter")
        assert (
            client.get("/files", params={"path": path}, headers={"x-access-token": "secret"}).content == b"x"
        )
        wrong = client.get("/files", params={"path": path}, headers={"x-access-token": "wrong"})
        assert _error(wrong)[0] == 401
        signed = {"path": path, "signature": signature.sign(path, "read", "", "secret")}
        assert client.get("/files", params=signed).content == b"x"
        assert _error(client.post("/files", params=signed, content=b"y", headers=OCTETS))[0] == 401
        late = {
            "path": path,
            "signature": signature.sign(path, "read", "", "secret", 1000),
            "signature_expiration": "1000",
        }
        assert _error(client.get("/files", params=late)) == (401, "signature is already expired")
        user = {
            "path": path,
            "username": "nobody",
            "signature": signature.sign(path, "write", "nobody", "secret"),
        }
        assert client.post("/files", params=user, content=b"y", headers=OCTETS).status_code == 200
        assert (tmp_path / "f").owner() == "nobody"


def test_metrics(client: httpx.Client) -> None:
    told = client.get("/metrics").json()
    assert told["mem_total"] > told["mem_used"] > 0
