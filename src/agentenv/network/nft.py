"""Running `nft`, and the rule sets of a node and of a slot as text.

The program is run rather than its library loaded: the library ends the whole process on some
errors, and 6 ms per slot is what that safety costs. A rule set is always replaced in one
transaction, so that there is no moment without rules.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterable
from ipaddress import IPv6Address
from typing import Any

from agentenv.errors import HostFault, HostIncapable
from agentenv.network import egress
from agentenv.network.denied import Denied
from agentenv.network.egress import CHAIN, SLOT_TABLE, Opening
from agentenv.network.node import NODES6, NodeIdentity
from agentenv.network.opened import Opened
from agentenv.network.policy import UNRESTRICTED, Policy
from agentenv.network.slot import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_ADDRESS6

TAP = "tap0"
UPLINK = "uplink"

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
    if done.returncode < 0:
        ended = signal.Signals(-done.returncode).name
        raise HostFault(
            f"nft was ended by {ended}",
            remedy="where `nft list tables` ends so as well, a newer nft, of a container with the host's"
            " network perhaps, has made tables that this one cannot read: delete them with that, or upgrade",
        )
    if done.returncode:
        detail = " ".join(done.stderr.split()) or f"ended with status {done.returncode}"
        raise HostFault(f"nft: {detail[:400]}", remedy="run `aenv doctor` to see whether nftables works")
    return done.stdout


def _making(family: str, table: str, body: str) -> str:
    return f"table {family} {table} {{\n{body}}}\n"


def _replacing(family: str, table: str, body: str) -> str:
    """A script that makes the table anew, whether or not it is there, in one transaction."""
    return f"table {family} {table} {{}}\ndelete table {family} {table}\n{_making(family, table, body)}"


# What answers at once rather than to leave a client waiting. A reset for TCP, since it also ends flows that
# were open, and since ICMP is limited in its rate.
_REFUSE = """
    chain refuse {
        meta l4proto tcp reject with tcp reset
        reject with icmpx type admin-prohibited
    }
"""


def slot_rules(
    address: str,
    node: str,
    policy: Policy = UNRESTRICTED,
    opened: Iterable[Opened] = (),
    openings: Iterable[Opening] = (),
    *,
    ipv6: IPv6Address | None = None,
    fresh: bool = False,
) -> str:
    """Rules inside a slot's namespace: translation, and who may talk to whom.

    The guest reaches the world as `address` and its resolver through its gateway; the node reaches
    it from the gateway's address, by which the agent knows the node wherever a clone runs. A packet
    with another source than the guest's goes nowhere. New connections to the guest come from the
    node alone: what is left of an earlier sandbox's flows at the same address finds no way in. The
    machine's own process, which runs in the namespace, sends nothing but what the kernel
    answers for it. Segment sizes are clamped to the route, since guests do not know the host's
    MTU. In a fresh namespace there is nothing to replace, which nft does in a third of the time.

    Args:
        address: the slot's, in the node's block.
        node: the node's own there.
        policy: what the guest may reach.
        opened: what the operator has opened to all.
        openings: what names have opened, where they are part of the policy.
        ipv6: the slot's address of IPv6, where guests have any.
        fresh: whether the namespace has no rules yet.
    """
    translated, foreign = "", "meta nfproto ipv6"
    if ipv6 is not None:
        translated = f'oifname "{UPLINK}" ip6 saddr {GUEST_ADDRESS6} snat ip6 to {ipv6}'
        foreign = f"ip6 saddr != {GUEST_ADDRESS6}"
    lines = "\n        ".join(egress.rules(policy, opened))
    write = _making if fresh else _replacing
    return write(
        "inet",
        SLOT_TABLE,
        f"""
{egress.sets() if policy.allow_names else ""}
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        iifname "{UPLINK}" ip daddr {address} dnat ip to {GUEST_ADDRESS}
        iifname "{TAP}" ip daddr {GATEWAY_ADDRESS} udp dport 53 dnat ip to {node}:{RESOLVER_PORT}
        iifname "{TAP}" ip daddr {GATEWAY_ADDRESS} tcp dport 53 dnat ip to {node}:{RESOLVER_PORT}
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname "{UPLINK}" ip saddr {GUEST_ADDRESS} snat ip to {address}
        oifname "{TAP}" ip saddr {node} ip daddr {GUEST_ADDRESS} snat ip to {GATEWAY_ADDRESS}
        {translated}
    }}
    chain {CHAIN} {{
        {lines}
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        iifname "{TAP}" ip saddr != {GUEST_ADDRESS} drop
        iifname "{TAP}" {foreign} drop
        ct state invalid drop
        tcp flags syn tcp option maxseg size set rt mtu
        iifname "{TAP}" oifname "{UPLINK}" ct direction original jump {CHAIN}
        iifname "{TAP}" oifname "{UPLINK}" ct direction original accept
        iifname "{TAP}" oifname "{UPLINK}" ct state established,related accept
        iifname "{UPLINK}" oifname "{TAP}" ct direction reply ct state established,related jump {CHAIN}
        iifname "{UPLINK}" oifname "{TAP}" ct direction reply ct state established,related accept
        iifname "{UPLINK}" oifname "{TAP}" ip saddr {node} accept
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        icmp type echo-request accept
        icmpv6 type {{ echo-request, nd-neighbor-solicit, nd-neighbor-advert }} accept
        iifname "{TAP}" goto refuse
    }}
    chain output {{
        type filter hook output priority filter; policy drop;
        meta l4proto {{ icmp, icmpv6 }} accept
        tcp flags & rst == rst accept
    }}
{_REFUSE}""",
    ) + "".join(f"{line}\n" for line in egress.elements(openings))


def node_rules(
    identity: NodeIdentity, denied: Denied, opened: Iterable[Opened] = (), *, ipv6: bool = False
) -> str:
    """Rules on the host: what a node's sandboxes may reach there and beyond, whatever their policies.

    Of the host they reach the resolver and what is opened, of each other nothing, of the denied ranges
    what is opened; and nothing but answers (and the host itself) reaches them. Each packet of a flow is
    judged, so that what another start of the node opens no longer ends.
    """
    opened_set = _elements(f"{each.address} . {each.port}" for each in opened)
    inside = f'"{identity.links}"'
    foreign = f"ip6 saddr != {identity.block6}" if ipv6 else "meta nfproto ipv6"
    return _replacing(
        "inet",
        identity.name,
        f"""
    set denied {{
        type ipv4_addr; flags interval; auto-merge;
        {_elements(map(str, denied.ipv4))}
    }}
    set denied6 {{
        type ipv6_addr; flags interval; auto-merge;
        {_elements(map(str, denied.ipv6))}
    }}
    set opened {{
        type ipv4_addr . inet_service;
        {opened_set}
    }}
    chain prerouting {{
        type filter hook prerouting priority raw; policy accept;
        iifname {inside} ip saddr != {identity.block} drop
        iifname {inside} {foreign} drop
    }}
    chain input {{
        type filter hook input priority filter - 5; policy accept;
        iifname {inside} jump to_host
    }}
    chain to_host {{
        ct direction reply ct state established,related accept
        ip daddr {identity.address} udp dport {RESOLVER_PORT} accept
        ip daddr {identity.address} tcp dport {RESOLVER_PORT} accept
        ip daddr . tcp dport @opened accept
        goto refuse
    }}
    chain forward {{
        type filter hook forward priority filter - 5; policy accept;
        iifname {inside} jump egress
        oifname {inside} jump ingress
    }}
    chain egress {{
        ct state related accept
        oifname "aenv*" goto refuse
        ip daddr {identity.block} goto refuse
        ip6 daddr {NODES6} goto refuse
        ip daddr . tcp dport @opened accept
        ip daddr @denied goto refuse
        ip6 daddr @denied6 goto refuse
        accept
    }}
    chain ingress {{
        iifname "aenv*" goto refuse
        ct state related accept
        ct direction reply ct state established goto answers
        drop
    }}
    chain answers {{
        ip saddr . tcp sport @opened accept
        ip saddr @denied drop
        ip6 saddr @denied6 drop
        accept
    }}
{_REFUSE}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {identity.block} ip daddr != {identity.block} masquerade
        ip6 saddr {identity.block6} ip6 daddr != {identity.block6} masquerade
    }}
""",
    )


def _elements(members: Iterable[str]) -> str:
    listed = ", ".join(members)
    return f"elements = {{ {listed} }}" if listed else ""


def delete_node_rules(identity: NodeIdentity) -> str:
    """A script that removes the node's table, whether or not it is there."""
    return f"table inet {identity.name} {{}}\ndelete table inet {identity.name}\n"
