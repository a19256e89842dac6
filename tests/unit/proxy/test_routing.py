"""Where requests go, as a table."""

from __future__ import annotations

import pytest

from agentenv.errors import InvalidRequest
from agentenv.proxy.head import RequestHead, parse_request
from agentenv.proxy.routing import Signed, Target, decide, is_internal

E2B = ("E2b-Sandbox-Id: abc1", "E2b-Sandbox-Port: 8080")
OWN = ("x-agentenv-sandbox-id: abc1", "X-AgentENV-Target-Port: 8080")


def request(host: str, target: str, *fields: str, method: str = "GET") -> RequestHead:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *fields]
    return parse_request("".join(line + "\r\n" for line in lines).encode())


@pytest.mark.parametrize(
    ("host", "target", "fields", "expected"),
    [
        # The host names the sandbox, whatever else is said, and any path is the guest's.
        ("8080-abc1.box.test", "/x", (), Target("abc1", 8080, b"/x", True)),
        ("8080-abc1.box.test:8443", "/x", (), Target("abc1", 8080, b"/x", True)),
        ("8080-ABC1.Box.Test.", "/x", (), Target("abc1", 8080, b"/x", True)),
        ("8080-abc1-6532622b.box.test", "/x", (), Target("abc1", 8080, b"/x", True)),
        ("9-zz.box.test", "/proxy/x", E2B, Target("zz", 9, b"/proxy/x", True)),
        ("9-zz.box.test", "/sandboxes", (), Target("zz", 9, b"/sandboxes", True)),
        ("9-zz.box.test", "/files?signature=s", (), Target("zz", 9, b"/files?signature=s", True)),
        ("api.test", "http://9-zz.box.test:1/p?q", (), Target("zz", 9, b"/p?q", True)),
        ("api.test", "http://9-zz.box.test", (), Target("zz", 9, b"/", True)),
        # Headers, at any other host.
        ("localhost:8000", "/a//b%2F", E2B, Target("abc1", 8080, b"/a//b%2F", True)),
        ("sandbox.box.test", "/", E2B, Target("abc1", 8080, b"/", True)),
        ("x.8080-abc1.box.test", "/", E2B, Target("abc1", 8080, b"/", True)),
        ("127.0.0.1", "/", OWN, Target("abc1", 8080, b"/", False)),
        ("[::1]:8000", "/", E2B + OWN, Target("abc1", 8080, b"/", True)),
        ("127.0.0.1", "/proxy", OWN, Target("abc1", 8080, b"/", False)),
        ("127.0.0.1", "/proxy?a=b", E2B, Target("abc1", 8080, b"/?a=b", True)),
        ("127.0.0.1", "/proxy/x//y?z", OWN, Target("abc1", 8080, b"/x//y?z", False)),
        ("127.0.0.1", "/proxyx", E2B, Target("abc1", 8080, b"/proxyx", True)),
        # The rest is the API's.
        ("localhost", "/sandboxes", (), None),
        ("box.test", "/", (), None),
        ("8080-abc1.other.test", "/", (), None),
        ("8080-abc1.evilbox.test", "/", (), None),
        ("abc1.box.test", "/", (), None),
        ("8080-.box.test", "/", (), None),
        ("localhost", "/proxyx", (), None),
        ("localhost", "/files?path=a", (), None),
        ("localhost", "/templates/files?signature=v1_x", (), None),
    ],
)
def test_routes(host: str, target: str, fields: tuple[str, ...], expected: Target | None) -> None:
    assert decide(request(host, target, *fields), "box.test:8443") == expected


@pytest.mark.parametrize(
    ("host", "target", "fields"),
    [
        ("0-abc1.box.test", "/", ()),
        ("65536-abc1.box.test", "/", ()),
        ("localhost", "/", E2B[:1]),
        ("localhost", "/", E2B[1:]),
        ("localhost", "/", OWN[:1]),
        ("localhost", "/", (E2B[0], OWN[1])),
        ("localhost", "/", ("E2b-Sandbox-Id: abc1", "E2b-Sandbox-Port: 0")),
        ("localhost", "/", ("E2b-Sandbox-Id: abc1", "E2b-Sandbox-Port: 80a")),
        ("localhost", "/", ("E2b-Sandbox-Id: abc1", "E2b-Sandbox-Port: +80")),
        ("localhost", "/", ("E2b-Sandbox-Id: abc1", "E2b-Sandbox-Port: 65536")),
        ("localhost", "/", ("E2b-Sandbox-Id:", "E2b-Sandbox-Port: 80")),
        ("localhost", "/", ("E2b-Sandbox-Id: a b", "E2b-Sandbox-Port: 80")),
        ("localhost", "/", (*E2B, "x-agentenv-sandbox-id: other", OWN[1])),
        ("localhost", "/proxy", ()),
        ("localhost", "/proxy/x", ()),
    ],
)
def test_half_told_is_refused(host: str, target: str, fields: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        decide(request(host, target, *fields), "box.test")


def test_a_file_url_is_known_by_its_signature() -> None:
    target = "/files?path=%2Fhome%2Fa+b&username=user&signature=v1_abc&signature_expiration=17"
    expected = Signed("/home/a b", "read", "user", "v1_abc", "17", target.encode())
    assert decide(request("localhost", target), "box.test") == expected
    assert decide(request("localhost", "/files?signature=s", method="POST"), "box.test") == Signed(
        "", "write", "", "s", None, b"/files?signature=s"
    )


def test_a_browser_asking_to_upload_is_answered_for_the_upload() -> None:
    asked = request(
        "localhost", "/files?signature=s", "Access-Control-Request-Method: POST", method="OPTIONS"
    )
    where = decide(asked, "box.test")
    assert isinstance(where, Signed)
    assert where.operation == "write"


@pytest.mark.parametrize("method", ["DELETE", "OPTIONS"])
def test_a_signature_signs_reads_and_writes_only(method: str) -> None:
    assert decide(request("localhost", "/files?signature=s", method=method), "box.test") is None


@pytest.mark.parametrize(
    "path",
    [
        "/init",
        "/INIT",
        "//init",
        "/./init",
        "/x/../init",
        "/init/",
        "/init/x",
        "/%69nit",
        "/%2569nit",
        "/%2e/init",
        "/x/%2e%2e/init",
        "/init;a=b",
        "/init%00",
        "/%20init",
        "/init%3fx",
        "/\\init",
        "/forward",
        "/%46orward",
        "/freeze",
        "/unfreeze",
        "/collapse",
        "/fsfreeze",
        "/fsthaw",
        "/upgrade",
    ],
)
def test_internal_paths_are_known_in_any_writing(path: str) -> None:
    assert is_internal(path.encode())


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/initx",
        "/forwarded",
        "/files",
        "/x/init",
        "/init/../files",
        "/process.Process/Start",
        "*",
    ],
)
def test_other_paths_are_not_internal(path: str) -> None:
    assert not is_internal(path.encode())
