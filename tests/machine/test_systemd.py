"""An image with systemd, started with it as process 1: a template of it, and what its sandboxes are like."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2b import Sandbox, SandboxException

from support.home import prepared_home
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.soak, pytest.mark.usefixtures("host_audit")]

SUITE = "bookworm"
# What is not looked at here need not be started; with a machine-id there is nothing to be set up first.
STEP = """\
cat /proc/1/comm >/from-step
echo 0123456789abcdef0123456789abcdef >/etc/machine-id
for unit in networkd logind pcrphase update-utmp binfmt; do
    ln -s /dev/null /etc/systemd/system/systemd-$unit.service
done
"""


@pytest.fixture(scope="module")
def system() -> Path:
    """Debian's systemd and what it needs, unpacked: a tar file that is made once per data directory."""
    made = prepared_home() / "systemd.tar"
    if not made.exists():
        making = made.with_suffix(".making")
        packages = "--include=systemd-sysv,bash,coreutils,base-files"
        command = ("mmdebstrap", "--mode=root", "--format=tar", "--variant=extract", packages)
        subprocess.run([*command, SUITE, str(making)], check=True, capture_output=True)
        making.rename(made)
    return made


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode], system: Path) -> RunningNode:
    """A node with a template that is built of it: the step has the agent as process 1."""
    node = node_factory("systemd", build_from_paths="true")
    step = {"type": "RUN", "args": [STEP, "root"]}
    node.build("systemd", {"fromImage": f"rootfs:{system}", "steps": [step], "init": "systemd"})
    return node


@pytest.fixture
def sandbox(node: RunningNode) -> Iterator[Sandbox]:
    sandbox = node.sandbox("systemd")
    yield sandbox
    sandbox.kill()


def said(sandbox: Sandbox, command: str) -> str:
    """Run as root, who needs no bus to speak to systemd."""
    return sandbox.commands.run(command, timeout=60, user="root").stdout.strip()


def test_systemd_is_process_1_and_the_agent_a_service_of_it(sandbox: Sandbox) -> None:
    assert said(sandbox, "cat /proc/1/comm") == "systemd"
    assert said(sandbox, "cat /from-step") != "systemd"
    assert said(sandbox, "systemctl is-system-running || true") in ("running", "degraded")
    agent = said(sandbox, "systemctl show -P MainPID agentenv.service")
    assert agent not in ("", "0", "1")
    unit = "[Service]\\nExecStart=/bin/sleep 1000\\n"
    said(sandbox, f'printf "{unit}" >/etc/systemd/system/own.service; systemctl start own.service')
    left = said(sandbox, "sleep 1000 >/dev/null 2>&1 & echo $!")
    (fork,) = sandbox.fork()
    assert isinstance(fork, Sandbox)
    try:
        assert said(fork, "systemctl is-active own.service") == "active"
    finally:
        fork.kill()
    sandbox.pause()
    sandbox.connect()
    assert said(sandbox, "systemctl is-active own.service") == "active"

    # Another agent takes the place of one that is killed, is the same sandbox's, and leaves processes alone.
    with pytest.raises(SandboxException):
        said(sandbox, f"kill -9 {agent}; sleep 100")
    assert answers(sandbox, "echo $E2B_SANDBOX_ID") == sandbox.sandbox_id
    assert said(sandbox, f"cat /proc/{left}/comm") == "sleep"
    assert said(sandbox, "systemctl show -P MainPID agentenv.service") != agent


def answers(sandbox: Sandbox, command: str) -> str:
    """What a command says once the agent is there again, which nothing tells."""
    for _ in range(100):
        try:
            return said(sandbox, command)
        except SandboxException:
            time.sleep(0.1)
    raise AssertionError("the agent did not come back")
