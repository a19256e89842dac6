"""A watcher against requests that come faster than the agent's loop looks at it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from support.core_agent import core_agent


def _call(url: str, method: str, message: dict[str, object]) -> dict[str, object]:
    answer = httpx.post(f"{url}/filesystem.Filesystem/{method}", json=message)
    assert answer.status_code == 200, answer.text
    told: dict[str, object] = answer.json()
    return told


def _request(target: str, content_type: str, body: bytes) -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: agent\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("made", ["sub", "sub/deeper"])
def test_a_write_right_after_its_directory_was_made(tmp_path: Path, made: str) -> None:
    with core_agent() as url:
        watcher = _call(url, "CreateWatcher", {"path": str(tmp_path), "recursive": True})
        make = json.dumps({"path": str(tmp_path / made)}).encode()
        write = f"/files?path={quote(str(tmp_path / made / 'f'))}"
        # In one go: the agent turns to the second request without a look at its other descriptors.
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20) as wire:
            wire.sendall(
                _request("/filesystem.Filesystem/MakeDir", "application/json", make)
                + _request(write, "application/octet-stream", b"content")
            )
            said = b""
            while said.count(b"HTTP/1.1 200 OK") < 2:
                more = wire.recv(65536)
                assert more, said
                said += more
        told = _call(url, "GetWatcherEvents", watcher)
    events = told["events"]
    assert isinstance(events, list)
    kinds = [(event["name"], event["type"].removeprefix("EVENT_TYPE_")) for event in events]
    assert ("sub", "CREATE") in kinds
    assert [kind for name, kind in kinds if name == f"{made}/f"] == ["CREATE", "CHMOD", "WRITE"]
