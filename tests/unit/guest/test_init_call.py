"""/init, /health, /envs and the token, on an agent that is process 1 of namespaces of its own."""

from __future__ import annotations

import base64
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.core_agent import OWN_MACHINE, collect, command, core_agent, run, shell, stream

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for namespaces")

# In the mount namespace, what the agent may write is a copy, or empty.
_COPIES = (
    "mkdir -p {0}/etc {0}/run {0}/share && cp -a /etc/passwd /etc/group /etc/hosts /etc/ssl {0}/etc/ && "
    "mount --bind {0}/etc /etc && mount --bind {0}/run /run && mount --bind {0}/share /usr/local/share && "
    'exec "$@"'
)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    prefix = (*OWN_MACHINE, "sh", "-c", _COPIES.format(tmp_path), "sh")
    with core_agent("--init", prefix=prefix) as url:
        yield url


def _init(url: str, **message: Any) -> httpx.Response:
    return httpx.post(f"{url}/init", json=message)


def test_identity(url: str, tmp_path: Path) -> None:
    pem = "-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n"
    machine = "0123456789abcdef" * 2
    host = socket.gethostname()
    for name in ("first", "second"):
        answer = _init(
            url,
            hostname=name,
            machineId=machine,
            sandboxId="abc",
            templateId="base",
            entropy=base64.b64encode(os.urandom(64)).decode(),
            envVars={"A": "b"},
            caBundle=pem,
            volumeMounts=[],
            hyperloopIP="10.0.0.1",
        )
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["x-envd-version"] == "0.6.13"
    assert socket.gethostname() == host
    assert shell(url, "hostname; uname -n").stdout == b"second\nsecond\n"
    assert (tmp_path / "etc/hostname").read_text() == "second\n"
    hosts = (tmp_path / "etc/hosts").read_text()
    assert (hosts.count("127.0.1.1\tsecond"), hosts.count("\tfirst\t"), "localhost" in hosts) == (1, 0, True)
    assert (tmp_path / "etc/machine-id").read_text() == machine + "\n"
    assert (tmp_path / "run/e2b/.E2B_SANDBOX").read_text() == "true"
    assert (tmp_path / "run/e2b/.E2B_SANDBOX_ID").read_text() == "abc"
    assert (tmp_path / "run/e2b/.E2B_TEMPLATE_ID").read_text() == "base"
    bundle = (tmp_path / "etc/ssl/certs/ca-certificates.crt").read_text()
    assert bundle.count(pem) == 1
    assert (tmp_path / "share/ca-certificates/agentenv.crt").read_text() == pem
    shown = httpx.get(f"{url}/envs").json()
    trusting = dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT"), shown["SSL_CERT_FILE"])
    assert shown["SSL_CERT_FILE"].endswith("/ca-certificates.crt")
    assert shown == {
        "E2B_SANDBOX": "true",
        "E2B_SANDBOX_ID": "abc",
        "E2B_TEMPLATE_ID": "base",
        "A": "b",
        "NODE_EXTRA_CA_CERTS": "/usr/local/share/ca-certificates/agentenv.crt",
        **trusting,
    }
    assert b"\nE2B_SANDBOX_ID=abc\n" in run(url, "env").stdout


def test_variables_are_replaced_and_requests_win(url: str) -> None:
    _init(url, envVars={"A": "1", "B": "1"}, sandboxId="one")
    _init(url, envVars={"B": "2", "PATH": "/bin:/usr/bin"})
    lines = run(url, "env", envs={"B": "3"}).stdout.decode().split("\n")
    assert {"B=3", "E2B_SANDBOX_ID=one", "PATH=/bin:/usr/bin"} <= set(lines)
    assert not any(line.startswith("A=") for line in lines)
    _init(url, defaultUser="nobody")  # without envVars they stay
    assert httpx.get(f"{url}/envs").json()["B"] == "2"


def test_default_user_and_directory(url: str) -> None:
    _init(url, defaultUser="nobody", defaultWorkdir="/usr/lib")
    done = shell(url, "id -un; pwd")
    assert done.stdout == b"nobody\n/usr/lib\n"
    assert shell(url, "id -un", user="root").stdout == b"root\n"
    _init(url, defaultWorkdir="")
    assert shell(url, "pwd", user="root").stdout.decode().strip() == "/root"


def test_token(url: str) -> None:
    _init(url, accessToken="secret")
    body = {
        "code": 401,
        "message": "unauthorized access, please provide a valid access token or method signing if supported",
    }
    for token in (None, b"wrong", "sécret".encode()):
        headers = {} if token is None else {b"x-access-token": token}
        for path in ("/envs", "/metrics", "/none"):
            answer = httpx.get(f"{url}{path}", headers=headers)
            assert (answer.status_code, answer.json()) == (401, body)
        answer = httpx.post(f"{url}/process.Process/List", json={}, headers=headers)
        assert (answer.status_code, answer.json()) == (401, body)
    assert httpx.get(f"{url}/health").status_code == 204
    right = {"X-Access-Token": "secret"}
    assert httpx.get(f"{url}/envs", headers=right).status_code == 200
    with stream(url, "Start", command("true"), X_Access_Token="secret") as events:
        assert collect(events).code == 0
    assert _init(url, accessToken=None).status_code == 204
    assert httpx.get(f"{url}/envs").status_code == 200


def test_a_new_lifecycle_drops_the_connections_of_the_old(url: str) -> None:
    """After a restore nobody is at their other end."""
    with stream(url, "Start", command("sleep", "60")) as events:
        pid = events.event()["start"]["pid"]
        _init(url, lifecycleID="one")
        with pytest.raises(httpx.RemoteProtocolError):
            events.next()
    with stream(url, "Connect", {"process": {"pid": pid}}) as events:
        assert events.event() == {"start": {"pid": pid}}
        _init(url, lifecycleID="one")  # the same: nothing happens
        httpx.post(
            f"{url}/process.Process/SendSignal", json={"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}
        )
        assert collect(events).end["status"] == "signal: killed"


@pytest.mark.parametrize(
    "message",
    [
        {"timestamp": "yesterday"},
        {"timestamp": {}},
        {"entropy": 3},
        {"hostname": "a b"},
        {"hostname": "x" * 65},
        {"machineId": "short"},
        {"envVars": {"A": 1}},
        {"envVars": []},
        {"accessToken": 3},
    ],
)
def test_bad_init_changes_nothing(url: str, message: dict[str, Any]) -> None:
    before = shell(url, "hostname; date +%s").stdout.split()
    answer = _init(url, defaultUser="nobody", **message)
    assert (answer.status_code, answer.json()["code"]) == (400, 400)
    after = shell(url, "hostname; date +%s; id -un").stdout.split()
    assert (after[0], after[2]) == (before[0], b"root")
    assert abs(int(after[1]) - time.time()) < 60


def test_init_is_for_the_gateway_alone(tmp_path: Path) -> None:
    with core_agent(gateway="169.254.0.22") as url:
        answer = _init(url, accessToken="x")
        assert (answer.status_code, answer.json()["code"]) == (403, 403)
        assert httpx.get(f"{url}/envs").status_code == 200


def test_process_one_reaps_strangers(url: str) -> None:
    """And keeps the statuses of its own, while strangers die by the dozen."""
    script = "for n in 1 2 3 4 5 6 7 8; do (sh -c 'sleep 0.05; exit 9' &) ; done; exit 7"
    assert {shell(url, script).code for _ in range(5)} == {7}
    deadline = time.monotonic() + 20
    while (left := shell(url, "ps -eo ppid,stat | grep -c '^ *1 *Z'").stdout.strip()) != b"0":
        assert time.monotonic() < deadline, left
    assert b"sleep" not in shell(url, "ps -eo comm").stdout
