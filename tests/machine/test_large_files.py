"""Large bodies pass through the node without staying in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

SIZE = 1 << (30 if os.environ.get("AENV_TEST_SOAK") else 28)
PIECE = bytes(range(256)) * 4096  # 1 MiB
ALLOWED = 64 << 20


def peak(node: RunningNode) -> int:
    """Most memory that the node's process has had, in bytes."""
    status = Path(f"/proc/{node.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def pieces(digest: hashlib._Hash) -> Iterator[bytes]:
    for number in range(SIZE // len(PIECE)):
        piece = number.to_bytes(8, "big") + PIECE[8:]
        digest.update(piece)
        yield piece


@pytest.mark.timeout(600)
def test_a_large_file_goes_up_and_down(sandbox: Sandbox, node: RunningNode) -> None:
    # What was the peak before does not count: the kernel is told to begin anew.
    Path(f"/proc/{node.pid}/clear_refs").write_text("5")
    before = peak(node)
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": str(sandbox._envd_access_token),
    }
    sent, received = hashlib.sha256(), hashlib.sha256()
    with httpx.Client(base_url=node.url, headers=headers, timeout=300, trust_env=False) as client:
        # on the root disk, in a directory of its own, so that it can be removed whatever happens
        answer = client.post(
            "/files",
            params={"path": "/home/user/large/file"},
            content=pieces(sent),
            headers={"Content-Type": "application/octet-stream"},
        )
        assert answer.status_code == 200, answer.text
        try:
            assert sandbox.files.get_info("/home/user/large/file").size == SIZE
            with client.stream("GET", "/files", params={"path": "/home/user/large/file"}) as download:
                assert download.status_code == 200
                for part in download.iter_raw():
                    received.update(part)
        finally:
            sandbox.files.remove("/home/user/large")
    assert received.digest() == sent.digest()
    assert peak(node) - before < ALLOWED
