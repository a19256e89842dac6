"""A policy as rules of a slot: what of the world the guest in it reaches. Pure: policy in, text out.

Every packet of a flow is judged, in both directions and by where the flow was first sent to, and not
only its first one: so a change of policy cuts what it forbids, and lets the rest go on, without any
list of flows being gone through. The node's own rules (nft.node_rules) are the other half; a packet
passes if both let it, so what they refuse no policy opens. docs/guides/network.md has the whole order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any

from agentenv.network.nfnetlink import COMMENT_MAX, Element
from agentenv.network.opened import Opened
from agentenv.network.policy import Address, Policy, Range
from agentenv.network.slot import GATEWAY_ADDRESS

SLOT_TABLE = "aenv"
CHAIN = "egress"
# New flows go to what a name resolved to while its answer lives; those that began then go on to it.
NAMED = {4: "named4", 6: "named6"}
LASTING = {4: "lasting4", 6: "lasting6"}
LASTING_S = 24 * 3600.0  # since the last answer with that address

_TABLE = f"inet {SLOT_TABLE}"
_FAMILIES = {4: "ip", 6: "ip6"}
_PLAIN = re.compile(rf"[A-Za-z0-9._-]{{1,{COMMENT_MAX}}}")
_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}


@dataclass(frozen=True)
class Opening:
    """An address that a name resolved to: for how many more seconds new flows go there, and those that
    there are go on."""

    address: Address
    name: str
    new_s: float
    lasting_s: float = LASTING_S


def rules(policy: Policy, opened: Iterable[Opened] = ()) -> list[str]:
    """The statements of a policy's chain, in their order. Each packet meets an end in it; with no statement
    at all it passes."""
    if policy.unrestricted:
        return []
    gateway = _to(4, GATEWAY_ADDRESS)
    found = [f"meta l4proto {each} {gateway} ct original proto-dst 53 accept" for each in ("udp", "tcp")]
    found += [
        f"meta l4proto tcp {_to(4, each.address)} ct original proto-dst {each.port} accept" for each in opened
    ]
    if policy.by_names:  # what is asked of other name servers, even of an allowed one, leaves unseen
        found += [f"meta l4proto {each} ct original proto-dst 53 jump refuse" for each in ("udp", "tcp")]
    found += _matching(policy.allow, "accept")
    if policy.allow_names:
        found += [f"{_to(family, '@' + name)} accept" for family, name in NAMED.items()]
        found += [
            f"ct state established,related {_to(family, '@' + name)} accept"
            for family, name in LASTING.items()
        ]
    found += _matching(policy.deny, "jump refuse")
    return [*found, "accept" if policy.internet else "jump refuse"]


def differ(one: Policy, other: Policy) -> bool:
    """Whether it matters to a slot's rules, and to what names have opened, which of two policies holds."""
    return rules(one) != rules(other) or one.allow_names != other.allow_names


def change(
    before: Policy | None, policy: Policy, opened: Iterable[Opened], openings: Sequence[Opening]
) -> str:
    """A script that puts a policy into force in a slot, in one transaction.

    What is not there is not removed: after a removal, and only then, nft waits for the kernel, which takes
    longer than all the rest.

    Args:
        before: the policy that it takes the place of, None where that is not certain.
        policy: what is to hold.
        opened: what the operator has opened to all.
        openings: what names have opened and the policy leaves open.
    """
    lines = [f"table {_TABLE} {{\n{sets()}}}"] if policy.allow_names or before is None else []
    if before is None or not before.unrestricted:
        lines.append(f"flush chain {_TABLE} {CHAIN}")
    if before is None or before.allow_names:
        lines += [f"flush set {_TABLE} {name}" for name in (*NAMED.values(), *LASTING.values())]
    lines += [f"add rule {_TABLE} {CHAIN} {rule}" for rule in rules(policy, opened)]
    return "\n".join([*lines, *elements(openings)]) + "\n"


def sets() -> str:
    """The declarations of the sets that names open addresses in."""
    return "".join(
        f"    set {names[family]} {{ type {_TYPES[family]}; flags timeout; }}\n"
        for family in _FAMILIES
        for names in (NAMED, LASTING)
    )


def additions(openings: Iterable[Opening]) -> list[Element]:
    """What openings are as elements of the sets."""
    return [
        Element(names[each.address.version], each.address, seconds, _noted(each.name))
        for each in openings
        for names, seconds in ((NAMED, each.new_s), (LASTING, each.lasting_s))
        if seconds > 0
    ]


def elements(openings: Iterable[Opening]) -> list[str]:
    """The same as commands."""
    return [
        f"add element {_TABLE} {each.set} {{ {each.address} timeout {max(1, round(each.seconds * 1000))}ms"
        + (f' comment "{each.comment}" }}' if each.comment else " }")
        for each in additions(openings)
    ]


def listed(ruleset: Mapping[str, Any], policy: Policy) -> list[Opening]:
    """The openings in a slot's rule set, as `nft -j list ruleset` prints it, that a policy leaves open."""
    found: dict[tuple[Address, str], dict[int, float]] = {}
    for item in ruleset.get("nftables", ()):
        made = item.get("set", {})
        for position, names in enumerate((NAMED, LASTING)):
            for entry in made.get("elem", ()) if made.get("name") in names.values() else ():
                element = entry["elem"]
                key = ip_address(element["val"]), element.get("comment", "")
                found.setdefault(key, {})[position] = element["expires"]
    return [
        Opening(address, name, seconds.get(0, 0.0), seconds.get(1, 0.0))
        for (address, name), seconds in found.items()
        if policy.name_matches(name)
    ]


def _noted(name: str) -> str:
    """A name as a comment; none where it could be taken for more than that, since guests choose names."""
    return name.lower() if _PLAIN.fullmatch(name) else ""


def _to(family: int, destination: object) -> str:
    return f"ct original {_FAMILIES[family]} daddr {destination}"


def _matching(ranges: Sequence[Range], verdict: str) -> list[str]:
    found = []
    for family, kind in ((4, IPv4Network), (6, IPv6Network)):
        members = ", ".join(str(each) for each in ranges if isinstance(each, kind))
        if members:
            found.append(f"{_to(family, '{ ' + members + ' }')} {verdict}")
    return found
