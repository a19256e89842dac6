"""The guests' name server, between real sockets on this host's loopback addresses."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import HostFault, InvalidRequest
from agentenv.network import resolver as module
from agentenv.network.messages import answers, failure, question_end
from agentenv.network.resolver import Resolver
from agentenv.network.upstreams import Upstreams, nameservers
from support import dns
from support.gate import Gate

QUESTION = dns.question("example.com")
SERVFAIL, REFUSED, NXDOMAIN, FORMERR = 2, 5, 3, 1


@pytest.fixture
def upstream() -> Iterator[Callable[..., dns.Upstream]]:
    made: list[dns.Upstream] = []

    def factory(**more: Any) -> dns.Upstream:
        made.append(dns.Upstream(port=0, **more))
        return made[-1]

    yield factory
    for one in made:
        one.close()


@asynccontextmanager
async def running(*servers: dns.Upstream | int, rounds: tuple[float, ...] = (0.1, 0.2)) -> Any:
    ports = [server if isinstance(server, int) else server.port for server in servers]
    upstreams = Upstreams([f"127.0.0.1:{port}" for port in ports])
    made = Resolver("127.0.0.1", upstreams, Gate(), port=0, rounds=rounds)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def asked(resolver: Resolver, question: bytes = QUESTION) -> bytes:
    """The answer to a datagram."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as guest:
        guest.setblocking(False)
        guest.connect(("127.0.0.1", resolver.port))
        guest.send(question)
        async with asyncio.timeout(10):
            return await loop.sock_recv(guest, 65535)


async def asked_by_stream(resolver: Resolver, *questions: bytes) -> list[bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", resolver.port)
    found = []
    async with asyncio.timeout(10):
        for question in questions:
            writer.write(struct.pack(">H", len(question)) + question)
        for _ in questions:
            (size,) = struct.unpack(">H", await reader.readexactly(2))
            found.append(await reader.readexactly(size))
    writer.close()
    await writer.wait_closed()
    return found


def unused_port() -> int:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def test_a_datagram_is_passed_on_under_another_id(upstream: Callable[..., dns.Upstream]) -> None:
    server = upstream()
    async with running(server) as resolver:
        found = [await asked(resolver, dns.question("example.com", identifier=number)) for number in range(9)]
    assert [struct.unpack_from(">H", answer)[0] for answer in found] == list(range(9))
    assert all(dns.addresses(answer) == ["192.0.2.77"] for answer in found)
    assert len(set(server.identifiers)) > 5  # drawn, not counted or kept


async def test_a_stream_carries_several_questions_and_stays_a_stream(
    upstream: Callable[..., dns.Upstream],
) -> None:
    server = upstream()
    async with running(server) as resolver:
        found = await asked_by_stream(resolver, QUESTION, dns.question("example.org", identifier=7))
    assert [answer[:2] for answer in found] == [b"\x12\x34", b"\x00\x07"]
    assert server.transports == ["tcp", "tcp"]


async def test_a_server_without_streams_is_asked_by_datagram(upstream: Callable[..., dns.Upstream]) -> None:
    server = upstream(streams=False)
    async with running(server) as resolver:
        (found,) = await asked_by_stream(resolver, QUESTION)
    assert dns.addresses(found) == ["192.0.2.77"]
    assert server.transports == ["udp"]


async def test_the_next_server_is_asked_when_one_is_silent_or_absent(
    upstream: Callable[..., dns.Upstream],
) -> None:
    silent, good = upstream(silent=True), upstream(give="192.0.2.5")
    async with running(silent, unused_port(), good) as resolver:
        assert dns.addresses(await asked(resolver)) == ["192.0.2.5"]
    assert silent.transports == ["udp"]


@pytest.mark.parametrize("code", [SERVFAIL, REFUSED])
async def test_the_next_server_is_asked_when_one_fails(
    upstream: Callable[..., dns.Upstream], code: int
) -> None:
    async with running(upstream(failing=code), upstream()) as resolver:
        assert dns.addresses(await asked(resolver)) == ["192.0.2.77"]


async def test_a_failure_that_all_report_is_passed_on(upstream: Callable[..., dns.Upstream]) -> None:
    one, two = upstream(failing=REFUSED), upstream(failing=SERVFAIL)
    async with running(one, two) as resolver:
        assert dns.code(await asked(resolver)) == REFUSED
    assert len(one.transports) == 1  # what a server said is not asked again


async def test_that_a_name_does_not_exist_is_an_answer(upstream: Callable[..., dns.Upstream]) -> None:
    unasked = upstream()
    async with running(upstream(failing=NXDOMAIN), unasked) as resolver:
        assert dns.code(await asked(resolver)) == NXDOMAIN
    assert unasked.transports == []


async def test_silence_becomes_a_failure_after_two_rounds(upstream: Callable[..., dns.Upstream]) -> None:
    server = upstream(silent=True)
    async with running(server) as resolver:
        answer = await asked(resolver)
    assert dns.code(answer) == SERVFAIL
    assert answer[:2] == QUESTION[:2]
    assert answer[12:] == QUESTION[12:]
    assert server.transports == ["udp", "udp"]


async def test_one_guest_does_not_take_all_the_room(
    upstream: Callable[..., dns.Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONCURRENT_PER_GUEST", 3)
    async with running(upstream(silent=True), rounds=(1.0,)) as resolver:
        first = [asyncio.create_task(asked(resolver)) for _ in range(3)]
        while resolver._running["127.0.0.1"] < 3:
            await asyncio.sleep(0)
        assert dns.code(await asked(resolver)) == SERVFAIL  # at once: the others still wait
        assert not any(task.done() for task in first)
        await asyncio.gather(*first)
        assert not resolver._running


async def test_streams_of_one_guest_are_bounded(
    upstream: Callable[..., dns.Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STREAMS_PER_GUEST", 1)
    async with running(upstream()) as resolver:
        _, writer = await asyncio.open_connection("127.0.0.1", resolver.port)
        writer.write(b"\0")
        while not resolver._streams:
            await asyncio.sleep(0)
        with pytest.raises((OSError, EOFError)):
            await asked_by_stream(resolver, QUESTION)
        writer.close()


@pytest.mark.parametrize("junk", [b"", b"x", b"\0" * 11, dns.answer(QUESTION)], ids=len)
async def test_what_is_no_question_gets_no_answer(upstream: Callable[..., dns.Upstream], junk: bytes) -> None:
    server = upstream()
    async with running(server) as resolver:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as guest:
            guest.sendto(junk, ("127.0.0.1", resolver.port))
        assert dns.addresses(await asked(resolver)) == ["192.0.2.77"]
        reader, writer = await asyncio.open_connection("127.0.0.1", resolver.port)
        writer.write(struct.pack(">H", len(junk)) + junk)
        assert await reader.read() == b""
        writer.close()
    assert server.transports == ["udp"]


async def test_two_questions_in_one_message_are_a_format_error(upstream: Callable[..., dns.Upstream]) -> None:
    async with running(upstream()) as resolver:
        assert dns.code(await asked(resolver, QUESTION[:4] + b"\0\2" + QUESTION[6:])) == FORMERR


async def test_a_taken_port_is_named(upstream: Callable[..., dns.Upstream]) -> None:
    async with running(1) as resolver:
        with pytest.raises(HostFault, match=f"127.0.0.1:{resolver.port}"):
            await Resolver("127.0.0.1", Upstreams(), Gate(), port=resolver.port).start()


async def test_stopping_ends_open_streams_and_questions(upstream: Callable[..., dns.Upstream]) -> None:
    async with running(upstream(silent=True), rounds=(60.0,)) as resolver:
        reader, writer = await asyncio.open_connection("127.0.0.1", resolver.port)
        writer.write(struct.pack(">H", len(QUESTION)) + QUESTION)
        while not resolver._running:
            await asyncio.sleep(0)
    async with asyncio.timeout(5):
        with pytest.raises((OSError, EOFError)):
            await reader.readexactly(1)
    writer.close()


def test_the_hosts_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    upstreams = Upstreams(file=file)
    assert upstreams.current() == [("127.0.0.1", 53)]
    file.write_text("# none\nsearch example.com\nnameserver 127.0.0.53\noptions edns0\n")
    assert upstreams.current() == [("127.0.0.53", 53)]
    replacement = tmp_path / "next"
    replacement.write_text("nameserver 192.0.2.1\nnameserver 2001:db8::1\n")
    os.replace(replacement, file)
    assert upstreams.current() == [("192.0.2.1", 53), ("2001:db8::1", 53)]
    file.unlink()
    assert upstreams.current() == [("127.0.0.1", 53)]


def test_lines_that_name_no_server_are_passed_over() -> None:
    text = "nameserver\nnameserver example.com\n nameserver 192.0.2.1 # first\nnameserver fe80::1%eth0\n"
    assert nameservers(text) == [("192.0.2.1", 53), ("fe80::1%eth0", 53)]


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        ("192.0.2.1", ("192.0.2.1", 53)),
        ("192.0.2.1:5353", ("192.0.2.1", 5353)),
        ("2001:db8::1", ("2001:db8::1", 53)),
        ("[2001:db8::1]:5353", ("2001:db8::1", 5353)),
        ("[2001:db8::1]", ("2001:db8::1", 53)),
    ],
)
def test_servers_in_the_settings(given: str, endpoint: tuple[str, int]) -> None:
    assert Upstreams([given]).current() == [endpoint]


@pytest.mark.parametrize(
    "given", ["dns.example.com", "192.0.2.1:", "192.0.2.1:dns", "", "[::1", "192.0.2.1:70000"]
)
def test_a_setting_that_is_no_address_is_the_callers_mistake(given: str) -> None:
    with pytest.raises(InvalidRequest, match="nameservers"):
        Upstreams([given])


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        (dns.answer(QUESTION), True),
        (dns.answer(dns.question("EXAMPLE.com")), True),
        (dns.answer(dns.question("example.com", identifier=1)), False),
        (dns.answer(dns.question("example.org")), False),
        (QUESTION, False),
        (dns.answer(QUESTION)[:11], False),
        (QUESTION[:2] + struct.pack(">HHHHH", 0x8185, 0, 0, 0, 0), True),
        (QUESTION[:2] + struct.pack(">HHHHH", 0x8180, 0, 0, 0, 0), False),
    ],
    ids=["right", "case", "id", "name", "echo", "short", "bare error", "bare success"],
)
def test_only_the_answer_to_the_question_is_taken(answer: bytes, accepted: bool) -> None:
    assert answers(answer, QUESTION) is accepted


@given(st.binary(min_size=12, max_size=600))
def test_failures_can_be_made_of_any_message(message: bytes) -> None:
    made = failure(message, SERVFAIL)
    assert made[:2] == message[:2]
    assert made[2] & 0x80 and dns.code(made) == SERVFAIL
    assert 12 <= question_end(message) <= len(message)
    assert len(made) <= len(message)
