"""A process that maps a memory file privately, as a hypervisor does for its guest.

Run as a program it obeys lines on stdin: `write PAGE BYTE COUNT` fills pages, `read` answers with a
digest of the whole mapping, `touch PAGE` only reads. `Mapped` is the side of the tests.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

PAGE = mmap.PAGESIZE


class Mapped:
    """The child of a test. `split` makes the mapping two in /proc/PID/maps."""

    def __init__(self, file: Path, *, split: bool = False) -> None:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", __file__, str(descriptor), str(int(split))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
                text=True,
            )
        finally:
            os.close(descriptor)
        assert self._answer() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, page: int, byte: int, count: int = 1) -> None:
        """Fill pages with one byte."""
        assert self._ask(f"write {page} {byte} {count}") == "done"

    def touch(self, page: int) -> None:
        """Read a page, which leaves it the file's."""
        assert self._ask(f"touch {page}") == "done"

    def digest(self) -> str:
        """SHA-256 of all that the process sees in the mapping."""
        return self._ask("read")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def serve(descriptor: int, split: bool) -> None:
    # Through /proc/self/fd, as QEMU opens a descriptor that was handed to it.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    size = os.fstat(own).st_size
    memory = mmap.mmap(own, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    if split:
        memory.madvise(mmap.MADV_DONTDUMP, 0, size // PAGE // 2 * PAGE)
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["write", page, byte, count]:
                at, length = int(page) * PAGE, int(count) * PAGE
                memory[at : at + length] = bytes([int(byte)]) * length
                print("done", flush=True)
            case ["touch", page]:
                assert memory[int(page) * PAGE] >= 0
                print("done", flush=True)
            case ["read"]:
                print(hashlib.sha256(memory).hexdigest(), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2] == "1")
