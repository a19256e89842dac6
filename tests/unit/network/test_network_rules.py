"""Rule sets as text, and what is told from the rules of others."""

from __future__ import annotations

import shutil
import subprocess
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import HostFault, HostIncapable, InvalidRequest
from agentenv.network import egress, nft
from agentenv.network.denied import Denied, denied
from agentenv.network.egress import Opening
from agentenv.network.host import blockers
from agentenv.network.node import NodeIdentity
from agentenv.network.opened import Opened
from agentenv.network.policy import UNRESTRICTED, parse

IDENTITY = NodeIdentity(3, IPv4Network("10.192.192.0/18"))
ENDS = ("10.192.193.1", "10.192.192.1")
PROXY = Opened(IPv4Address("10.1.2.3"), 3128)
NAMED = parse({"allowOut": ["1.1.1.1", "2001:db8::/32", "*.example.com"], "denyOut": ["0.0.0.0/0"]}, None)
DENYING = parse({"allowOut": ["8.8.8.8", "2001:db8::1"], "denyOut": ["8.0.0.0/8", "2001:db8::/32"]}, None)
OPENINGS = [
    Opening(IPv4Address("192.0.2.1"), "a.example.com", 60.0),
    Opening(IPv6Address("2001:db8:1::1"), "b.example.com", 0.0001, 0.5),
    Opening(IPv4Address("192.0.2.2"), '"}; flush ruleset; ', 0.0),
]


def chain(name: str, **more: Any) -> dict[str, Any]:
    return {"chain": {"family": "ip", "table": "filter", "name": name, **more}}


def rule(where: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"rule": {"family": "ip", "table": "filter", "chain": where, "expr": list(parts)}}


def base(name: str, hook: str, policy: str = "accept", **more: Any) -> dict[str, Any]:
    return chain(name, type="filter", hook=hook, prio=0, policy=policy, **more)


WITHOUT_NETBASE = """
for file in /etc/protocols /etc/services; do
    [ ! -e $file ] || mount --bind /dev/null $file
done
exec nft --check -f -
"""


@pytest.mark.parametrize(
    "script",
    [
        nft.slot_rules(*ENDS),
        nft.slot_rules(*ENDS, fresh=True),
        nft.slot_rules(*ENDS, NAMED, [PROXY], OPENINGS),
        nft.slot_rules(*ENDS, fresh=True) + egress.change(UNRESTRICTED, NAMED, [PROXY], OPENINGS),
        nft.slot_rules(*ENDS, NAMED) + egress.change(NAMED, DENYING, [PROXY], []),
        nft.slot_rules(*ENDS, DENYING) + egress.change(DENYING, UNRESTRICTED, [], []),
        nft.node_rules(IDENTITY, denied(["10.0.0.0/8", "10.1.0.0/16", "fc00::/7"])),
        nft.node_rules(IDENTITY, Denied()),
        nft.node_rules(IDENTITY, denied(["10.0.0.0/8"]), [PROXY]),
        nft.delete_node_rules(IDENTITY),
    ],
    ids=[
        "slot",
        "fresh slot",
        "slot with a policy",
        "first policy",
        "other policy",
        "no policy",
        "node",
        "node without ranges",
        "node with opened",
        "deletion",
    ],
)
@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft")
def test_nft_accepts_what_is_written(script: str) -> None:
    """By names that it knows itself: a small installation has no file of protocols (the package netbase)."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", WITHOUT_NETBASE]
    done = subprocess.run(command, input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_replacement_is_one_transaction() -> None:
    lines = nft.slot_rules(*ENDS).splitlines()
    assert lines[:3] == ["table inet aenv {}", "delete table inet aenv", "table inet aenv {"]
    assert nft.slot_rules(*ENDS, fresh=True).count("table") == 1


def test_the_order_of_a_policys_rules() -> None:
    found = egress.rules(NAMED, [PROXY])
    parts = ("169.254.0.22", "10.1.2.3", "proto-dst 53 jump refuse", "1.1.1.1", "@named4", "@lasting4")
    places = [next(place for place, rule in enumerate(found) if part in rule) for part in parts]
    assert places == sorted(places)
    assert found[-1] == "jump refuse"
    denying = egress.rules(DENYING)
    assert [rule.split()[-1] for rule in denying] == [*["accept"] * 4, "refuse", "refuse", "accept"]
    assert egress.rules(UNRESTRICTED, [PROXY]) == []


def test_what_a_guest_chooses_is_never_part_of_a_script() -> None:
    script = egress.change(UNRESTRICTED, NAMED, [], OPENINGS)
    assert "flush" not in script
    assert 'comment "a.example.com"' in script
    assert "192.0.2.2 timeout" in script


def test_openings_are_found_in_what_nft_lists() -> None:
    other = {"val": "192.0.2.2", "timeout": 60, "expires": 42, "comment": "other.test"}
    element = {"val": "192.0.2.1", "timeout": 60, "expires": 42, "comment": "a.example.com"}
    lasting = {**element, "expires": 80000}
    listed = egress.listed(
        {
            "nftables": [
                {"metainfo": {}},
                {"set": {"name": "named4", "elem": [{"elem": element}, {"elem": other}]}},
                {"set": {"name": "lasting4", "elem": [{"elem": lasting}]}},
                {"set": {"name": "named6"}},
                {"set": {"name": "another", "elem": ["192.0.2.9"]}},
            ]
        },
        NAMED,
    )
    assert listed == [Opening(IPv4Address("192.0.2.1"), "a.example.com", 42, 80000)]


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


def test_that_nft_was_ended_by_a_signal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nft"
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostFault, match="ended by SIGSEGV") as caught:
        nft.ruleset()
    assert "nft list tables" in str(caught.value.remedy)
