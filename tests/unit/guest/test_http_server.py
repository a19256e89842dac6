"""The HTTP server over real sockets, byte by byte."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from support.http_probe import probe_server


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with probe_server() as (port, process):
        yield port
        assert process.poll() is None


@pytest.fixture
def wire(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
        yield wire


def _answer(wire: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One response from the wire: status, headers, body (chunks joined)."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = wire.recv(1)
        assert byte, head
        head += byte
    first, *lines = head.decode().strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(_line(wire), 16):
            body += _exactly(wire, size)
            assert _line(wire) == b""
        assert _line(wire) == b""
    else:
        body = _exactly(wire, int(headers.get("content-length", 0)))
    return int(first.split()[1]), headers, body


def _line(wire: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        byte = wire.recv(1)
        assert byte
        line += byte
    return line[:-2]


def _exactly(wire: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = wire.recv(size - len(data))
        assert more
        data += more
    return data


def test_keep_alive_and_pipelining(wire: socket.socket) -> None:
    wire.sendall(
        b"GET /empty HTTP/1.1\r\n\r\n" * 2 + b"\r\nPOST /echo HTTP/1.1\r\ncontent-length: 3\r\n\r\nabcGET /no"
    )
    assert _answer(wire)[:2] == (200, {"content-length": "0"})
    assert _answer(wire)[0] == 200
    assert json.loads(_answer(wire)[2]) == {"method": "POST", "size": 3, "peer": "127.0.0.1"}
    wire.sendall(b"thing HTTP/1.1\r\nconnection: close\r\n\r\n")
    status, headers, body = _answer(wire)
    assert (status, headers, body) == (204, {"connection": "close"}, b"")
    assert wire.recv(1) == b""


def test_a_head_byte_by_byte(wire: socket.socket) -> None:
    head = b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    for byte in head + b"3;a=b\r\nabc\r\nA\r\n0123456789\r\n0\r\nx: y\r\n\r\n":
        wire.sendall(bytes((byte,)))
    assert json.loads(_answer(wire)[2])["size"] == 13


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbroken\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na: " + b"x" * 70000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000, 431),
        (b"POST /echo HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n", 400),
        (b"POST /echo HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n", 413),
    ],
)
def test_bad_requests_are_answered_and_closed(wire: socket.socket, data: bytes, status: int) -> None:
    wire.sendall(data)
    got, headers, body = _answer(wire)
    assert got == status
    assert json.loads(body)["code"] == status
    assert headers["content-type"] == "application/json"
    wire.shutdown(socket.SHUT_WR)
    assert wire.recv(1) == b""


def test_continue_is_sent_when_the_body_is_read(wire: socket.socket) -> None:
    wire.sendall(b"POST /echo HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    assert _line(wire) == b"HTTP/1.1 100 Continue"
    wire.recv(2)
    wire.sendall(b"ab")
    assert json.loads(_answer(wire)[2])["size"] == 2


def test_no_continue_for_a_body_that_is_not_wanted(wire: socket.socket) -> None:
    wire.sendall(b"POST /ignore HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    status, headers, _ = _answer(wire)
    assert (status, headers["connection"]) == (200, "close")


def test_an_unread_body_is_skipped(wire: socket.socket) -> None:
    wire.sendall(
        b"POST /ignore HTTP/1.1\r\ncontent-length: 50000\r\n\r\n"
        + b"x" * 50000
        + b"GET /empty HTTP/1.1\r\n\r\n"
    )
    assert _answer(wire)[2] == b"ignored"
    assert _answer(wire)[0] == 200


def test_a_large_unread_body_ends_the_connection_after_the_answer(port: int) -> None:
    answer = httpx.post(f"http://127.0.0.1:{port}/ignore", content=b"x" * 5_000_000)
    assert answer.content == b"ignored"


def test_full_duplex(wire: socket.socket) -> None:
    wire.sendall(b"POST /mirror HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
    while _line(wire):
        pass
    for word in (b"one", b"three"):
        wire.sendall(b"%x\r\n%b\r\n" % (len(word), word))
        assert _line(wire) == b"%x" % len(word)
        assert _line(wire) == word
    wire.sendall(b"0\r\n\r\n")
    assert (_line(wire), _line(wire)) == (b"0", b"")
    wire.sendall(b"GET /empty HTTP/1.1\r\n\r\n")
    assert _answer(wire)[0] == 200


def test_a_client_that_leaves_ends_the_stream(port: int) -> None:
    before = httpx.get(f"http://127.0.0.1:{port}/descriptors").json()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
        wire.sendall(b"GET /endless HTTP/1.1\r\n\r\n")
        while b"begun" not in wire.recv(4096):
            pass
    assert httpx.get(f"http://127.0.0.1:{port}/left", timeout=20).json() is True
    assert httpx.get(f"http://127.0.0.1:{port}/descriptors").json() == before


def test_a_stream_that_fails_is_cut_off(wire: socket.socket) -> None:
    wire.sendall(b"GET /breaks HTTP/1.1\r\n\r\n")
    data = b""
    while more := wire.recv(4096):
        data += more
    assert data.endswith(b"\r\n4\r\nhalf\r\n")  # and no end mark


def test_a_handler_that_fails(wire: socket.socket) -> None:
    wire.sendall(b"GET /fails HTTP/1.1\r\n\r\nGET /empty HTTP/1.1\r\n\r\n")
    status, _, body = _answer(wire)
    assert (status, json.loads(body)["message"]) == (500, "the agent failed: RuntimeError: fails on purpose")
    assert _answer(wire)[0] == 200


def test_sized_stream_and_file(wire: socket.socket) -> None:
    for line in (b"GET /sized", b"GET /span", b"HEAD /span", b"GET /nothing"):
        wire.sendall(line + b" HTTP/1.1\r\n\r\n")
    assert _answer(wire)[1:] == ({"content-length": "6"}, b"abcdef")
    assert _answer(wire)[1:] == ({"content-length": "3000000"}, b"x" * 3_000_000)
    while _line(wire):  # the head alone
        pass
    assert _answer(wire)[0] == 204


def test_http_1_0(wire: socket.socket) -> None:
    wire.sendall(b"POST /mirror HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc")
    data = b""
    while more := wire.recv(4096):
        data += more
    assert b"connection: close" in data
    assert b"chunked" not in data
    assert data.endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/none", 404), ("DELETE", "/echo", 405)])
def test_no_such_route(port: int, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, f"http://127.0.0.1:{port}{path}")
    assert (answer.status_code, answer.json()["code"]) == (status, status)


def test_cors(port: int) -> None:
    asked = {
        "origin": "http://a",
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-access-token",
    }
    answer = httpx.options(f"http://127.0.0.1:{port}/echo", headers=asked)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "x-access-token"
    assert "access-control-allow-origin" in httpx.get(f"http://127.0.0.1:{port}/empty", headers=asked).headers
