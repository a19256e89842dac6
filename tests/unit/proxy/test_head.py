"""Heads: what is read out of them, what is refused, and how they are sent on."""

from __future__ import annotations

import pytest

from agentenv.proxy.forward import answer_to_client, request_to_api, request_to_guest
from agentenv.proxy.framing import Chunked, Malformed, Sized, UntilClose
from agentenv.proxy.head import (
    REMEMBERED_LIMIT,
    AnswerHead,
    CodingRefused,
    Memory,
    RequestHead,
    VersionRefused,
    answer_body,
    parse_answer,
    parse_request,
    request_body,
)


def lines(*text: str) -> bytes:
    return "".join(line + "\r\n" for line in text).encode("latin-1")


def test_a_request_is_read() -> None:
    head = parse_request(
        lines("POST /a?b HTTP/1.1", "HOST:  x.test ", "Connection: Close, TE", "content-length: 5", "N: é")
    )
    assert (head.method, head.path, head.host, head.minor) == (b"POST", b"/a?b", b"x.test", 1)
    assert not head.keep_alive
    assert head.value(b"n") == b"\xe9"
    assert head.value(b"m") == b""
    body = request_body(head)
    assert isinstance(body, Sized)
    assert body.remaining == 5


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        lines("GET"),
        lines("GET /"),
        lines("GET  / HTTP/1.1", "Host: a"),
        lines("GET / HTTP/1.1 ", "Host: a"),
        lines("GET /a b HTTP/1.1", "Host: a"),
        lines("G(T / HTTP/1.1", "Host: a"),
        lines("GET a HTTP/1.1", "Host: a"),
        lines("GET * HTTP/1.1", "Host: a"),
        lines("GET ftp://a/ HTTP/1.1", "Host: a"),
        lines("GET / HTTP/1.1"),
        lines("GET / HTTP/1.1", "Host: a", "Host: a"),
        lines("GET / HTTP/1.1", "Host: " + "a" * 513),
        lines("GET http://" + "a" * 513 + "/ HTTP/1.1", "Host: a"),
        lines("GET / HTTP/1.1", "Host: a", "X : y"),
        lines("GET / HTTP/1.1", "Host: a", "X: y", " folded"),
        lines("GET / HTTP/1.1", "Host: a", "\tfolded"),
        lines("GET / HTTP/1.1", "Host: a", ": y"),
        lines("GET / HTTP/1.1", "Host: a", "no colon"),
        lines("GET / HTTP/1.1", "Host: a", "X: a\x00b"),
        lines("GET / HTTP/1.1", "Host: a", "X: a\rb"),
        lines("GET / HTTP/1.1", "Host: a", "X: a\nY: b"),
        lines("GET / HTTP/1.1", "Host: a", "E2b-Sandbox-Id: a", "e2b-sandbox-id: b"),
        lines("GET / HTTP/1.1", "Host: a", "E2b-Traffic-Access-Token: a", "e2b-traffic-access-token: a"),
    ],
)
def test_malformed_requests_are_refused(raw: bytes) -> None:
    with pytest.raises(Malformed):
        parse_request(raw)


@pytest.mark.parametrize("version", ["HTTP/2.0", "HTTP/0.9", "HTTP/1.2"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(VersionRefused):
        parse_request(lines(f"GET / {version}", "Host: a"))


@pytest.mark.parametrize(
    "fields",
    [
        ("Content-Length: 1", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 0"),
        ("Content-Length: 1", "Content-Length: 2"),
        ("Content-Length: 1", "Content-Length: 1"),
        ("Content-Length: 1, 1",),
        ("Content-Length: -1",),
        ("Content-Length: +1",),
        ("Content-Length: 1 1",),
        ("Content-Length: 0x1",),
        ("Content-Length:",),
        ("Content-Length: 9999999999999999999",),
        ("Transfer-Encoding: chunked, chunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: identity",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding:",),
        ("Transfer-Encoding: \x0bchunked",),
    ],
)
def test_ambiguous_lengths_are_refused(fields: tuple[str, ...]) -> None:
    with pytest.raises(Malformed):
        request_body(parse_request(lines("POST / HTTP/1.1", "Host: a", *fields)))


def test_chunked_is_known_in_any_case_but_not_in_old_http() -> None:
    head = parse_request(lines("POST / HTTP/1.1", "Host: a", "transfer-encoding: Chunked"))
    assert isinstance(request_body(head), Chunked)
    with pytest.raises(Malformed):
        request_body(parse_request(lines("POST / HTTP/1.0", "Transfer-Encoding: chunked")))
    with pytest.raises(CodingRefused):
        request_body(parse_request(lines("POST / HTTP/1.1", "Host: a", "Transfer-Encoding: br")))


@pytest.mark.parametrize("fields", [(), ("Content-Length: 0",)])
def test_no_body_is_none(fields: tuple[str, ...]) -> None:
    assert request_body(parse_request(lines("POST / HTTP/1.1", "Host: a", *fields))) is None


@pytest.mark.parametrize(
    ("raw", "method", "expected"),
    [
        (lines("HTTP/1.1 200 OK", "Content-Length: 3"), b"GET", Sized),
        (lines("HTTP/1.1 200 OK", "Content-Length: 0"), b"GET", type(None)),
        (lines("HTTP/1.1 200 OK", "Content-Length: 3"), b"HEAD", type(None)),
        (lines("HTTP/1.1 304 Not Modified", "Content-Length: 3"), b"GET", type(None)),
        (lines("HTTP/1.1 204 No Content", "Transfer-Encoding: chunked"), b"GET", type(None)),
        (lines("HTTP/1.1 200 OK", "Transfer-Encoding: chunked"), b"GET", Chunked),
        (lines("HTTP/1.1 200 OK"), b"GET", UntilClose),
        (lines("HTTP/1.0 200"), b"GET", UntilClose),
        (lines("HTTP/1.1 100 Continue"), b"GET", type(None)),
    ],
)
def test_answers_are_framed(raw: bytes, method: bytes, expected: type) -> None:
    assert type(answer_body(parse_answer(raw), method)) is expected


@pytest.mark.parametrize(
    "raw",
    [
        lines("HTTP/1.1 200 OK", "Content-Length: 3", "Transfer-Encoding: chunked"),
        lines("HTTP/1.1 200 OK", "Transfer-Encoding: gzip"),
        lines("HTTP/1.0 200 OK", "Transfer-Encoding: chunked"),
        lines("HTTP/1.1 200 OK", "Content-Length: 3", "Content-Length: 4"),
        lines("HTTP/1.1 200 OK", "Content-Length: a"),
        lines("HTTP/2.0 200 OK"),
        lines("HTTP/1.1 20 OK"),
        lines("HTTP/1.1 2000 OK"),
        lines("200 OK"),
        lines("HTTP/1.1 200 OK", "X : y"),
        lines("HTTP/1.1 200 OK", "X: a\nY: b"),
    ],
)
def test_answers_that_could_be_read_in_two_ways_are_refused(raw: bytes) -> None:
    with pytest.raises(Malformed):
        answer_body(parse_answer(raw), b"GET")


def test_a_connections_memory_changes_nothing() -> None:
    memory: Memory[RequestHead] = Memory()
    fields = ("Host: a", "E2b-Sandbox-Id: abc", "Connection: x", "X: y", "Content-Length: 3")
    heads = [
        lines("POST /1 HTTP/1.1", *fields),
        lines("POST /2 HTTP/1.0", *fields),
        lines("POST /1 HTTP/1.1", *fields[:-1], "Content-Length: 4"),
        lines("POST /1 HTTP/1.1", *fields[:-1]),
        lines("GET / HTTP/1.1", "Host: a", "L: " + "l" * REMEMBERED_LIMIT),
        lines("GET / HTTP/1.0"),
    ]
    for raw in (heads[at] for at in (0, 0, 1, 0, 2, 2, 0, 3, 3, 4, 4, 3, 5, 5, 0)):
        head = parse_request(raw, memory)
        assert head == parse_request(raw)
        assert (parse_request(raw, memory) is head) == (len(raw) <= REMEMBERED_LIMIT)
    for bad in (fields + fields[-1:], (*fields, "Z : z"), (*fields, "Z: a\nb"), (*fields, " folded"), ("",)):
        for _ in range(2):  # what was refused is not remembered
            with pytest.raises(Malformed):
                parse_request(lines("POST /1 HTTP/1.1", *bad), memory)
        assert parse_request(heads[0], memory) == parse_request(heads[0])


def test_equal_fields_of_different_answers() -> None:
    memory: Memory[AnswerHead] = Memory()
    for start in ("HTTP/1.1 200 OK", "HTTP/1.1 404 Not Found", "HTTP/1.0 200 OK"):
        for fields in (("Content-Length: 3",), ("Content-Length: 3",), ("Connection: close", "X: y"), ()):
            raw = lines(start, *fields)
            assert parse_answer(raw, memory) == parse_answer(raw)


def test_what_a_guest_gets_to_see() -> None:
    raw = lines(
        "POST /old HTTP/1.1",
        "Accept: */*",
        "Host: 80-abc.box.test",
        "E2b-Sandbox-Id: abc",
        "x-agentenv-target-port: 80",
        "E2b-Traffic-Access-Token: secret",
        "X-Access-Token: token",
        "Connection: keep-alive, X-Hop, X-Access-Token, Content-Length",
        "X-Hop: 1",
        "TE: trailers",
        "Keep-Alive: 5",
        "Upgrade: h2c",
        "X-Forwarded-For: 1.2.3.4",
        "X-Forwarded-Host: lie",
        "Content-Length: 5",
        "Expect: 100-continue",
    )
    assert request_to_guest(parse_request(raw), b"/new", b"9.9.9.9", b"https", True) == lines(
        "POST /new HTTP/1.1",
        "Host: 80-abc.box.test",
        "Accept: */*",
        "E2b-Sandbox-Id: abc",
        "X-Access-Token: token",
        "Content-Length: 5",
        "Expect: 100-continue",
        "X-Forwarded-For: 1.2.3.4, 9.9.9.9",
        "X-Forwarded-Host: 80-abc.box.test",
        "X-Forwarded-Proto: https",
        "",
    )


def test_a_change_of_protocol_is_passed_on_when_asked_for() -> None:
    head = parse_request(lines("GET / HTTP/1.1", "Host: a", "Connection: Upgrade", "Upgrade: websocket"))
    asked = request_to_guest(head, b"/", b"1.1.1.1", b"http", True)
    assert asked.endswith(lines("Connection: Upgrade", "Upgrade: websocket", ""))
    assert b"pgrade" not in request_to_guest(head, b"/", b"1.1.1.1", b"http", False)


def test_old_http_stays_old() -> None:
    head = parse_request(lines("GET / HTTP/1.0"))
    sent = request_to_guest(head, b"/", b"1.1.1.1", b"http", False)
    assert sent.startswith(b"GET / HTTP/1.0\r\n")
    assert b"\r\nConnection: close\r\n" in sent


def test_the_api_gets_the_head_as_it_came_but_for_upgrades_other_than_websocket() -> None:
    raw = lines("GET /x HTTP/1.1", "Host: a", "Connection: Upgrade", "Upgrade: websocket")
    assert request_to_api(parse_request(raw)) == raw + b"\r\n"
    raw = lines("GET /x HTTP/1.1", "Host: a", "Connection: Upgrade", "Upgrade: h2c", "X: y")
    assert request_to_api(parse_request(raw)) == lines(
        "GET /x HTTP/1.1", "Host: a", "Connection: Upgrade", "X: y", ""
    )


def test_an_answer_without_hops_is_passed_as_it_is() -> None:
    raw = lines("HTTP/1.1 200 Fine", "x: 1", "Content-Length: 3")
    assert answer_to_client(parse_answer(raw), raw, False) == raw + b"\r\n"


def test_an_answer_loses_its_hops() -> None:
    raw = lines(
        "HTTP/1.0 200 OK", "A: b", "Connection: keep-alive, X-Hop", "Keep-Alive: timeout=5", "X-Hop: 1"
    )
    assert answer_to_client(parse_answer(raw), raw, True) == lines(
        "HTTP/1.1 200 OK", "A: b", "Connection: close", ""
    )
    raw = lines("HTTP/1.1 101 Switching Protocols", "Connection: upgrade", "Upgrade: websocket", "B: c")
    assert answer_to_client(parse_answer(raw), raw, False) == lines(
        "HTTP/1.1 101 Switching Protocols", "B: c", "Connection: Upgrade", "Upgrade: websocket", ""
    )
