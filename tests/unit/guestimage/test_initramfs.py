"""The init script and what surrounds it."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest

from agentenv.guestimage import busybox, initramfs, tools
from agentenv.guestimage.kernel import Kernel
from agentenv.guestimage.modules import Module

COMMAND = tools.command("3.11")


def script(*modules: str) -> str:
    return initramfs.init_script([Module(name, (), b"") for name in modules], COMMAND)


def test_nothing_is_left_to_fill_in() -> None:
    assert re.search("@[A-Z]+@", script("virtio_mmio")) is None


def test_the_addresses_are_the_slots() -> None:
    text = script()
    assert "ifconfig eth0 169.254.0.21 netmask 255.255.255.252 up" in text
    assert "default gw 169.254.0.22" in text
    assert 'echo "nameserver 169.254.0.22"' in text


def test_it_is_a_shell_script(tmp_path: Path) -> None:
    box = busybox.installed()
    if box is None:
        pytest.skip("needs a static busybox")
    path = tmp_path / "init"
    path.write_text(script("virtio_mmio", "virtio_blk"))
    subprocess.run([box, "sh", "-n", path], check=True)


def test_the_agent_is_what_it_ends_in() -> None:
    assert "exec busybox switch_root /root /.agentenv/bin/agentenv --argv0" in script()
    assert "/.agentenv/lib/python3.11/agentenv/guest/__main__.pyc --init" in script()


def test_systemd_takes_its_place_by_a_word_of_the_command_line(tmp_path: Path) -> None:
    text = script()
    assert f'*" {initramfs.SYSTEMD} "*) systemd_starts ;;' in text
    assert text.index("systemd_starts ;;") < text.index("switch_root /root /.agentenv/bin/agentenv")
    box = tmp_path / "busybox"
    box.write_bytes(b"box")
    packed = initramfs.pack(Kernel(tmp_path / "vmlinuz", "6.0", None, "here"), box, COMMAND)
    unit = f"ExecStart={' '.join(COMMAND)}\nRestart=always\n"
    assert unit.encode() in gzip.decompress(packed)


def test_a_kernel_without_modules_gets_none(tmp_path: Path) -> None:
    box = tmp_path / "busybox"
    box.write_bytes(b"static")
    packed = initramfs.pack(Kernel(tmp_path / "vmlinuz", "6.0", None, "here"), box, COMMAND)
    plain = gzip.decompress(packed.rstrip(b"\0") + bytes(8))
    assert b"lib/modules" not in plain.split(b"init\0")[0]
    assert packed == initramfs.pack(Kernel(tmp_path / "vmlinuz", "6.0", None, "here"), box, COMMAND)


def test_a_program_that_needs_a_loader_is_not_static() -> None:
    assert not busybox.is_static(tools.interpreter().program)
