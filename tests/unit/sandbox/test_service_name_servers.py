"""Name servers that a sandbox names: those that the node denies are refused before anything is done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.errors import InvalidRequest
from agentenv.network.policy import parse
from agentenv.sandbox.listing import Query
from agentenv.sandbox.records import Network
from support.sandbox_parts import MemoryNode, prepared, wanted


def asking(*servers: str) -> Network:
    given = {"dnsServers": list(servers)}
    return Network(given=given, policy=parse(given, None))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[MemoryNode]:
    async with prepared(tmp_path) as node:
        yield node


async def test_a_denied_server_refuses_the_create(node: MemoryNode) -> None:
    with pytest.raises(InvalidRequest, match=r"dnsServers: 10\.1\.2\.3"):
        await node.service.create(wanted(network=asking("192.0.2.53", "10.1.2.3")))
    assert node.service.list(Query()).sandboxes == []
    assert node.slots.taken == {}


async def test_a_denied_server_refuses_a_change_and_leaves_what_was(node: MemoryNode) -> None:
    sandbox = (await node.service.create(wanted(network=asking("192.0.2.53")))).sandbox
    with pytest.raises(InvalidRequest, match="dnsServers"):
        await node.service.set_network(sandbox.id, asking("10.1.2.3"))
    assert node.service.get(sandbox.id).network == asking("192.0.2.53")
    (applied,) = node.slots.policies.values()
    assert applied == asking("192.0.2.53").policy
