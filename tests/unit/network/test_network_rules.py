"""Rule sets as text, and what is told from the rules of others."""

from __future__ import annotations

import shutil
import subprocess
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest

from agentenv.errors import HostFault, HostIncapable, InvalidRequest
from agentenv.network import nft
from agentenv.network.denied import Denied, denied
from agentenv.network.host import blockers
from agentenv.network.node import NodeIdentity
from agentenv.network.opened import Opened

IDENTITY = NodeIdentity(3, IPv4Network("10.192.192.0/18"))


def chain(name: str, **more: Any) -> dict[str, Any]:
    return {"chain": {"family": "ip", "table": "filter", "name": name, **more}}


def rule(where: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"rule": {"family": "ip", "table": "filter", "chain": where, "expr": list(parts)}}


def base(name: str, hook: str, policy: str = "accept", **more: Any) -> dict[str, Any]:
    return chain(name, type="filter", hook=hook, prio=0, policy=policy, **more)


@pytest.mark.parametrize(
    "script",
    [
        nft.slot_rules("10.192.193.1", "10.192.192.1"),
        nft.slot_rules("10.192.193.1", "10.192.192.1", fresh=True),
        nft.node_rules(IDENTITY, denied(["10.0.0.0/8", "10.1.0.0/16", "fc00::/7"])),
        nft.node_rules(IDENTITY, Denied()),
        nft.node_rules(IDENTITY, denied(["10.0.0.0/8"]), [Opened(IPv4Address("10.1.2.3"), 3128)]),
        nft.delete_node_rules(IDENTITY),
    ],
    ids=["slot", "fresh slot", "node", "node without ranges", "node with opened", "deletion"],
)
@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft")
def test_nft_accepts_what_is_written(script: str) -> None:
    command = ["unshare", "--user", "--map-root-user", "--net", "nft", "--check", "-f", "-"]
    done = subprocess.run(command, input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_replacement_is_one_transaction() -> None:
    lines = nft.slot_rules("10.192.193.1", "10.192.192.1").splitlines()
    assert lines[:3] == ["table inet aenv {}", "delete table inet aenv", "table inet aenv {"]
    assert nft.slot_rules("10.192.193.1", "10.192.192.1", fresh=True).count("table") == 1


def test_a_failure_of_nft_is_quoted() -> None:
    with pytest.raises(HostFault, match=r"nft: .*syntax error"):
        nft.apply("table ip {{{")


def test_a_missing_nft_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostIncapable, match="install the package nftables"):
        nft.apply("")


@pytest.mark.parametrize("given", ["10.0.0.1/8", "fd00::1/8", "example.com"])
def test_a_denied_range_that_is_none_is_the_callers_mistake(given: str) -> None:
    with pytest.raises(InvalidRequest, match="denied_ranges"):
        denied(["10.0.0.0/8", given])


def test_an_open_host_has_no_blockers() -> None:
    assert blockers({}) == []
    assert (
        blockers({"nftables": [{"metainfo": {}}, base("FORWARD", "forward"), base("INPUT", "input")]}) == []
    )


@pytest.mark.parametrize(
    ("objects", "told"),
    [
        ([base("FORWARD", "forward", "drop")], "ip filter FORWARD has the policy to drop"),
        ([base("INPUT", "input", "drop")], "name lookups"),
        ([base("FORWARD", "forward"), rule("FORWARD", {"drop": None})], "ends in a rule to drop everything"),
        (
            [base("f", "forward"), rule("f", {"accept": None}), rule("f", {"counter": {}}, {"reject": {}})],
            "ends in a rule to reject everything",
        ),
    ],
)
def test_what_drops_by_default_is_told(objects: list[dict[str, Any]], told: str) -> None:
    (found,) = blockers({"nftables": objects})
    assert told in found


@pytest.mark.parametrize(
    "objects",
    [
        [base("FORWARD", "forward", "drop"), chain("DOCKER-USER")],
        [base("f", "forward"), rule("f", {"match": {}}, {"drop": None})],
        [base("f", "forward"), rule("f", {"drop": None}), rule("f", {"accept": None})],
        [base("f", "forward", "drop", table="aenv7", family="inet")],
        [base("f", "forward", "drop", family="ip6")],
        [base("f", "output", "drop")],
    ],
    ids=["Docker's, which we are in", "a condition", "not the last", "a node's own", "IPv6", "output"],
)
def test_what_does_not_concern_guests_is_not_told(objects: list[dict[str, Any]]) -> None:
    assert blockers({"nftables": objects}) == []
