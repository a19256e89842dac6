"""Connect over HTTP: unary and streamed, right and wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agentenv.guest import connect, http
from agentenv.guest.connect import ConnectError
from support.core_agent import envelope
from support.http_probe import probe_server

STREAM = {"content-type": "application/connect+json"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with probe_server() as (port, _process):
        yield f"http://127.0.0.1:{port}"


def _frames(data: bytes) -> list[tuple[int, Any]]:
    frames = []
    while data:
        size = int.from_bytes(data[1:5], "big")
        frames.append((data[0], json.loads(data[5 : 5 + size])))
        data = data[5 + size :]
    return frames


@pytest.mark.parametrize("body", [{"oneNumber": 1, "two": "2"}, {"one_number": 1, "two": 2.0, "other": []}])
def test_unary(url: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{url}/u", json=body, headers={"content-type": "application/json; charset=utf-8"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == {"sum": 3}


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"[" * 100000, b'{"two": true}', b'{"two": "x"}', b'{"two": 1.5}']
)
def test_unary_with_a_bad_message(url: str, body: bytes) -> None:
    answer = httpx.post(f"{url}/u", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")


def test_other_content_types_are_refused(url: str) -> None:
    for path in ("/u", "/s", "/c"):
        answer = httpx.post(f"{url}{path}", content=b"x", headers={"content-type": "application/proto"})
        assert answer.status_code == 415


def test_server_stream(url: str) -> None:
    answer = httpx.post(f"{url}/s", content=envelope({"count": 2}), headers=STREAM)
    assert answer.headers["content-type"] == "application/connect+json"
    assert _frames(answer.content) == [(0, {"number": 0}), (0, {"number": 1}), (2, {})]


@pytest.mark.parametrize(
    ("body", "before", "code"),
    [
        (envelope({"count": 1, "fail": True}), 1, "failed_precondition"),
        (envelope({"count": 0, "fail": True}), 0, "failed_precondition"),
        (envelope({"count": 1, "crash": True}), 1, "internal"),
        (b"", 0, "invalid_argument"),
        (b"\0\0\0\0\x05{", 0, "invalid_argument"),
        (b"\x01\0\0\0\x02{}", 0, "unimplemented"),
        (b"\0\xff\xff\xff\xff", 0, "resource_exhausted"),
        (b"\0\0\0\0\x01{", 0, "invalid_argument"),
    ],
)
def test_failing_streams_have_status_200_and_an_end(url: str, body: bytes, before: int, code: str) -> None:
    answer = httpx.post(f"{url}/s", content=body, headers=STREAM)
    assert answer.status_code == 200
    frames = _frames(answer.content)
    assert len(frames) == before + 1
    assert (frames[-1][0], frames[-1][1]["error"]["code"]) == (2, code)


def test_client_stream(url: str) -> None:
    body = envelope({"n": 1}) + envelope({"n": 2}) + b"\x02\0\0\0\x02{}"
    assert _frames(httpx.post(f"{url}/c", content=body, headers=STREAM).content) == [(0, {"sum": 3}), (2, {})]
    bad = httpx.post(f"{url}/c", content=envelope({"n": "x"}), headers=STREAM)
    assert _frames(bad.content)[0][1]["error"]["code"] == "invalid_argument"


def test_every_code_has_a_status() -> None:
    assert {connect.STATUS_OF[code] for code in ("invalid_argument", "failed_precondition")} == {400}
    for code, status in connect.STATUS_OF.items():
        assert connect.json_error(ConnectError(code, "m")).status == status


@pytest.mark.parametrize(
    ("text", "data"), [("YQ==", b"a"), ("YQ", b"a"), ("-_8=", b"\xfb\xff"), ("+/8", b"\xfb\xff"), ("", b"")]
)
def test_bytes_fields(text: str, data: bytes) -> None:
    assert connect.bytes_field({"d": text}, "d") == data


@pytest.mark.parametrize("value", ["Y", 3, ["YQ=="]])
def test_bad_bytes_fields(value: object) -> None:
    with pytest.raises(ConnectError):
        connect.bytes_field({"d": value}, "d")


@pytest.mark.parametrize(
    ("headers", "interval", "timeout"),
    [
        ({}, 90.0, None),
        ({"keepalive-ping-interval": "50", "connect-timeout-ms": "1500"}, 50.0, 1.5),
        ({"keepalive-ping-interval": "x"}, 90.0, None),
        ({"keepalive-ping-interval": "0"}, 90.0, None),
    ],
)
def test_timing_headers(headers: dict[str, str], interval: float, timeout: float | None) -> None:
    request = http.Request("POST", "/", "HTTP/1.1", headers)
    assert connect.keepalive_interval(request) == interval
    assert connect.timeout_of(request) == timeout


def test_a_bad_time_limit() -> None:
    with pytest.raises(ConnectError, match="Connect-Timeout-Ms"):
        connect.timeout_of(http.Request("POST", "/", "HTTP/1.1", {"connect-timeout-ms": "1e3"}))
