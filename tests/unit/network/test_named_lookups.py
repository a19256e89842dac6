"""The resolver for sandboxes that may reach named hosts only, between real sockets on the loopback."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Address

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import pytest

from agentenv.errors import HostFault
from agentenv.network.policy import UNRESTRICTED, Policy, parse
from agentenv.network.resolver import Resolver
from agentenv.network.upstreams import Upstreams
from support.gate import Gate
from support.zone import Zone, records

BY_NAME = Policy(allow_names=("allowed.test", "*.wild.test"), internet=False)


@pytest.fixture
def zone() -> Iterator[Zone]:
    made = Zone(port=0)
    made.put("allowed.test", "allowed.test 60 A 192.0.2.1")
    yield made
    made.close()


@pytest.fixture
def gate() -> Gate:
    return Gate(BY_NAME)


@pytest.fixture
async def resolver(zone: Zone, gate: Gate) -> AsyncIterator[Resolver]:
    made = Resolver("127.0.0.1", Upstreams([f"127.0.0.1:{zone.port}"]), gate, port=0, rounds=(0.3,))
    await made.start()
    yield made
    await made.stop()


async def sent(resolver: Resolver, message: bytes, *, stream: bool = False) -> bytes:
    if stream:
        reader, writer = await asyncio.open_connection("127.0.0.1", resolver.port)
        writer.write(struct.pack(">H", len(message)) + message)
        async with asyncio.timeout(10):
            (size,) = struct.unpack(">H", await reader.readexactly(2))
            found = await reader.readexactly(size)
        writer.close()
        await writer.wait_closed()
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as guest:
        guest.setblocking(False)
        guest.connect(("127.0.0.1", resolver.port))
        guest.send(message)
        async with asyncio.timeout(10):
            return await asyncio.get_running_loop().sock_recv(guest, 65535)


async def asked(
    resolver: Resolver, name: str, rdtype: str = "A", *, stream: bool = False, payload: int = 0
) -> dns.message.Message:
    question = dns.message.make_query(name, rdtype, use_edns=0 if payload else -1, payload=payload or 1232)
    answer = dns.message.from_wire(await sent(resolver, question.to_wire(), stream=stream))
    assert question.is_response(answer)
    assert answer.flags & dns.flags.RA
    return answer


def raw_question(name: bytes) -> bytes:
    """A question for a name whatever is in it."""
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b"."))
    return struct.pack(">HHHHHH", 1, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", 1, 1)


def addresses(answer: dns.message.Message) -> list[str]:
    return [
        record.address
        for each in answer.answer
        if each.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA)
        for record in each
    ]


def refused(resolver: Resolver) -> list[str]:
    return [each.name for each in resolver.refusals.of("sandbox")]


# What is answered


@pytest.mark.parametrize("stream", [False, True], ids=["datagram", "stream"])
async def test_an_allowed_name_is_open_before_its_answer_is_there(
    resolver: Resolver, gate: Gate, stream: bool
) -> None:
    found = await asked(resolver, "allowed.test", stream=stream)
    assert addresses(found) == ["192.0.2.1"]
    assert gate.opened == [("allowed.test", {"192.0.2.1": 60.0})]
    assert refused(resolver) == []


@pytest.mark.parametrize(
    ("name", "rdtype"),
    [
        ("other.test", "A"),
        ("test", "A"),
        (".", "NS"),
        ("sub.allowed.test", "A"),
        ("notallowed.test", "A"),
        ("allowed.test.evil.test", "A"),
        ("wild.test", "A"),
        ("notwild.test", "AAAA"),
        ("secret.other.test", "TXT"),
        ("1.2.0.192.in-addr.arpa", "PTR"),
        (r"allowed\046test", "A"),
        (r"a\046.wild.test", "A"),
        (r"x\000.wild.test", "A"),
    ],
)
async def test_any_other_name_is_refused_at_once_and_never_asked_for(
    resolver: Resolver, zone: Zone, gate: Gate, name: str, rdtype: str
) -> None:
    found = await asked(resolver, name, rdtype)
    assert found.rcode() == dns.rcode.NXDOMAIN
    assert found.answer == found.authority == found.additional == []
    assert zone.asked == [] and gate.opened == []
    assert refused(resolver) == [name]


async def test_a_client_that_can_hear_it_is_told_why(resolver: Resolver) -> None:
    found = await asked(resolver, "other.test", payload=1232)
    (option,) = found.options
    assert isinstance(option, dns.edns.EDEOption) and option.code == dns.edns.EDECode.BLOCKED


@pytest.mark.parametrize("name", ["ALLOWED.test", "aLLoWeD.TesT", "allowed.test."])
async def test_case_and_final_dot_do_not_matter_and_the_question_comes_back_as_it_was(
    resolver: Resolver, zone: Zone, gate: Gate, name: str
) -> None:
    found = await asked(resolver, name)
    assert addresses(found) == ["192.0.2.1"]
    assert found.question[0].name.to_text(omit_final_dot=True) == name.removesuffix(".")
    assert found.answer[0].name.to_text(omit_final_dot=True) == name.removesuffix(".")
    assert zone.asked == [("allowed.test", "A", 0)]  # letters in two cases could carry something out
    assert gate.opened[0][0] == "allowed.test"


async def test_a_wildcard_is_for_all_names_below(resolver: Resolver, zone: Zone, gate: Gate) -> None:
    for name in ("a.wild.test", "b.a.wild.test", "xn--bcher-kva.wild.test"):
        zone.put(name, f"{name} 60 A 192.0.2.9")
        assert addresses(await asked(resolver, name)) == ["192.0.2.9"]
    assert [name for name, _ in gate.opened] == ["a.wild.test", "b.a.wild.test", "xn--bcher-kva.wild.test"]


async def test_nothing_of_the_guests_own_goes_on_but_name_and_type(resolver: Resolver, zone: Zone) -> None:
    options = [dns.edns.GenericOption("65001", b"secret"), dns.edns.CookieOption(b"12345678", b"")]
    question = dns.message.make_query("allowed.test", "A", use_edns=0, options=options)
    question.additional.append(dns.rrset.from_text("secret.test.", 1, "IN", "TXT", "secret"))
    await sent(resolver, question.to_wire())
    assert zone.asked == [("allowed.test", "A", 0)]


async def test_aliases_lead_to_addresses_whatever_their_names(
    resolver: Resolver, zone: Zone, gate: Gate
) -> None:
    zone.put(
        "allowed.test",
        """
        cdn.test 300 A 192.0.2.3
        allowed.test 20 CNAME edge.cdn.test
        edge.cdn.test 300 CNAME cdn.test
        cdn.test 300 A 192.0.2.4
        """,
    )
    found = await asked(resolver, "allowed.test")
    assert sorted(addresses(found)) == ["192.0.2.3", "192.0.2.4"]
    assert [each.rdtype for each in found.answer] == [5, 5, 1]
    assert {each.ttl for each in found.answer} == {20}  # the answer lives as long as all of it
    assert gate.opened == [("allowed.test", {"192.0.2.3": 20.0, "192.0.2.4": 20.0})]


async def test_a_record_of_another_name_opens_nothing_and_is_not_passed_on(
    resolver: Resolver, zone: Zone, gate: Gate
) -> None:
    zone.put(
        "allowed.test",
        """
        allowed.test 60 A 192.0.2.1
        other.test 60 A 192.0.2.66
        test 60 A 192.0.2.67
        cdn.test 60 CNAME allowed.test
        allowed.test 60 AAAA 2001:db8::66
        """,
    )
    found = await asked(resolver, "allowed.test")
    assert addresses(found) == ["192.0.2.1"]
    assert len(found.answer) == 1
    assert gate.opened == [("allowed.test", {"192.0.2.1": 60.0})]


async def test_aliases_that_go_round_are_a_failure(resolver: Resolver, zone: Zone, gate: Gate) -> None:
    zone.put("allowed.test", "allowed.test 60 CNAME a.test\na.test 60 CNAME allowed.test")
    assert (await asked(resolver, "allowed.test")).rcode() == dns.rcode.SERVFAIL
    assert gate.opened == []


async def test_ipv6_addresses_are_opened_as_well(resolver: Resolver, zone: Zone, gate: Gate) -> None:
    zone.put("allowed.test", "allowed.test 60 AAAA 2001:db8::1")
    assert addresses(await asked(resolver, "allowed.test", "AAAA")) == ["2001:db8::1"]
    assert gate.opened == [("allowed.test", {"2001:db8::1": 60.0})]


@pytest.mark.parametrize("rdtype", ["HTTPS", "SVCB", "ANY", "AXFR"])
async def test_types_with_addresses_beside_the_name_are_empty(
    resolver: Resolver, zone: Zone, gate: Gate, rdtype: str
) -> None:
    found = await asked(resolver, "allowed.test", rdtype, stream=True)
    assert found.rcode() == dns.rcode.NOERROR and found.answer == []
    assert zone.asked == [] and gate.opened == []


async def test_other_types_are_answered_and_open_nothing(resolver: Resolver, zone: Zone, gate: Gate) -> None:
    zone.put(
        "allowed.test", 'allowed.test 60 TXT "v=1"\nallowed.test 60 MX 10 mail.test\nmail.test 9 A 192.0.2.6'
    )
    (record,) = (await asked(resolver, "allowed.test", "MX")).answer
    assert record[0].exchange.to_text() == "mail.test."
    (record,) = (await asked(resolver, "allowed.test", "TXT")).answer
    assert record[0].strings == (b"v=1",)
    assert gate.opened == []


@pytest.mark.parametrize(
    ("ttl", "given", "opened"),
    [(0, 0, 5.0), (3, 3, 5.0), (60, 60, 60.0), (604800, 86400, 86400.0), (1 << 31, 0, 5.0)],
)
async def test_an_address_is_open_as_long_as_the_answer_lives_within_bounds(
    resolver: Resolver, zone: Zone, gate: Gate, ttl: int, given: int, opened: float
) -> None:
    zone.put("allowed.test", f"allowed.test {ttl} A 192.0.2.1")
    found = await asked(resolver, "allowed.test")
    assert found.answer[0].ttl == given
    assert gate.opened == [("allowed.test", {"192.0.2.1": opened})]


@pytest.mark.parametrize("code", [dns.rcode.NXDOMAIN, dns.rcode.SERVFAIL, dns.rcode.NOTIMP])
async def test_what_an_upstream_says_of_an_allowed_name_is_passed_on(
    resolver: Resolver, zone: Zone, code: dns.rcode.Rcode
) -> None:
    zone.put("allowed.test", code=code)
    assert (await asked(resolver, "allowed.test")).rcode() == code
    assert refused(resolver) == []


# Sizes


async def test_a_long_answer_comes_by_stream_and_opens_then(
    resolver: Resolver, zone: Zone, gate: Gate
) -> None:
    zone.put("allowed.test", "\n".join(f"allowed.test 60 A 192.0.2.{number}" for number in range(1, 101)))
    cut = await asked(resolver, "allowed.test")
    assert cut.flags & dns.flags.TC and cut.answer == []
    assert gate.opened == []
    whole = await asked(resolver, "allowed.test", stream=True)
    assert len(addresses(whole)) == 100
    assert gate.opened[0][1].keys() == set(addresses(whole))
    assert zone.transports == ["udp", "tcp"] * 2


async def test_a_datagram_is_as_long_as_the_client_takes(resolver: Resolver, zone: Zone, gate: Gate) -> None:
    zone.put("allowed.test", "\n".join(f"allowed.test 60 A 192.0.2.{number}" for number in range(1, 61)))
    assert len(addresses(await asked(resolver, "allowed.test", payload=4096))) == 60
    assert (await asked(resolver, "allowed.test", payload=600)).flags & dns.flags.TC
    assert len(gate.opened) == 1


async def test_of_very_many_addresses_some_are_given_and_those_opened(
    resolver: Resolver, zone: Zone, gate: Gate
) -> None:
    zone.put("allowed.test", "\n".join(f"allowed.test 60 A 198.18.{n >> 8}.{n & 255}" for n in range(900)))
    found = addresses(await asked(resolver, "allowed.test", stream=True))
    assert len(found) == 128
    assert gate.opened[0][1].keys() == set(found)


async def test_an_answer_beyond_all_measure_is_a_failure(resolver: Resolver, zone: Zone, gate: Gate) -> None:
    zone.put("allowed.test", "\n".join(f"allowed.test 60 A 198.18.{n >> 8}.{n & 255}" for n in range(3000)))
    assert (await asked(resolver, "allowed.test", stream=True)).rcode() == dns.rcode.SERVFAIL
    assert gate.opened == []


# What is not as it should be


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda message: message[:2] + b"\x28" + message[3:], dns.rcode.NOTIMP),  # an update
        (lambda message: message[:-3], dns.rcode.FORMERR),
        (
            lambda message: message[:11] + b"\x01" + message[12:],
            dns.rcode.FORMERR,
        ),  # a record that is not there
    ],
    ids=["operation", "cut", "count"],
)
async def test_a_question_that_is_none_is_not_asked(
    resolver: Resolver, gate: Gate, change: Callable[[bytes], bytes], code: dns.rcode.Rcode
) -> None:
    question = dns.message.make_query("allowed.test", "A", use_edns=-1).to_wire()
    answer = await sent(resolver, change(question))
    assert answer[3] & 0x0F == code
    assert gate.opened == []


async def test_another_class_than_the_internets_is_refused(resolver: Resolver, zone: Zone) -> None:
    question = dns.message.make_query("allowed.test", "TXT", rdclass=dns.rdataclass.CH)
    assert (await sent(resolver, question.to_wire()))[3] & 0x0F == dns.rcode.NXDOMAIN
    assert zone.asked == []


async def test_a_question_beyond_all_measure_is_not_read(resolver: Resolver, zone: Zone) -> None:
    question = dns.message.make_query("allowed.test", "A", use_edns=-1)
    question.additional.extend(records("\n".join(f"x{n}.test 60 A 192.0.2.1" for n in range(100))))
    answer = await sent(resolver, question.to_wire(), stream=True)
    assert answer[3] & 0x0F == dns.rcode.FORMERR
    assert zone.asked == []


async def test_an_answer_that_cannot_be_read_is_a_failure(
    resolver: Resolver, zone: Zone, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    proper = zone.answer
    monkeypatch.setattr(zone, "answer", lambda asked, transport: proper(asked, transport)[:-2])
    assert (await asked(resolver, "allowed.test")).rcode() == dns.rcode.SERVFAIL
    assert gate.opened == []


# Policies that change


async def test_an_answer_under_a_policy_that_has_gone_opens_nothing_and_is_not_given(
    resolver: Resolver, gate: Gate, zone: Zone, monkeypatch: pytest.MonkeyPatch
) -> None:
    proper = zone.answer

    def answer(asked: bytes, transport: str) -> bytes:
        gate.policy = Policy(internet=False)
        return proper(asked, transport)

    monkeypatch.setattr(zone, "answer", answer)
    found = await asked(resolver, "allowed.test")
    assert found.rcode() == dns.rcode.SERVFAIL and found.answer == []
    assert gate.opened == []


async def test_what_cannot_be_opened_is_not_given(
    resolver: Resolver, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bool:
        raise HostFault("nft: no")

    gate.opens = fail
    found = await asked(resolver, "allowed.test")
    assert found.rcode() == dns.rcode.SERVFAIL and found.answer == []
    assert "nft: no" in caplog.text


async def test_each_question_of_a_stream_is_by_the_policy_of_then(resolver: Resolver, gate: Gate) -> None:
    question = dns.message.make_query("allowed.test", "A").to_wire()
    reader, writer = await asyncio.open_connection("127.0.0.1", resolver.port)
    codes = []
    for policy in (BY_NAME, Policy(internet=False), UNRESTRICTED):
        gate.policy = policy
        writer.write(struct.pack(">H", len(question)) + question)
        (size,) = struct.unpack(">H", await reader.readexactly(2))
        codes.append((await reader.readexactly(size))[3] & 0x0F)
    writer.close()
    await writer.wait_closed()
    assert codes == [dns.rcode.NOERROR, dns.rcode.NXDOMAIN, dns.rcode.NOERROR]
    assert len(gate.opened) == 1  # where all may be reached there is nothing to open


async def test_without_internet_and_names_nothing_is_answered(
    resolver: Resolver, zone: Zone, gate: Gate
) -> None:
    gate.policy = Policy(allow=(), internet=False)
    assert (await asked(resolver, "allowed.test")).rcode() == dns.rcode.NXDOMAIN
    assert zone.asked == []


async def test_who_has_no_slot_gets_no_answer(resolver: Resolver, zone: Zone, gate: Gate) -> None:
    gate.policy = None
    assert (await asked(resolver, "allowed.test")).rcode() == dns.rcode.REFUSED
    assert zone.asked == []


# A sandbox's own servers


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Zone]:
    """A server at an address and the one port that a sandbox can name servers by."""
    made = Zone(address="127.0.0.53", port=0)
    monkeypatch.setattr("agentenv.network.resolver._DNS_PORT", made.port)
    made.put("allowed.test", "allowed.test 60 A 192.0.2.53")
    yield made
    made.close()


@pytest.mark.parametrize("names", [(), ("allowed.test",)], ids=["everything", "names"])
async def test_a_sandboxs_own_servers_are_asked_in_the_place_of_the_nodes(
    resolver: Resolver, zone: Zone, own: Zone, gate: Gate, names: tuple[str, ...]
) -> None:
    servers = (IPv4Address("127.0.0.53"),)
    gate.policy = Policy(allow_names=names, internet=not names, dns_servers=servers)
    assert addresses(await asked(resolver, "allowed.test")) == ["192.0.2.53"]
    gate.policy = BY_NAME
    assert addresses(await asked(resolver, "allowed.test")) == ["192.0.2.1"]
    assert len(own.asked) == len(zone.asked) == 1


@pytest.mark.parametrize("names", [(), ("allowed.test",)], ids=["everything", "names"])
async def test_a_server_that_the_node_denies_is_not_asked(
    resolver: Resolver, zone: Zone, own: Zone, gate: Gate, names: tuple[str, ...]
) -> None:
    gate.denied = {"127.0.0.53"}
    gate.policy = Policy(allow_names=names, internet=not names, dns_servers=(IPv4Address("127.0.0.53"),))
    assert (await asked(resolver, "allowed.test")).rcode() in (dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN)
    assert own.asked == zone.asked == []


async def test_with_no_server_to_ask_no_name_is_looked_up(resolver: Resolver, zone: Zone, gate: Gate) -> None:
    gate.policy = Policy(allow_names=("allowed.test",), internet=False, dns_servers=())
    assert (await asked(resolver, "allowed.test")).rcode() == dns.rcode.NXDOMAIN
    assert zone.asked == [] and refused(resolver) == ["allowed.test"]


async def test_refusals_are_said_in_the_log_with_the_sandbox(
    resolver: Resolver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="agentenv.network.refusals"):
        for number in range(5):
            await asked(resolver, f"other{number}.test")
    (record,) = caplog.records
    assert "sandbox sandbox" in record.getMessage() and "other0.test" in record.getMessage()
    assert len(refused(resolver)) == 5


async def test_names_with_other_letters_are_asked_for_in_ascii(
    resolver: Resolver, zone: Zone, gate: Gate
) -> None:
    gate.policy = parse({"allowOut": ["BÜCHER.test"], "denyOut": ["0.0.0.0/0"]}, None)
    zone.put("xn--bcher-kva.test", "xn--bcher-kva.test 60 A 192.0.2.8")
    assert addresses(await asked(resolver, "bücher.test")) == ["192.0.2.8"]
    assert (await sent(resolver, raw_question("bücher.test".encode())))[3] & 0x0F == dns.rcode.NXDOMAIN
