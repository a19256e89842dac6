"""The verdict on KVM, from programs that behave as QEMU does on different hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.errors import HostIncapable
from agentenv.guestimage import build
from agentenv.guestimage.initramfs import MARKER
from agentenv.host import accelerator, kvm
from agentenv.vmm.machine import GuestFiles

FILES = GuestFiles(Path("/g/kernel-1/vmlinux"), Path("/g/initramfs-1"), Path("/g/tools-1"))


def program(directory: Path, text: str) -> str:
    path = directory / "qemu"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_guest_that_speaks_is_proof(tmp_path: Path) -> None:
    verdict = kvm.probe(program(tmp_path, f"echo booting; echo '{MARKER} no disk'; sleep 100"), FILES)
    assert verdict.usable
    assert "boots with it" in verdict.reason


def test_one_that_stays_silent_is_given_up_and_killed(tmp_path: Path) -> None:
    verdict = kvm.probe(program(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 100"), FILES, limit_s=0.3)
    assert not verdict.usable
    assert "no sign of life" in verdict.reason
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_one_that_fails_is_quoted(tmp_path: Path) -> None:
    verdict = kvm.probe(program(tmp_path, "echo 'failed to initialize kvm' >&2; exit 1"), FILES)
    assert not verdict.usable
    assert "failed to initialize kvm" in verdict.reason


def test_one_that_ends_without_a_word(tmp_path: Path) -> None:
    assert not kvm.probe(program(tmp_path, "exit 0"), FILES).usable


def test_no_program(tmp_path: Path) -> None:
    verdict = kvm.probe(str(tmp_path / "nothing"), FILES)
    assert not verdict.usable
    assert "does not start" in verdict.reason


def test_the_guest_is_booted_with_kvm_and_nothing_else() -> None:
    argv = kvm.probe_command("qemu", FILES)
    assert argv[argv.index("-accel") + 1] == "kvm"
    assert argv[argv.index("-kernel") + 1] == str(FILES.kernel)
    assert argv[argv.index("-initrd") + 1] == str(FILES.initramfs)
    assert "-drive" not in argv
    assert "-blockdev" not in argv


def test_devices_that_do_not_open(tmp_path: Path) -> None:
    assert kvm.cannot_open(Path("/dev/null")) is None
    assert "there is no" in (kvm.cannot_open(tmp_path / "kvm") or "")
    assert "does not open" in (kvm.cannot_open(tmp_path) or "")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A host whose /dev/kvm opens and whose QEMU counts how often it is asked to boot."""
    monkeypatch.setattr(kvm, "DEVICE", Path("/dev/null"))
    monkeypatch.setattr(build, "load", lambda settings: FILES)
    text = f"""
case $1 in --version) echo 'QEMU emulator version 10.0.0'; exit;; esac
echo boot >> {tmp_path}/boots
echo '{MARKER} no disk'
"""
    return Settings(home=tmp_path, qemu=program(tmp_path, text))


def boots(settings: Settings) -> int:
    return len((settings.home / "boots").read_text().splitlines())


def test_it_is_tried_once_and_remembered(settings: Settings) -> None:
    first, second = kvm.verdict(settings), kvm.verdict(settings)
    assert first.usable
    assert first == second
    assert boots(settings) == 1


@pytest.mark.parametrize("part", ["host_kernel", "boot", "qemu", "guest"])
def test_it_is_tried_again_when_something_changed(settings: Settings, part: str) -> None:
    kvm.verdict(settings)
    record = settings.home / "kvm.json"
    content = json.loads(record.read_text())
    content["key"][part] = "another"
    record.write_text(json.dumps(content))
    kvm.verdict(settings)
    assert boots(settings) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": {}, "verdict": 3}'])
def test_a_damaged_record_is_no_verdict(settings: Settings, text: str) -> None:
    (settings.home / "kvm.json").write_text(text)
    assert kvm.verdict(settings).usable


def test_without_guest_files_nothing_can_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "DEVICE", Path("/dev/null"))
    with pytest.raises(HostIncapable, match="no guest files"):
        kvm.verdict(Settings(home=tmp_path))


def test_the_choice_follows_the_verdict(settings: Settings) -> None:
    choice = accelerator.choose(settings)
    assert choice.accelerator == "kvm"
    assert "boots with it" in str(choice)
    assert accelerator.decide(kvm.Verdict(False, "no")).accelerator == "tcg"


def test_the_choice_can_be_forced(settings: Settings) -> None:
    for name in ("kvm", "tcg"):
        forced = settings.model_copy(update={"accelerator": name})
        assert accelerator.choose(forced).accelerator == name
    assert not (settings.home / "boots").exists()


def test_a_host_without_the_device_has_software(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "DEVICE", tmp_path / "kvm")
    choice = accelerator.choose(Settings(home=tmp_path))
    assert choice.accelerator == "tcg"
    assert "there is no" in choice.reason
