"""What the host's loader says of programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import HostFault
from agentenv.guestimage import libraries, tools

SHOWN = """\
\tlinux-vdso.so.1 (0x00007fe696060000)
\tlibpython3.11.so.1.0 => /opt/lib/libpython3.11.so.1.0 (0x00007fe695a00000)
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007fe69581e000)
\t/lib64/ld-linux-x86-64.so.2 (0x00007fe696062000)
"""


def test_libraries_and_loader() -> None:
    loader, files = libraries.parse(SHOWN)
    assert loader == Path("/lib64/ld-linux-x86-64.so.2")
    assert files == {
        "libpython3.11.so.1.0": Path("/opt/lib/libpython3.11.so.1.0"),
        "libc.so.6": Path("/lib/x86_64-linux-gnu/libc.so.6"),
    }


def test_a_missing_library_is_named() -> None:
    with pytest.raises(HostFault, match=r"libgone\.so\.1"):
        libraries.parse(SHOWN + "\tlibgone.so.1 => not found\n")


def test_the_running_interpreter() -> None:
    found = libraries.of([tools.interpreter().program])
    assert found.loader.is_file()
    assert "libc.so.6" in found.files
    assert all(path.is_file() for path in found.files.values())
