"""A stand-in host with an internet of servers, and a node's slots on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentenv.network import namespace
from agentenv.network.slots import Slots
from support.nethost import NetHost, NetNode, net_host


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NetHost]:
    with net_host(tmp_path) as made:
        monkeypatch.setattr(namespace, "NAMESPACES", made.namespaces)
        yield made


@pytest.fixture
def net(host: NetHost) -> NetNode:
    """What a node on that host is made of; override it for other settings."""
    return NetNode(host)


@pytest.fixture
async def slots(net: NetNode) -> AsyncIterator[Slots]:
    made = net.slots()
    await made.start()
    yield made
    await made.reap(set())
    await made.stop()
