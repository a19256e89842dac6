"""The unmodified `e2b` package from PyPI against a real node and real machines."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import httpx
import pytest
from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileType,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]


# --- commands


def test_a_command_gives_its_streams_and_status_apart(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


def test_a_failing_command_raises_with_its_status(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("echo partial; exit 7")
    assert caught.value.exit_code == 7
    assert caught.value.stdout == "partial\n"


def test_commands_run_as_user_in_its_home(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("whoami; pwd; id -u").stdout == "user\n/home/user\n1000\n"
    assert sandbox.commands.run("whoami", user="root").stdout == "root\n"
    assert sandbox.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert sandbox.commands.run("sudo whoami").stdout == "root\n"


def test_variables_of_a_command_win(sandbox_factory: Callable[..., Sandbox]) -> None:
    sandbox = sandbox_factory(envs={"FROM_CREATE": "created", "BOTH": "created"})
    shown = sandbox.commands.run('echo "$FROM_CREATE $BOTH $E2B_SANDBOX"', envs={"BOTH": "command"}).stdout
    assert shown == "created command true\n"


def test_a_timeout_ends_the_command_and_its_children(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 4711 & echo begun; wait", timeout=2)
    assert sandbox.commands.run("pgrep -fc '^sleep 4711' || true").stdout.strip() == "0"


def test_stdin_and_a_background_command(sandbox: Sandbox) -> None:
    command = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(command.pid, "line\n")
    listed = {process.pid for process in sandbox.commands.list()}
    assert command.pid in listed
    sandbox.commands.close_stdin(command.pid)
    assert command.wait().stdout == "line\n"


def test_connect_to_a_running_command_and_kill_it(sandbox: Sandbox) -> None:
    command = sandbox.commands.run("echo ready; exec sleep 4712", background=True)
    again = sandbox.commands.connect(command.pid)
    assert sandbox.commands.kill(command.pid) is True
    with pytest.raises(CommandExitException):
        again.wait()
    assert sandbox.commands.kill(command.pid) is False


def test_a_child_that_keeps_stdout_does_not_keep_the_command(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("echo done; sleep 4713 &", timeout=30).stdout == "done\n"
    sandbox.commands.run("pkill -f '^sleep 4713'")


def test_twenty_megabytes_on_each_stream_arrive_whole(sandbox: Sandbox) -> None:
    size = 20_000_000
    produce = (
        'python3 -c "import sys, os, threading\n'
        "def put(fd, letters):\n"
        f"    data = (letters * ({size} // len(letters) + 1))[:{size}]\n"
        "    view = memoryview(data)\n"
        "    while view:\n"
        "        view = view[os.write(fd, view[:65536]):]\n"
        "streams = ((1, b'stdout-0123456789'), (2, b'stderr+abcdefg'))\n"
        "threads = [threading.Thread(target=put, args=stream) for stream in streams]\n"
        '[t.start() for t in threads]; [t.join() for t in threads]"'
    )
    result = sandbox.commands.run(produce, timeout=240)
    for shown, letters in ((result.stdout, "stdout-0123456789"), (result.stderr, "stderr+abcdefg")):
        expected = (letters * (size // len(letters) + 1))[:size]
        assert len(shown) == size
        assert hashlib.sha256(shown.encode()).digest() == hashlib.sha256(expected.encode()).digest()


# --- files


def test_files_written_and_read_back(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 4096
    entry = sandbox.files.write("deep/er/ünïcode file.bin", content)
    assert entry.path == "/home/user/deep/er/ünïcode file.bin"
    assert bytes(sandbox.files.read("deep/er/ünïcode file.bin", format="bytes")) == content
    info = sandbox.files.get_info("deep/er/ünïcode file.bin")
    assert (info.size, info.owner, info.group, info.type) == (len(content), "user", "user", FileType.FILE)
    sandbox.files.remove("deep")
    assert not sandbox.files.exists("deep")


def test_directories(sandbox: Sandbox) -> None:
    assert sandbox.files.make_dir("/tmp/place/one") is True
    assert sandbox.files.make_dir("/tmp/place/one") is False
    sandbox.files.write("/tmp/place/two.txt", "2")
    assert [(e.name, e.type) for e in sandbox.files.list("/tmp/place")] == [
        ("one", FileType.DIR),
        ("two.txt", FileType.FILE),
    ]
    sandbox.files.rename("/tmp/place/two.txt", "/tmp/place/three.txt")
    assert sandbox.files.read("/tmp/place/three.txt") == "2"
    with pytest.raises(NotFoundException):
        sandbox.files.read("/tmp/place/two.txt")
    sandbox.files.remove("/tmp/place")


def test_a_watcher_sees_a_write(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("/tmp/watched")
    watcher = sandbox.files.watch_dir("/tmp/watched")
    sandbox.files.write("/tmp/watched/new.txt", "x")
    events = [(event.name, event.type.value) for event in watcher.get_new_events()]
    assert events == [("new.txt", "create"), ("new.txt", "chmod"), ("new.txt", "write")]
    watcher.stop()
    sandbox.files.remove("/tmp/watched")


def test_a_recursive_watcher_follows_a_new_directory(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("/tmp/tree")
    watcher = sandbox.files.watch_dir("/tmp/tree", recursive=True)
    sandbox.files.make_dir("/tmp/tree/sub")
    sandbox.files.write("/tmp/tree/sub/new.txt", "x")
    events = {(event.name, event.type.value) for event in watcher.get_new_events()}
    assert events >= {("sub", "create"), ("sub/new.txt", "create"), ("sub/new.txt", "write")}
    watcher.stop()
    sandbox.files.remove("/tmp/tree")


def test_signed_urls_without_the_sandbox_in_them(sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/signed.txt", "signed content")
    url = sandbox.download_url("/tmp/signed.txt", use_signature_expiration=60)
    assert httpx.get(url, trust_env=False).text == "signed content"
    assert httpx.get(url.replace("signed.txt", "other.txt"), trust_env=False).status_code in (401, 404)
    upload = sandbox.upload_url("/tmp/uploaded.txt")
    assert httpx.post(upload, files={"file": ("uploaded.txt", b"put")}, trust_env=False).status_code == 200
    assert sandbox.files.read("/tmp/uploaded.txt") == "put"


# --- terminals


def test_a_terminal_with_a_size(sandbox: Sandbox) -> None:
    shown = bytearray()
    terminal = sandbox.pty.create(PtySize(rows=31, cols=97))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    terminal.wait(on_pty=shown.extend)
    assert b"31 97" in shown


def test_a_terminal_is_resized_and_killed(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(rows=20, cols=80))
    sandbox.pty.resize(terminal.pid, PtySize(rows=41, cols=101))
    sandbox.pty.send_stdin(terminal.pid, b"stty size\n")
    shown = bytearray()
    for _, _, data in terminal:
        shown.extend(data or b"")
        if b"41 101" in shown:
            break
    assert sandbox.pty.kill(terminal.pid) is True
    with pytest.raises(CommandExitException):
        terminal.wait()
    assert sandbox.pty.kill(terminal.pid) is False


# --- life


def test_what_a_sandbox_says_of_itself(sandbox_factory: Callable[..., Sandbox]) -> None:
    sandbox = sandbox_factory(metadata={"purpose": "a b&c=d"}, timeout=120)
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"purpose": "a b&c=d"}
    assert (info.cpu_count, info.memory_mb) == (1, 512)
    assert info.state == SandboxState.RUNNING
    assert 60 < (info.end_at - datetime.now(UTC)).total_seconds() <= 120
    found = Sandbox.list(query=SandboxQuery(metadata={"purpose": "a b&c=d"})).next_items()
    assert [item.sandbox_id for item in found] == [sandbox.sandbox_id]

    sandbox.set_timeout(600)
    assert (sandbox.get_info().end_at - datetime.now(UTC)).total_seconds() > 500
    assert Sandbox.connect(sandbox.sandbox_id).commands.run("echo again").stdout == "again\n"

    assert sandbox.is_running()
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert not sandbox.is_running()
    with pytest.raises(NotFoundException):
        Sandbox.get_info(sandbox.sandbox_id)


def test_it_ends_when_its_time_is_up(sandbox_factory: Callable[..., Sandbox]) -> None:
    sandbox = sandbox_factory(lifecycle={"on_timeout": "kill"})
    sandbox.set_timeout(0)
    deadline = time.monotonic() + 60
    while sandbox.is_running():
        assert time.monotonic() < deadline, "it runs on after its time"


def test_a_kill_during_a_command_is_told(sandbox_factory: Callable[..., Sandbox]) -> None:
    sandbox = sandbox_factory()
    command = sandbox.commands.run("sleep 300", background=True, timeout=0)
    sandbox.kill()
    with pytest.raises(TimeoutException, match="killed or reached its end of life"):
        command.wait()


def test_the_clock_and_the_name(sandbox: Sandbox) -> None:
    before = time.time()
    inside = float(sandbox.commands.run("date +%s.%N").stdout)
    after = time.time()
    # The agent is told the time, and hears of it as late as the host is loaded.
    assert before - 5 <= inside <= after + 5
    assert (
        sandbox.commands.run("hostname").stdout.strip()
        == sandbox.commands.run("cat /etc/hostname").stdout.strip()
    )


# --- services inside


@pytest.fixture
def web_server(sandbox: Sandbox) -> Iterator[int]:
    """A web server in the sandbox that says when it listens."""
    program = (
        "python3 -u -c \"import http.server as h; s = h.HTTPServer(('', 8123), h.SimpleHTTPRequestHandler); "
        "print('listening'); s.serve_forever()\""
    )
    command = sandbox.commands.run(program, background=True, timeout=0, cwd="/etc")
    for stdout, _, _ in command:
        if stdout and "listening" in stdout:
            break
    yield 8123
    command.kill()


def test_a_service_is_reached_by_headers_and_by_host(
    sandbox: Sandbox, node: RunningNode, web_server: int
) -> None:
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(web_server)}
    assert "hostname" in httpx.get(f"{node.url}/", headers=headers, trust_env=False).text
    host = {"Host": f"{web_server}-{sandbox.sandbox_id}.localhost"}
    named = httpx.get(f"{node.url}/hostname", headers=host, trust_env=False)
    assert named.status_code == 200
    assert named.text.strip() == sandbox.commands.run("cat /etc/hostname").stdout.strip()


@pytest.mark.parametrize(("port", "address"), [(8125, "127.0.0.1"), (8126, "::1")])
def test_a_service_on_the_loopback_address_alone_is_reached(
    sandbox: Sandbox, node: RunningNode, port: int, address: str
) -> None:
    command = sandbox.commands.run(
        f"exec python3 -m http.server {port} --bind {address}", background=True, timeout=0, cwd="/etc"
    )
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
    deadline = time.monotonic() + 60
    while (answer := httpx.get(f"{node.url}/hostname", headers=headers, trust_env=False)).status_code == 502:
        assert time.monotonic() < deadline, answer.text
    assert answer.status_code == 200
    assert answer.text.strip() == sandbox.commands.run("cat /etc/hostname").stdout.strip()
    command.kill()
    while httpx.get(node.url, headers=headers, trust_env=False).status_code != 502:
        assert time.monotonic() < deadline, "it is reached after its end"


def test_closed_ports_and_unknown_sandboxes(sandbox: Sandbox, node: RunningNode) -> None:
    closed = httpx.get(
        node.url, headers={"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8124"}, trust_env=False
    )
    assert closed.status_code == 502
    assert closed.json() == {
        "sandboxId": sandbox.sandbox_id,
        "message": "The sandbox is running but port is not open",
        "port": 8124,
        "code": 502,
    }
    unknown = httpx.get(
        node.url, headers={"E2b-Sandbox-Id": "inone", "E2b-Sandbox-Port": "80"}, trust_env=False
    )
    assert unknown.json() == {"sandboxId": "inone", "message": "The sandbox was not found", "code": 502}


def test_internal_calls_are_not_reachable_from_outside(sandbox: Sandbox, node: RunningNode) -> None:
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    for path in ("/init", "//init", "/%69nit", "/./init", "/forward", "/freeze"):
        answer = httpx.post(f"{node.url}{path}", headers=headers, json={}, trust_env=False)
        assert answer.status_code == 404, path


async def test_the_asynchronous_client(node: RunningNode, e2b_environment: None) -> None:
    sandbox = await AsyncSandbox.create("base", timeout=120)
    try:
        result = await sandbox.commands.run("echo $((6 * 7))")
        assert result.stdout == "42\n"
        await sandbox.files.write("a.txt", "async")
        assert await sandbox.files.read("a.txt") == "async"
    finally:
        assert await sandbox.kill() is True
