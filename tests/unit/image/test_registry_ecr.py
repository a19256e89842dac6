"""AWS keys exchanged for credentials: the signature against AWS's own example, the rest against a stand-in of
ECR on loopback, since the real one is not reached from a test."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from agentenv.building.definition import define
from agentenv.errors import AenvError, Forbidden, Unreachable
from agentenv.image.credentials import AwsKeys, Credentials
from agentenv.image.registry import ecr
from agentenv.image.registry.access import Access
from support.building_parts import Workplace
from support.serving import serving

KEYS = AwsKeys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "us-east-1")
TOKEN = base64.b64encode(b"AWS:a long password").decode()
GOOD = {"authorizationData": [{"authorizationToken": TOKEN, "proxyEndpoint": "https://1.dkr.ecr"}]}


@dataclass
class Api:
    """The stand-in: what it answers, and what it was asked."""

    url: str = ""
    status: int = 200
    answer: Any = field(default_factory=lambda: GOOD)
    asked: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            api.asked.append(({name.lower(): value for name, value in self.headers.items()}, body))
            data = api.answer if isinstance(api.answer, bytes) else json.dumps(api.answer).encode()
            self.send_response(api.status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Handler) as port:
        api.url = f"http://127.0.0.1:{port}/"
        yield api


def test_the_signature_is_aws_own() -> None:
    # "post-vanilla" of AWS's Signature Version 4 test suite
    moment = 1440938160  # 20150830T123600Z
    sent = ecr.signed("https://example.amazonaws.com/", KEYS, moment, {}, b"", service="service")
    assert sent["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
        "SignedHeaders=host;x-amz-date, "
        "Signature=5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"
    )


async def test_keys_become_credentials(api: Api) -> None:
    found = await ecr.login(KEYS, Access(ecr_url=api.url))
    assert found == Credentials("AWS", "a long password")
    [(headers, body)] = api.asked
    assert headers["x-amz-target"].endswith(".GetAuthorizationToken")
    assert headers["host"] == api.url.split("/")[2]
    assert "Credential=AKIDEXAMPLE/" in headers["authorization"]
    assert (
        "/us-east-1/ecr/aws4_request, SignedHeaders=content-type;host;x-amz-date;" in headers["authorization"]
    )
    assert KEYS.secret_access_key not in repr((headers, body, KEYS))


@pytest.mark.parametrize(
    ("status", "answer", "kind", "words"),
    [
        (
            400,
            {"__type": "UnrecognizedClientException", "message": "token is invalid"},
            Forbidden,
            "is invalid",
        ),
        (403, b"<html>", Forbidden, "403"),
        (500, b"oops", Unreachable, "answers 500"),
        (200, {"authorizationData": []}, Unreachable, "no credentials"),
        (200, {"authorizationData": [{"authorizationToken": "%%%"}]}, Unreachable, "no credentials"),
        (200, [], Unreachable, "no credentials"),
    ],
)
async def test_what_cannot_be_exchanged(
    api: Api, status: int, answer: Any, kind: type[AenvError], words: str
) -> None:
    api.status, api.answer = status, answer
    with pytest.raises(kind, match=words) as caught:
        await ecr.login(KEYS, Access(ecr_url=api.url))
    assert KEYS.secret_access_key not in str(caught.value)


async def test_nobody_there() -> None:
    with pytest.raises(Unreachable, match="cannot be reached"):
        await ecr.login(KEYS, Access(ecr_url="http://127.0.0.1:9/"))


async def test_a_build_pulls_with_what_the_keys_give(api: Api, tmp_path: Path) -> None:
    place = Workplace(tmp_path, ecr_url=api.url)
    await place.start()
    try:
        _, build = place.builder.open("mine")
        place.builder.begin(build, define(image="1.dkr.ecr.us-east-1.amazonaws.com/app", credentials=KEYS))
        await place.builder._tasks[build.id]
        [(_, credentials)] = place.images.asked
        assert credentials == Credentials("AWS", "a long password")
        stored = b"".join(path.read_bytes() for path in tmp_path.glob("aenv.db*"))
        assert KEYS.secret_access_key.encode() not in stored
        assert b"a long password" not in stored
    finally:
        await place.builder.stop()
        await place.node.service.stop()
