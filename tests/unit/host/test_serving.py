"""What is looked at before a node serves: its port, its keys, the clock."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agentenv import run_record
from agentenv.config import Settings
from agentenv.host import serving


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "run").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Settings(home=tmp_path / "home", runtime=tmp_path / "run", port=port)


def test_a_free_port(settings: Settings) -> None:
    found = serving.port(settings)
    assert (found.status, found.detail) == ("ok", f"127.0.0.1 port {settings.port} is free")


def test_a_port_that_somebody_else_has(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", settings.port)):
        found = serving.port(settings)
    assert (found.status, found.required) == ("missing", True)
    assert "Address already in use" in found.detail
    assert "ss -ltnp" in found.remedy and "AENV_PORT" in found.remedy


def test_the_port_of_the_node_that_runs(settings: Settings) -> None:
    run_record.write(settings, f"http://127.0.0.1:{settings.port}")
    with socket.create_server(("127.0.0.1", settings.port)):
        found = serving.port(settings)
    assert found.status == "ok"
    assert f"process {os.getpid()} serves" in found.detail


def test_keys_that_others_can_read(settings: Settings) -> None:
    settings.home.mkdir(mode=0o755)
    settings.api_key_file.write_text("e2b_0")
    settings.api_key_file.chmod(0o600)
    assert serving.keys(settings).status == "ok"
    settings.api_key_file.chmod(0o640)
    found = serving.keys(settings)
    assert found.status == "degraded"
    assert found.remedy == f"chmod go= {settings.api_key_file}"


def test_a_closed_directory_closes_its_files(settings: Settings) -> None:
    settings.home.mkdir(mode=0o700)
    settings.api_key_file.write_text("e2b_0")
    settings.api_key_file.chmod(0o644)
    assert serving.keys(settings).status == "ok"


def test_the_key_of_a_certificate_counts(settings: Settings, tmp_path: Path) -> None:
    key = tmp_path / "open" / "key.pem"
    key.parent.mkdir()
    key.parent.chmod(0o755)
    key.write_text("-----BEGIN PRIVATE KEY-----\n")
    key.chmod(0o644)
    assert str(key) in serving.keys(settings.model_copy(update={"tls_key": key})).detail


def test_a_clock_is_kept_or_not_and_never_required() -> None:
    found = serving.clock()
    assert not found.required
    assert (found.status == "ok") == (found.detail == "is kept right")


def test_a_host_without_the_service_is_as_good(settings: Settings) -> None:
    found = serving.service_of(settings)
    assert (found.status, found.required) == ("ok", False)
    assert str(settings.home) in found.detail
