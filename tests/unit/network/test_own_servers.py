"""Which name servers sandboxes may name."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, ip_address

import pytest

from agentenv.errors import InvalidRequest
from agentenv.network.denied import denied
from agentenv.network.opened import Opened
from agentenv.network.policy import Policy, parse
from agentenv.network.servers import OwnServers

BLOCK = IPv4Network("10.192.0.0/18")
SERVERS = OwnServers(
    denied(["172.16.0.0/12", "169.254.0.0/16", "fc00::/7"]),
    [Opened(IPv4Address("172.16.0.53"), 53), Opened(IPv4Address("172.16.0.54"), 80)],
    BLOCK,
)


@pytest.mark.parametrize("server", ["192.0.2.53", "172.16.0.53", "2001:db8::53"])
def test_public_servers_and_opened_ones_may_be_asked(server: str) -> None:
    assert SERVERS.permitted(ip_address(server))


@pytest.mark.parametrize(
    "server",
    [
        "172.16.0.1",
        "172.16.0.54",  # open at another port
        "169.254.169.254",
        "10.192.0.1",
        "10.192.1.7",
        "127.0.0.1",  # the host, though no range says so
        "127.0.0.53",
        "0.0.0.0",
        "224.0.0.251",
        "::1",
        "::",
        "ff02::fb",
        "fd00::53",
        "::ffff:172.16.0.1",
        "64:ff9b::ac10:1",
    ],
)
def test_what_the_node_denies_may_not(server: str) -> None:
    assert not SERVERS.permitted(ip_address(server))
    with pytest.raises(InvalidRequest, match="dnsServers"):
        SERVERS.check(Policy(dns_servers=(ip_address("192.0.2.1"), ip_address(server))))


def test_policies_without_servers_are_fine() -> None:
    SERVERS.check(Policy())
    SERVERS.check(Policy(dns_servers=()))


@pytest.mark.parametrize(
    ("network", "servers"),
    [
        (None, None),
        ({"dnsServers": None}, None),
        ({"dnsServers": []}, None),
        ({"dnsServers": ["1.1.1.1", " 2001:db8::1", "1.1.1.1"]}, ("1.1.1.1", "2001:db8::1")),
        ({"dnsServers": ["::ffff:1.1.1.1"]}, ("1.1.1.1",)),
        ({"dnsServers": [], "allowOut": ["a.test"], "denyOut": ["0.0.0.0/0"]}, ()),
    ],
)
def test_servers_of_a_request(network: dict[str, list[str]] | None, servers: tuple[str, ...] | None) -> None:
    found = parse(network, None).dns_servers
    assert (None if found is None else tuple(map(str, found))) == servers


@pytest.mark.parametrize("entry", ["dns.example.com", "1.1.1.1:53", "1.1.1.0/24", "fe80::1%eth0", ""])
def test_a_server_that_is_no_address_is_the_callers_mistake(entry: str) -> None:
    with pytest.raises(InvalidRequest, match="dnsServers"):
        parse({"dnsServers": [entry]}, None)
