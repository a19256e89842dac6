"""Network rules of real sandboxes, given and changed through E2B's client: what passes, and what is cut."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2b import ALL_TRAFFIC, CommandExitException, Sandbox, SandboxException

from agentenv.network import namespace
from support.nethost import run

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

ONE, OTHER = "198.18.7.10", "198.18.7.11"  # servers in an internet of the test's own
PORT = 7


class Internet:
    """A namespace beyond the host with two servers, which count the lines that they get."""

    def __init__(self) -> None:
        self.name = f"inet{os.getpid()}"
        self.lines: Counter[str] = Counter()
        self._listeners: list[socket.socket] = []
        self._came = threading.Condition()

    def open(self) -> None:
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.name, "type", "veth", "peer", "name", "far", "netns", self.name)
        run("ip", "addr", "add", "198.18.7.1/24", "dev", self.name)
        run("ip", "link", "set", self.name, "up")
        # A node sees to that itself, some seconds after there is a new way out.
        Path(f"/proc/sys/net/ipv4/conf/{self.name}/forwarding").write_text("1")
        with namespace.inside(Path("/run/netns") / self.name):
            run("ip", "link", "set", "far", "up")
            for address in (ONE, OTHER):
                run("ip", "addr", "add", f"{address}/24", "dev", "far")
            for address in (ONE, OTHER):
                listener = socket.create_server((address, PORT))
                self._listeners.append(listener)
                threading.Thread(target=self._accept, args=(listener, address), daemon=True).start()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        run("ip", "netns", "del", self.name)
        subprocess.run(["ip", "link", "del", self.name], capture_output=True, check=False)

    def hears(self, address: str) -> bool:
        """Whether a server gets another line."""
        return self._more(address, 20)

    def falls_silent(self, address: str) -> bool:
        """Whether a server gets nothing any more, once it has read what had come: ten lines a second do."""
        return any(not self._more(address, 1) for _ in range(5))

    def _more(self, address: str, seconds: float) -> bool:
        with self._came:
            before = self.lines[address]
            return self._came.wait_for(lambda: self.lines[address] > before, seconds)

    def _accept(self, listener: socket.socket, address: str) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            with connection, connection.makefile("rwb", buffering=0) as stream:
                for line in stream:
                    stream.write(line)
                    with self._came:
                        self.lines[address] += 1
                        self._came.notify_all()
        except OSError:
            pass  # cut, as it should be


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    made = Internet()
    made.open()
    yield made
    made.close()


def reached(sandbox: Sandbox) -> set[str]:
    """Which of the servers a new connection is accepted by; the others have to refuse at once."""
    script = f"""
        for address in {ONE} {OTHER}; do
            timeout 10 bash -c "exec 3<>/dev/tcp/$address/{PORT}" 2>/dev/null && echo $address
            [ $? = 124 ] && echo slow
        done; true"""
    return set(sandbox.commands.run(script, timeout=40).stdout.split())


def talk(address: str) -> str:
    """A command that sends a line and waits for it again, for as long as the flow holds."""
    return f"""
        exec 3<>/dev/tcp/{address}/{PORT}
        while echo line >&3 && read -r line <&3; do sleep 0.1; done
        exit 3"""


def test_rules_hold_from_the_first_moment_and_change_at_once(
    sandbox_factory: Callable[..., Sandbox], internet: Internet
) -> None:
    with pytest.raises(SandboxException, match="all other traffic denied"):
        sandbox_factory(network={"allow_out": ["example.com"]})
    assert reached(sandbox_factory(allow_internet_access=False)) == set()

    sandbox = sandbox_factory(network={"deny_out": [ALL_TRAFFIC], "allow_out": [ONE]})
    assert reached(sandbox) == {ONE}
    sandbox.update_network({})
    assert reached(sandbox) == {ONE, OTHER}
    kept = sandbox.commands.run(talk(ONE), background=True, timeout=0)
    cut = sandbox.commands.run(talk(OTHER), background=True, timeout=0)
    assert internet.hears(ONE) and internet.hears(OTHER)

    sandbox.update_network({"deny_out": [OTHER]})
    with pytest.raises(CommandExitException) as ended:
        cut.wait()
    assert ended.value.exit_code == 3
    assert internet.falls_silent(OTHER)
    assert internet.hears(ONE)
    assert reached(sandbox) == {ONE}

    [child] = sandbox.fork()
    assert isinstance(child, Sandbox)
    assert reached(child) == {ONE}
    child.kill()
    assert kept.pid in {each.pid for each in sandbox.commands.list()}
    sandbox.update_network({"allow_internet_access": False})
    assert internet.falls_silent(ONE)
    assert reached(sandbox) == set()
    sandbox.pause()
    sandbox.update_network({"allow_internet_access": False, "allow_out": [OTHER]})
    sandbox.connect()
    assert reached(sandbox) == {OTHER}
