"""What a sandbox may reach, as E2B's clients say it: a value, and how it is read from a request.

The rules are those that E2B documents: `allowOut` wins over `denyOut`; without a deny everything is
allowed, so `allowOut` alone restricts nothing; `allow_internet_access: false` is `denyOut: ["0.0.0.0/0"]`,
which stands for all traffic, IPv6 as well; names are for `allowOut` only, and only where the rest is denied.
Source: https://e2b.dev/docs/network/internet-access
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    collapse_addresses,
    ip_address,
    ip_network,
)
from typing import Any

import idna

from agentenv.errors import InvalidRequest

Address = IPv4Address | IPv6Address
Range = IPv4Network | IPv6Network

ALL_IPV4, ALL_IPV6 = IPv4Network("0.0.0.0/0"), IPv6Network("::/0")
ENTRIES_MAX = 1000  # of each list

_NAME_MAX = 253
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_MAPPED = IPv6Network("::ffff:0:0/96")
_MAPPED_BITS = 96


@dataclass(frozen=True)
class Policy:
    """What a sandbox may reach beyond what the node refuses to all; the default is everything.

    `allow` wins over `deny`; what neither names is reached if `internet`. `allow_names` are lowercase
    ASCII, `example.com` or `*.example.com`, the latter for all names below and not for itself; they open the
    addresses that they resolve to. `dns_servers` are asked for this sandbox in the place of the node's; where
    there is none of them, nothing is looked up.
    """

    allow: tuple[Range, ...] = ()
    deny: tuple[Range, ...] = ()
    allow_names: tuple[str, ...] = ()
    internet: bool = True
    dns_servers: tuple[Address, ...] | None = None

    @property
    def unrestricted(self) -> bool:
        """Whether it refuses nothing, so that no rules are needed for it."""
        return self.internet and not self.deny

    @property
    def by_names(self) -> bool:
        """Whether only lookups of `allow_names` are answered. Any lookup carries something out, so none
        other passes where not everything may be reached."""
        return not self.internet

    def name_matches(self, name: str) -> bool:
        """Whether a name, in any case and with or without the final dot, is one of `allow_names`."""
        plain = name.lower().removesuffix(".")
        return any(
            plain.endswith(each[1:]) and plain != each[1:] if each.startswith("*.") else plain == each
            for each in self.allow_names
        )

    def answers(self, name: str) -> bool:
        """Whether a lookup of that name is answered."""
        return not self.by_names or self.name_matches(name)


UNRESTRICTED = Policy()


def parse(network: Mapping[str, Any] | None, allow_internet_access: bool | None) -> Policy:
    """The policy of a request: its `network`, with E2B's keys, and its `allow_internet_access`.

    Raises:
        InvalidRequest: an entry is none, or the lists cannot be meant together; it says which and why.
    """
    given = network or {}
    ranges, names = _destinations("allowOut", given.get("allowOut") or ())
    denied, denied_names = _destinations("denyOut", given.get("denyOut") or ())
    if denied_names:
        raise InvalidRequest(
            f"network.denyOut: {denied_names[0]!r} is a name, and names cannot be denied",
            remedy="deny 0.0.0.0/0 and allow the names that may be reached",
        )
    internet = allow_internet_access is not False and ALL_IPV4 not in denied
    if names and internet:
        raise InvalidRequest(
            f"network.allowOut: the name {names[0]!r} needs all other traffic denied",
            remedy='add "0.0.0.0/0" to network.denyOut',
        )
    servers = _servers(given.get("dnsServers"), needed=not names)
    if ALL_IPV4 in ranges:  # it wins over whatever is denied
        return Policy(dns_servers=servers)
    return Policy(
        allow=_collapsed(ranges),
        deny=_collapsed(denied) if internet else (),
        allow_names=tuple(dict.fromkeys(names)),
        internet=internet,
        dns_servers=servers,
    )


def _destinations(key: str, entries: Sequence[str]) -> tuple[list[Range], list[str]]:
    """The ranges and the names of a list; all IPv4 addresses stand for all traffic."""
    if len(entries) > ENTRIES_MAX:
        raise InvalidRequest(f"network.{key}: {len(entries)} entries are more than {ENTRIES_MAX}")
    ranges: list[Range] = []
    names: list[str] = []
    for entry in entries:
        found = _range(key, entry.strip())
        if found is None:
            names.append(_name(key, entry.strip()))
        else:
            ranges.append(found)
    ranges = list(_collapsed(ranges))
    if ALL_IPV4 in ranges:
        ranges = [ALL_IPV4, ALL_IPV6]
    return ranges, names


def _range(key: str, text: str) -> Range | None:
    """An address or a network; None for what looks like neither."""
    try:
        network = ip_network(text)
    except ValueError:
        pass
    else:
        return _refuse_zone(key, text) if "%" in text else _unmapped(network)
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        return None
    raise InvalidRequest(
        f"network.{key}: {text!r} has bits set beyond its prefix", remedy=f"write {network}, if that is meant"
    )


def _refuse_zone(key: str, text: str) -> Range:
    raise InvalidRequest(f"network.{key}: {text!r} has a zone, which means nothing outside of one host")


def _unmapped(network: Range) -> Range:
    """IPv4 in the disguise of IPv6 is what programs reach over IPv4."""
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        mapped = network.network_address.ipv4_mapped
        assert mapped is not None
        return IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))
    return network


def _name(key: str, text: str) -> str:
    """A name in its normal form: lowercase, internationalised ones in ASCII, no final dot."""
    wildcard, plain = text.startswith("*."), text.removeprefix("*.").removesuffix(".").lower()
    if not plain.isascii():
        try:
            plain = idna.encode(plain, uts46=True).decode()
        except idna.IDNAError as error:
            raise InvalidRequest(f"network.{key}: {text!r} is no name: {error}") from None
    labels = plain.split(".")
    numeric = labels[-1].isdecimal() or labels[-1].startswith("0x")
    if numeric or len(plain) > _NAME_MAX or not all(map(_LABEL.fullmatch, labels)):
        raise InvalidRequest(
            f"network.{key}: {text!r} is neither an address, nor a range, nor a name",
            remedy="such as 8.8.8.8, 2001:db8::/32, example.com or *.example.com, without a port or scheme",
        )
    return f"*.{plain}" if wildcard else plain


def _servers(entries: Sequence[str] | None, *, needed: bool) -> tuple[Address, ...] | None:
    """The servers to ask. That there be none can only be meant beside names, for which E2B documents it."""
    if entries is None or (needed and not entries):
        return None
    servers = []
    for entry in entries:
        try:
            address = ip_address(entry.strip())
        except ValueError:
            address = None
        if address is None or "%" in entry:
            raise InvalidRequest(
                f"network.dnsServers: {entry!r} is not an address", remedy="such as 8.8.8.8, without a port"
            )
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        servers.append(mapped or address)
    return tuple(dict.fromkeys(servers))


def _collapsed(ranges: Iterable[Range]) -> tuple[Range, ...]:
    listed = list(ranges)
    ipv4 = (each for each in listed if isinstance(each, IPv4Network))
    ipv6 = (each for each in listed if isinstance(each, IPv6Network))
    return (*collapse_addresses(ipv4), *collapse_addresses(ipv6))
