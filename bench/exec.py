"""What running a command costs, layer by layer, in one run.

    eval "$(aenv env)"; python bench/exec.py [--rounds 50] [--json]

Each round runs `true` in a login shell four times: by a bare agent in the same guest (a loop that
reads a line and starts the shell), by our agent reached directly, by our agent through the node,
and through the E2B SDK. So the differences are: our agent's part, the node's part, the SDK's part.
Needs a running node on this host whose data directory is readable (the guest's address is in it).
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import socket
import struct
from urllib.parse import urlsplit

from e2b import Sandbox

from agentenv import config
from agentenv.records.database import Database
from agentenv.sandbox.records import decode
from measure import interleaved, show, summary

BARE_PORT = 9799
BARE_AGENT = f"""
import os, socket
listener = socket.create_server(("", {BARE_PORT}))
print("listening", flush=True)
client, _ = listener.accept()
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
stream = client.makefile("rb")
for line in stream:
    read, write = os.pipe()
    pid = os.posix_spawn("/bin/bash", ["/bin/bash", "-l", "-c", line.decode().strip()], os.environ,
                         file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
    os.close(write)
    output = b""
    while part := os.read(read, 65536):
        output += part
    os.close(read)
    os.waitpid(pid, 0)
    client.sendall(b"%d\\n" % len(output) + output)
"""


def start_request() -> bytes:
    """A Connect envelope of the call that the SDK makes for `commands.run("true")`."""
    message = json.dumps(
        {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "true"]}, "stdin": False}
    ).encode()
    return struct.pack(">BI", 0, len(message)) + message


class Direct:
    """Start calls over one kept connection, straight to the agent or through the node."""

    def __init__(self, host: str, port: int, sandbox: Sandbox, token: str | None) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=60)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._body = start_request()
        self._headers = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Authorization": "Basic " + base64.b64encode(b"user:").decode(),
            "E2b-Sandbox-Id": sandbox.sandbox_id,
            "E2b-Sandbox-Port": "49983",
        }
        if token:
            self._headers["X-Access-Token"] = token

    def run(self) -> None:
        self._connection.request("POST", "/process.Process/Start", self._body, self._headers)
        answer = self._connection.getresponse().read()
        if b'"exited":true' not in answer.replace(b" ", b""):
            raise SystemExit(f"the command did not end well: {answer!r}")


class Bare:
    """The bare agent in the guest, over one kept connection."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_connection((address, BARE_PORT), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")

    def run(self) -> None:
        self._socket.sendall(b"true\n")
        self._stream.read(int(self._stream.readline()))


def guest_of(sandbox_id: str) -> tuple[str, str | None]:
    """The address at which this host reaches the sandbox's guest, and its token."""
    database = Database(config.load().database)
    rows = database.query("SELECT document FROM sandboxes WHERE id = ?", (sandbox_id,))
    database.close()
    record = decode(rows[0]["document"])
    assert record.slot is not None
    return record.slot.address, record.access_token


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--template", default="base")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    sandbox = Sandbox.create(options.template, timeout=900, request_timeout=180)
    try:
        address, token = guest_of(sandbox.sandbox_id)
        sandbox.files.write("/home/user/bare.py", BARE_AGENT)
        command = sandbox.commands.run("exec python3 /home/user/bare.py", background=True, timeout=0)
        for stdout, _, _ in command:
            if stdout and "listening" in stdout:
                break
        node = urlsplit(os.environ["E2B_API_URL"])
        assert node.hostname is not None
        assert node.port is not None
        bare, direct = Bare(address), Direct(address, 49983, sandbox, token)
        proxied = Direct(node.hostname, node.port, sandbox, token)
        taken = interleaved(
            {
                "bare_agent": bare.run,
                "agent_direct": direct.run,
                "agent_through_node": proxied.run,
                "sdk": lambda: sandbox.commands.run("true"),
            },
            options.rounds,
        )
    finally:
        sandbox.kill()
    result: dict[str, object] = {name: summary(values) for name, values in taken.items()}
    p50 = {name: summary(values)["p50_ms"] for name, values in taken.items()}
    result["sdk_above_bare_ms"] = round(p50["sdk"] - p50["bare_agent"], 2)
    result["agent_above_bare_ms"] = round(p50["agent_direct"] - p50["bare_agent"], 2)
    result["node_part_ms"] = round(p50["agent_through_node"] - p50["agent_direct"], 2)
    result["sdk_ratio_to_bare"] = round(p50["sdk"] / p50["bare_agent"], 2)
    result["rounds"] = options.rounds
    show(result, options.json)


if __name__ == "__main__":
    main()
