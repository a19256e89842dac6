"""The small parts of a node's life as a process; the whole is tested with real machines."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agentenv import node, run_record
from agentenv.config import Settings
from agentenv.errors import Conflict, HostFault
from agentenv.listening import bound
from agentenv.tls import authority


def test_one_node_per_data_directory(tmp_path: Path) -> None:
    with run_record.hold(tmp_path):
        with pytest.raises(Conflict, match=f"process {os.getpid()} already serves {tmp_path}") as refusal:
            run_record.hold(tmp_path).__enter__()
        assert refusal.value.remedy
    with run_record.hold(tmp_path):  # given back
        assert (tmp_path / "node.lock").read_text() == f"{os.getpid()}\n"


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from agentenv import run_record
run_record.hold(pathlib.Path({str(tmp_path)!r})).__enter__()
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    with run_record.hold(tmp_path):
        pass


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    with run_record.hold(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with run_record.hold(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_a_taken_port_is_told_before_anything_is_done() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostFault, match=f"cannot listen on 127.0.0.1 port {port}") as refusal:
            bound("127.0.0.1", port).__enter__()
    assert "ss -ltnp" in str(refusal.value)


async def test_there_is_a_port_for_tls_where_there_is_a_certificate(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(home=tmp_path, domain="box.test", tls_port=taken.getsockname()[1])
        async with AsyncExitStack() as parts:
            assert node._tls(parts, settings) is None
            authority.establish(settings.tls_dir, "box.test")
            with pytest.raises(HostFault, match="AENV_TLS_PORT"):
                node._tls(parts, settings)
            endpoint = node._tls(parts, settings.model_copy(update={"tls_port": 0}))
            assert endpoint is not None
            assert endpoint.port > 0
    assert endpoint.listener.fileno() == -1


@pytest.mark.parametrize("host", ["no such host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_here_is_told(host: str) -> None:
    with pytest.raises(HostFault, match="cannot listen on"):
        bound(host, 0).__enter__()


def test_a_bound_listener_does_not_listen_yet() -> None:
    with (
        bound("127.0.0.1", 0) as listener,
        socket.socket() as client,
        pytest.raises(ConnectionRefusedError),
    ):
        client.connect(listener.getsockname())


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::1", "http://[fd00::1]:8000"),
        ("node.example", "http://node.example:8000"),
    ],
)
def test_the_url_is_one_that_can_be_used_here(host: str, url: str) -> None:
    assert node._url(host, 8000) == url


def test_readiness_is_told_once_and_the_descriptor_closed() -> None:
    ours, theirs = os.pipe()
    node._tell(theirs, "http://x")
    with os.fdopen(ours) as pipe:
        assert pipe.read() == "http://x\n"


def test_a_starter_that_went_away_does_not_matter() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    node._tell(theirs, "http://x")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(theirs)


@pytest.mark.parametrize(("soft", "hard", "then"), [(256, 4096, 4096), (4096, 4096, 4096)])
def test_a_node_may_open_many_files(soft: int, hard: int, then: int) -> None:
    code = (
        f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard})); "
        "from agentenv import node; node.raise_descriptor_limit(); print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.split() == [str(then), str(hard)]


async def test_signals_are_only_recorded() -> None:
    with node._signals() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 10)


def test_a_node_is_found_by_its_data_directory_alone(tmp_path: Path) -> None:
    for name in ("mine", "other", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("mine")
    mine, other, link = (
        Settings(home=tmp_path / name, runtime=tmp_path / "run") for name in ("mine", "other", "link")
    )
    run_record.write(mine, "http://127.0.0.1:1")
    for settings in (mine, link):
        found = run_record.read(settings)
        assert found is not None and found.pid == os.getpid()
    assert run_record.read(other) is None
    run_record.remove(mine)
    assert run_record.read(mine) is None
