"""Sandboxes that hold a mark in memory and on disk, and plain calls about them."""

from __future__ import annotations

from typing import Any

import httpx
from e2b import Sandbox

from support.running import RunningNode


def mark(sandbox: Sandbox) -> None:
    """Leave a mark in the guest's memory and on its disk."""
    sandbox.commands.run("echo mark | tee /dev/shm/mark > /home/user/mark")


def post(node: RunningNode, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    with node.client() as client:
        return client.post(path, json=body)


def shown(node: RunningNode, sandbox: Sandbox) -> dict[str, Any]:
    with node.client() as client:
        return dict(client.get(f"/sandboxes/{sandbox.sandbox_id}").json())


def marks(sandbox: Sandbox) -> list[str]:
    return list(sandbox.commands.run("cat /dev/shm/mark /home/user/mark").stdout.split())


def delete_checkpoints(node: RunningNode) -> None:
    """Delete every checkpoint that the node has."""
    with node.client() as client:
        for each in client.get("/snapshots").json():
            assert client.delete(f"/templates/{each['snapshotID']}").status_code == 204
