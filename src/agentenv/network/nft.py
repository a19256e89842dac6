"""Running `nft`, and the rule sets of a node and of a slot as text.

The program is run rather than its library loaded: the library ends the whole process on some
errors, and 6 ms per slot is what that safety costs. A rule set is always replaced in one
transaction, so that there is no moment without rules.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from typing import Any

from agentenv.errors import HostFault, HostIncapable
from agentenv.network.node import NodeIdentity
from agentenv.network.opened import Opened
from agentenv.network.slot import GATEWAY_ADDRESS, GUEST_ADDRESS

TAP = "tap0"
UPLINK = "uplink"
SLOT_TABLE = "aenv"

# Guests ask their gateway's port 53; the node listens elsewhere, so that a name server of the
# host's own, on all its addresses, is not in the way.
RESOLVER_PORT = 1053


def apply(script: str) -> None:
    """Carry out a script of nft commands, all or nothing, in the calling thread's namespace.

    Raises:
        HostIncapable: there is no `nft` program.
        HostFault: the kernel or nft refused it; the message quotes nft.
    """
    _run("-f", "-", script=script)


def ruleset() -> dict[str, Any]:
    """All rules of the calling thread's namespace, in nft's JSON form."""
    parsed: dict[str, Any] = json.loads(_run("-j", "list", "ruleset") or "{}")
    return parsed


def _run(*arguments: str, script: str = "") -> str:
    try:
        done = subprocess.run(
            ["nft", *arguments], input=script, capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        raise HostIncapable("there is no nft program", remedy="install the package nftables") from None
    except subprocess.TimeoutExpired:
        raise HostFault("nft did not finish within 30 s", remedy="see what else changes rules") from None
    if done.returncode:
        detail = " ".join(done.stderr.split())
        raise HostFault(f"nft: {detail[:400]}", remedy="run `aenv doctor` to see whether nftables works")
    return done.stdout


def _making(family: str, table: str, body: str) -> str:
    return f"table {family} {table} {{\n{body}}}\n"


def _replacing(family: str, table: str, body: str) -> str:
    """A script that makes the table anew, whether or not it is there, in one transaction."""
    return f"table {family} {table} {{}}\ndelete table {family} {table}\n{_making(family, table, body)}"


def slot_rules(address: str, node: str, *, fresh: bool = False) -> str:
    """Rules inside a slot's namespace: translation, and who may talk to whom.

    The guest reaches the world as `address` and its resolver through its gateway; the node reaches
    it from the gateway's address, by which the agent knows the node wherever a clone runs. A packet
    with another source than the guest's goes nowhere. New connections to the guest come from the
    node alone: what is left of an earlier sandbox's flows at the same address finds no way in. The
    machine's own process, which runs in the namespace, sends nothing but what the kernel
    answers for it. Segment sizes are clamped to the route, since guests do not know the host's
    MTU. In a fresh namespace there is nothing to replace, which nft does in a third of the time.
    """
    write = _making if fresh else _replacing
    return write(
        "ip",
        SLOT_TABLE,
        f"""
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        iifname "{UPLINK}" ip daddr {address} dnat to {GUEST_ADDRESS}
        iifname "{TAP}" ip daddr {GATEWAY_ADDRESS} udp dport 53 dnat to {node}:{RESOLVER_PORT}
        iifname "{TAP}" ip daddr {GATEWAY_ADDRESS} tcp dport 53 dnat to {node}:{RESOLVER_PORT}
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname "{UPLINK}" ip saddr {GUEST_ADDRESS} snat to {address}
        oifname "{TAP}" ip saddr {node} ip daddr {GUEST_ADDRESS} snat to {GATEWAY_ADDRESS}
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        iifname "{TAP}" ip saddr != {GUEST_ADDRESS} drop
        tcp flags syn tcp option maxseg size set rt mtu
        ct state established,related accept
        iifname "{TAP}" oifname "{UPLINK}" accept
        iifname "{UPLINK}" oifname "{TAP}" ip saddr {node} accept
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        icmp type echo-request accept
        iifname "{TAP}" reject with icmp type admin-prohibited
    }}
    chain output {{
        type filter hook output priority filter; policy drop;
        meta l4proto icmp accept
    }}
""",
    )


def node_rules(identity: NodeIdentity, denied: Iterable[str], opened: Iterable[Opened] = ()) -> str:
    """Rules on the host: what a node's sandboxes may reach there and beyond.

    Of the host they reach the resolver and what is opened, of each other nothing, of the denied ranges
    what is opened; and nothing but replies (and the host itself) reaches them.
    """
    denied_set = _elements(denied)
    opened_set = _elements(f"{each.address} . {each.port}" for each in opened)
    inside = f'"{identity.links}"'
    return _replacing(
        "inet",
        identity.name,
        f"""
    set denied {{
        type ipv4_addr; flags interval; auto-merge;
        {denied_set}
    }}
    set opened {{
        type ipv4_addr . inet_service;
        {opened_set}
    }}
    chain prerouting {{
        type filter hook prerouting priority raw; policy accept;
        iifname {inside} ip saddr != {identity.block} drop
        iifname {inside} meta nfproto ipv6 drop
    }}
    chain input {{
        type filter hook input priority filter - 5; policy accept;
        iifname {inside} jump to_host
    }}
    chain to_host {{
        ct state established,related accept
        ip daddr {identity.address} udp dport {RESOLVER_PORT} accept
        ip daddr {identity.address} tcp dport {RESOLVER_PORT} accept
        ip daddr . tcp dport @opened accept
        reject with icmpx type admin-prohibited
    }}
    chain forward {{
        type filter hook forward priority filter - 5; policy accept;
        iifname {inside} jump egress
        oifname {inside} jump ingress
    }}
    chain egress {{
        ct state established,related accept
        oifname "aenv*" reject with icmpx type admin-prohibited
        ip daddr . tcp dport @opened accept
        ip daddr @denied reject with icmpx type admin-prohibited
        accept
    }}
    chain ingress {{
        ct state established,related accept
        iifname "aenv*" reject with icmpx type admin-prohibited
        drop
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {identity.block} ip daddr != {identity.block} masquerade
    }}
""",
    )


def _elements(members: Iterable[str]) -> str:
    listed = ", ".join(members)
    return f"elements = {{ {listed} }}" if listed else ""


def delete_node_rules(identity: NodeIdentity) -> str:
    """A script that removes the node's table, whether or not it is there."""
    return f"table inet {identity.name} {{}}\ndelete table inet {identity.name}\n"
