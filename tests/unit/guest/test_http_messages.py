"""Heads, queries and framing: pure functions of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest import http
from agentenv.guest.http import HttpError, Request, Response


def test_head() -> None:
    request = http.parse_head(
        b"POST /a%20b/%C3%BC?x=1&x=%262+3&y&=z HTTP/1.1\r\nHost: h:1\r\nX-A:  v \r\nx-a: w\r\nEmpty:"
    )
    assert (request.method, request.path, request.raw_path) == ("POST", "/a b/ü", "/a%20b/%C3%BC")
    assert request.headers == {"host": "h:1", "x-a": "v, w", "empty": ""}
    assert request.query == {"x": ["1", "&2 3"], "y": [""], "": ["z"]}
    assert (request.query_one("x"), request.query_one("none")) == ("1", None)


@pytest.mark.parametrize(
    ("target", "path"),
    [("http://host:80/a/b?c", "/a/b"), ("http://host", "/"), ("/a#b?c", "/a"), ("*", "*")],
)
def test_targets(target: str, path: str) -> None:
    assert http.parse_head(f"GET {target} HTTP/1.1".encode()).path == path


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /", 400),
        (b"GET  / HTTP/1.1", 400),
        (b"G-T / HTTP/1.1", 400),
        (b"GET / HTTP/2.0", 505),
        (b"GET / SMTP", 400),
        (b"GET / HTTP/1.1\r\nno colon", 400),
        (b"GET / HTTP/1.1\r\na : b", 400),
        (b"GET / HTTP/1.1\r\n folded: b", 400),
        (b"GET / HTTP/1.1\r\n: b", 400),
        (b"GET / HTTP/1.1\r\na: b\nc: d", 400),
        (b"GET / HTTP/1.1\r\na: b\0c", 400),
        (b"\xff\xfe / HTTP/1.1", 400),
    ],
)
def test_malformed_heads(head: bytes, status: int) -> None:
    with pytest.raises(HttpError) as caught:
        http.parse_head(head)
    assert caught.value.status == status


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_an_http_error(data: bytes) -> None:
    try:
        request = http.parse_head(data)
    except HttpError as error:
        assert error.status in (400, 505)
    else:
        assert isinstance(request.path, str)
        assert isinstance(request.query, dict)


@pytest.mark.parametrize(
    ("headers", "framing"),
    [
        ({}, (False, 0)),
        ({"content-length": "12"}, (False, 12)),
        ({"transfer-encoding": "Chunked"}, (True, 0)),
    ],
)
def test_framing(headers: dict[str, str], framing: tuple[bool, int]) -> None:
    assert http.body_framing(headers) == framing


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": "-1"}, 400),
        ({"content-length": "1, 1"}, 400),
        ({"content-length": "²"}, 400),
        ({"content-length": "1", "transfer-encoding": "chunked"}, 400),
        ({"transfer-encoding": "gzip, chunked"}, 501),
    ],
)
def test_bad_framing(headers: dict[str, str], status: int) -> None:
    with pytest.raises(HttpError) as caught:
        http.body_framing(headers)
    assert caught.value.status == status


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_percent_decoding_undoes_encoding(text: str) -> None:
    from urllib.parse import quote, quote_plus

    assert http.query_decode(quote(text, safe="")) == text
    assert http.parse_query(f"k={quote_plus(text)}") == {"k": [text]}


@pytest.mark.parametrize(
    ("text", "decoded"), [("%", "%"), ("%4", "%4"), ("%zz%41", "%zzA"), ("%FF", "\udcff")]
)
def test_odd_escapes_stay(text: str, decoded: str) -> None:
    assert http.query_decode(text) == decoded


def test_response_heads() -> None:
    origin = Request("GET", "/", "HTTP/1.1", {"origin": "http://a"})
    head = http.response_head(
        Response(201, content_type="text/plain"), origin, "content-length: 3", keep=False
    )
    lines = head.decode().split("\r\n")
    assert lines[:3] == ["HTTP/1.1 201 Created", "content-type: text/plain", "content-length: 3"]
    assert "access-control-allow-origin: *" in lines
    assert lines[-3:] == ["connection: close", "", ""]


@pytest.mark.parametrize(
    ("version", "connection", "closes"),
    [
        ("HTTP/1.1", None, False),
        ("HTTP/1.1", "Close", True),
        ("HTTP/1.0", None, True),
        ("HTTP/1.0", "Keep-Alive", False),
    ],
)
def test_who_wants_to_close(version: str, connection: str | None, closes: bool) -> None:
    headers = {} if connection is None else {"connection": connection}
    assert http.wants_close(Request("GET", "/", version, headers)) is closes


def test_routes() -> None:
    router = http.Router()

    async def handler(request: Request) -> Response:
        return Response()

    router.add("GET", "/a", handler)
    assert router.find(Request("GET", "/a?b", "HTTP/1.1", {})) is handler
    assert router.find(Request("HEAD", "/a", "HTTP/1.1", {})) is handler
    for method, path, status in (("GET", "/b", 404), ("POST", "/a", 405), ("GET", "/%61", 404)):
        with pytest.raises(HttpError) as caught:
            router.find(Request(method, path, "HTTP/1.1", {}))
        assert caught.value.status == status
