"""Paging out a process: on a host without swap, what it maps of a file is what goes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.errors import HostFault
from agentenv.vmm.pageout import batches, page_out, ranges_in

MIB = 1 << 20
MAPS = """\
55d0c0000000-55d0c0002000 r--p 00000000 fe:00 1234                       /usr/bin/qemu
55d0c0002000-55d0c0004000 rw-p 00002000 fe:00 1234                       /usr/bin/qemu
7f0000000000-7f0020000000 rw-p 00000000 fe:00 77                         /a file with spaces (deleted)
7f0030000000-7f0030001000 rw-s 00000000 00:01 78                         /memfd:shared
7f0040000000-7f0040001000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
"""

PROGRAM = """
import mmap, sys
file = open(sys.argv[1], "rb")
held = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
total = sum(held[at] for at in range(0, len(held), 4096))
print(total, flush=True)
for line in sys.stdin:
    print(sum(held[at] for at in range(0, len(held), 4096)), flush=True)
"""


def test_what_is_private_and_writable_counts() -> None:
    assert ranges_in(MAPS) == [
        (0x55D0C0002000, 0x2000),
        (0x7F0000000000, 0x20000000),
        (0x7F0040000000, 0x1000),
    ]


def test_a_call_takes_so_many_ranges_and_bytes() -> None:
    assert batches([]) == []
    assert batches([(0, 3 << 30), (9 << 30, 5)]) == [
        [(0, 1 << 30)],
        [(1 << 30, 1 << 30)],
        [(2 << 30, 1 << 30)],
        [(9 << 30, 5)],
    ]
    many = [(number * 8192, 4096) for number in range(2500)]
    assert [len(lot) for lot in batches(many)] == [1024, 1024, 452]
    assert [each for lot in batches(many) for each in lot] == many


def resident(pid: int) -> int:
    """Bytes of files that a process has in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssFile"))


@pytest.mark.skipif(os.geteuid() != 0, reason="another process' memory is root's to page out")
def test_it_goes_and_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (16 * MIB // 256))
    os.sync()  # what is not written yet cannot be dropped
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        total = process.stdout.readline()
        before = resident(process.pid)
        assert before > 16 * MIB
        assert page_out(process.pid) >= 16 * MIB
        assert resident(process.pid) < before - 12 * MIB
        process.stdin.write("again\n")
        process.stdin.flush()
        assert process.stdout.readline() == total
        process.stdin.close()
    with pytest.raises(HostFault):
        page_out(process.pid)


def test_pages_are_what_the_kernel_says() -> None:
    assert mmap.PAGESIZE == 4096
