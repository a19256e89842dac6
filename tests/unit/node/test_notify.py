"""What systemd is told."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import pytest

from agentenv.notify import notify


@pytest.mark.parametrize("abstract", [False, True])
def test_states_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    address = f"@agentenv-{secrets.token_hex(8)}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address.replace("@", "\0", 1))
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1", "STATUS=serving http://127.0.0.1:8000")
        assert systemd.recv(4096) == b"READY=1\nSTATUS=serving http://127.0.0.1:8000"


def test_a_node_goes_on_where_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")
