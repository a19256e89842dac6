"""What systemd tells of the service, and what is made of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv import run_record
from agentenv.cli import node
from agentenv.config import Settings
from agentenv.errors import Conflict, HostFault
from agentenv.host import doctor, service, serving
from agentenv.host.service import Service, read

ROOT = Path(__file__).parents[3]
# As systemd 257 says it of the unit that is installed and runs.
TOLD = """\
MainPID=1782
EnvironmentFiles=/etc/default/agentenv (ignore_errors=yes)
Environment=AENV_HOME=/var/lib/aenv
LoadState=loaded
ActiveState=active
UnitFileState=enabled
"""
RUNNING = Service(Path("/var/lib/aenv"), "active", 1782, enabled=True)


def test_a_service_that_runs() -> None:
    assert read(TOLD, "") == RUNNING
    assert str(RUNNING) == "agentenv.service (active, started with the host)"


@pytest.mark.parametrize("told", ["", "LoadState=not-found\nActiveState=inactive\n", "LoadState=masked\n"])
def test_no_service(told: str) -> None:
    assert read(told, "") is None


def test_the_file_of_variables_has_the_last_word() -> None:
    found = read(TOLD, "# a comment\nAENV_PORT=9000\nAENV_HOME='/srv/with space'\n")
    assert found is not None
    assert found.home == Path("/srv/with space")


def test_a_file_that_the_unit_does_not_name_has_none() -> None:
    told = TOLD.replace("/etc/default/agentenv", "/etc/default/another")
    found = read(told, "AENV_HOME=/srv\n")
    assert found is not None
    assert found.home == Path("/var/lib/aenv")


def test_the_unit_is_the_one_that_is_asked_for() -> None:
    unit = (ROOT / "packaging" / service.UNIT).read_text()
    assert f"EnvironmentFile=-{service.DEFAULTS}\n" in unit
    assert "Environment=AENV_HOME=/var/lib/aenv\n" in unit
    assert f"Environment=AENV_CGROUP={service.GROUP}\n" in unit
    assert (ROOT / "packaging" / Path(service.GROUP).name).exists()
    assert f"/etc/systemd/system/{service.UNIT}" in (ROOT / "scripts/service.sh").read_text()


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host that seems to be systemd's: `systemctl show` says what is in a file, and what it is asked to do
    is written to another one."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text(
        f'#!/bin/sh\n[ "$1" = show ] && exec cat {tmp_path}/told\n'
        f'echo "$@" >>{tmp_path}/asked\n'
        f"[ ! -e {tmp_path}/fails ] || {{ cat {tmp_path}/fails >&2; exit 1; }}\n"
    )
    (programs / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(service, "_BOOTED", tmp_path)
    monkeypatch.setattr(service, "DEFAULTS", tmp_path / "defaults")
    return tmp_path


def asked(systemd: Path) -> list[str]:
    return (systemd / "asked").read_text().splitlines()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "run").mkdir()
    return Settings(home=Path("/var/lib/aenv"), runtime=tmp_path / "run")


def test_a_data_directory_has_its_service_and_another_has_none(systemd: Path, settings: Settings) -> None:
    (systemd / "told").write_text(TOLD)
    assert service.of(settings) == RUNNING
    assert service.of(settings.model_copy(update={"home": systemd})) is None


def test_systemd_is_asked_and_its_no_is_passed_on(systemd: Path) -> None:
    service.ask("restart")
    assert asked(systemd) == ["reset-failed agentenv.service", "restart agentenv.service"]
    (systemd / "fails").write_text("Job for agentenv.service failed because of so and so.\nSee more.\n")
    with pytest.raises(HostFault, match=r"did not start: Job for agentenv.service failed") as refusal:
        service.ask("start")
    assert "journalctl" in str(refusal.value)


def test_the_node_of_the_service_is_known_by_its_process(settings: Settings) -> None:
    run_record.write(settings, "http://127.0.0.1:8000")
    running = run_record.read(settings)
    assert running is not None
    own = replace(RUNNING, pid=os.getpid())
    assert node.runs_as(own, running)
    assert not node.runs_as(RUNNING, running)  # another process's number
    assert not node.runs_as(None, running)
    assert not node.runs_as(replace(own, state="deactivating"), running)  # it would wait for itself


def test_a_service_is_not_started_at_another_address(systemd: Path, settings: Settings) -> None:
    with pytest.raises(Conflict, match="the address that its settings name"):
        node.by_systemd(settings, "start", None, 9000)
    assert not (systemd / "asked").exists()


def test_a_service_that_is_started_says_where_it_serves(
    systemd: Path,
    settings: Settings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AENV_PORT", raising=False)
    with pytest.raises(HostFault, match="does not serve"):
        node.by_systemd(settings, "start", None, None)
    run_record.write(settings, "http://127.0.0.1:8000")
    monkeypatch.setenv("AENV_MAX_SANDBOXES", "5")
    node.by_systemd(settings, "start", None, None)
    said = capsys.readouterr()
    assert said.out.startswith("serving: http://127.0.0.1:8000 (process ")
    assert "AENV_MAX_SANDBOXES" in said.err and "AENV_HOME" not in said.err  # it would be lost
    assert [each for each in asked(systemd) if "start" in each] == ["start agentenv.service"] * 2


@pytest.mark.parametrize(
    ("told", "status", "word"),
    [
        (TOLD, "ok", "active"),
        (TOLD.replace("active", "failed").replace("1782", "0"), "degraded", "failed"),
    ],
)
def test_doctor_looks_at_the_service(
    systemd: Path, settings: Settings, told: str, status: str, word: str
) -> None:
    (systemd / "told").write_text(told)
    found = serving.service_of(settings)
    assert (found.status, found.required) == (status, False)
    assert word in found.detail


def test_doctor_looks_at_the_control_group_of_the_service(systemd: Path, settings: Settings) -> None:
    (systemd / "told").write_text(TOLD)
    assert doctor.machines_group(settings) == service.GROUP
    assert doctor.machines_group(settings.model_copy(update={"cgroup": "/own"})) == "/own"
    (systemd / "told").write_text("LoadState=not-found\n")
    assert doctor.machines_group(settings) is None


def test_doctor_sees_a_node_beside_the_service(systemd: Path, settings: Settings) -> None:
    (systemd / "told").write_text(TOLD)
    run_record.write(settings, "http://127.0.0.1:8000")
    found = serving.service_of(settings)
    assert found.status == "degraded"
    assert f"process {os.getpid()} serves /var/lib/aenv beside" in found.detail
