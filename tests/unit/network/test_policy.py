"""What clients say about the network, and what it comes to."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InvalidRequest
from agentenv.network.denied import Denied, denied
from agentenv.network.policy import ENTRIES_MAX, Policy, Range, parse
from agentenv.records.document import Documents

ALL = "0.0.0.0/0"
WEB = IPv4Network("203.0.113.10")


def networks(*texts: str) -> tuple[Range, ...]:
    return tuple(map(ip_network, texts))


@pytest.mark.parametrize(
    ("network", "internet", "expected"),
    [
        (None, None, Policy()),
        ({}, True, Policy()),
        ({"allowOut": None, "denyOut": [], "dnsServers": None}, None, Policy()),
        (None, False, Policy(internet=False)),
        ({"denyOut": [ALL]}, None, Policy(internet=False)),
        ({"denyOut": [ALL]}, True, Policy(internet=False)),
        ({"denyOut": ["128.0.0.0/1", "0.0.0.0/1"]}, None, Policy(internet=False)),
        ({"denyOut": ["::/0"]}, None, Policy(deny=networks("::/0"))),
        ({"allowOut": [ALL], "denyOut": [ALL]}, False, Policy()),
        ({"allowOut": ["1.1.1.1"]}, None, Policy(allow=networks("1.1.1.1"))),
        (
            {"denyOut": ["8.8.8.8", "8.8.8.0/24", "2001:db8::1", " 1.1.1.1 "]},
            None,
            Policy(deny=networks("1.1.1.1", "8.8.8.0/24", "2001:db8::1")),
        ),
        (
            {"allowOut": ["::ffff:1.2.3.4", "::ffff:10.0.0.0/104"]},
            False,
            Policy(allow=networks("1.2.3.4", "10.0.0.0/8"), internet=False),
        ),
        (
            {"allowOut": ["Example.COM.", "*.Example.com", "1.1.1.1", "example.com"], "denyOut": [ALL]},
            None,
            Policy(networks("1.1.1.1"), (), ("example.com", "*.example.com"), internet=False),
        ),
        (
            {"allowOut": ["bücher.example", "*.BÜCHER.example", "xn--bcher-kva.example", "_a-b.c"]},
            False,
            Policy(
                allow_names=("xn--bcher-kva.example", "*.xn--bcher-kva.example", "_a-b.c"), internet=False
            ),
        ),
        (
            {"dnsServers": ["9.9.9.9", "2620:fe::fe", "9.9.9.9"]},
            None,
            Policy(dns_servers=(IPv4Address("9.9.9.9"), IPv6Address("2620:fe::fe"))),
        ),
    ],
)
def test_what_is_said_comes_to(network: Any, internet: bool | None, expected: Policy) -> None:
    found = parse(network, internet)
    assert found == expected
    codec = Documents(Policy, "a policy")
    assert codec.decode(codec.encode(found)) == found


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"allowOut": ["example.com"]}, "needs all other traffic denied"),
        ({"allowOut": ["example.com"], "denyOut": ["10.0.0.0/8"]}, "needs all other traffic denied"),
        ({"denyOut": [ALL, "example.com"]}, "names cannot be denied"),
        ({"denyOut": ["10.0.0.1/8"]}, "bits set beyond its prefix"),
        ({"allowOut": ["2001:db8::1/32"]}, "bits set beyond its prefix"),
        ({"allowOut": ["fe80::1%eth0"]}, "zone"),
        ({"dnsServers": ["dns.example"]}, "is not an address"),
        ({"dnsServers": ["9.9.9.9:53"]}, "is not an address"),
        ({"dnsServers": ["fe80::1%eth0"]}, "is not an address"),
        ({"denyOut": ["8.8.8.8"] * (ENTRIES_MAX + 1)}, "more than"),
        *(
            ({"allowOut": [text], "denyOut": [ALL]}, "neither an address")
            for text in (
                "",
                "*",
                "*.",
                ".",
                "a..b",
                "a.*.com",
                "*a.com",
                "-a.com",
                "a-.com",
                "1.1.1.1:80",
                "[::1]:80",
                "https://a.com",
                "a.com/x",
                "a.com:443",
                "a b.com",
                "10.0.0",
                "010.0.0.1",
                "1.1.1.1/33",
                "1.1.1.256",
                "0x7f.0x1",
                "x" * 64 + ".com",
                ".".join(["x" * 60] * 5),
                'a";}',
                "a\n.com",
            )
        ),
        ({"allowOut": ["\u2488com"], "denyOut": [ALL]}, "network.allowOut"),
        ({"allowOut": ["a\u0000ü.com"], "denyOut": [ALL]}, "network.allowOut"),
    ],
)
def test_what_cannot_be_meant_is_the_callers_mistake(network: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse(network, None)


@given(st.text(max_size=40))
def test_any_text_is_taken_or_refused(text: str) -> None:
    try:
        found = parse({"allowOut": [text], "denyOut": [ALL]}, None)
    except InvalidRequest:
        return
    for name in found.allow_names:
        assert name.isascii() and name == name.lower() and not set(name) & set(' "{};\n\\')
        assert parse({"allowOut": [name]}, False).allow_names == (name,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("example.com", True),
        ("EXAMPLE.com.", True),
        ("www.example.com", False),
        ("notexample.com", False),
        ("example.com.evil.test", False),
        ("a.wild.test", True),
        ("a.b.wild.test.", True),
        ("wild.test", False),
        ("awild.test", False),
        (".wild.test", False),
        ("", False),
        (".", False),
    ],
)
def test_names_match_whole_labels(name: str, expected: bool) -> None:
    policy = parse({"allowOut": ["example.com", "*.wild.test"]}, False)
    assert policy.name_matches(name) is policy.answers(name) is expected
    assert Policy().answers(name)


def test_denied_ranges_hold_for_the_ipv6_that_leads_to_them() -> None:
    found = denied(["10.0.0.0/8", "fc00::/7", "169.254.169.254"])
    assert found.ipv4 == (IPv4Network("10.0.0.0/8"), IPv4Network("169.254.169.254"))
    for spelled in (
        "fd12::1",
        "::ffff:10.1.2.3",
        "::10.1.2.3",
        "64:ff9b::10.1.2.3",
        "64:ff9b::169.254.169.254",
        "2002:a01:203::1",
        "2002:a9fe:a9fe:1::2",
    ):
        assert any(IPv6Address(spelled) in each for each in found.ipv6), spelled
    for other in ("::ffff:11.1.2.3", "64:ff9b::8.8.8.8", "2002:808:808::1", "2001:db8::1", "::1"):
        assert not any(IPv6Address(other) in each for each in found.ipv6), other
    assert denied([]) == Denied()
    assert denied([ALL]).ipv6[0] == IPv6Network("::ffff:0:0/96")
