"""What a process writes to its standard error, kept in memory and never more than a bound."""

from __future__ import annotations

import fcntl
import os

# linux/fcntl.h; the fcntl module has them under the same names on Linux.
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


class BoundedOutput:
    """A memory file that cannot grow: what is written beyond its size is refused by the kernel.

    Unlike a pipe nobody has to read it, and unlike a file it stays small although the writer may
    outlive the reader. The beginning is kept, which is where a program says what is wrong.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls, name: str, size: int = 65536) -> BoundedOutput:
        """An empty one, of at most `size` bytes."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return cls(descriptor)

    @classmethod
    def of_process(cls, pid: int) -> BoundedOutput:
        """That of a running process that was given one as standard error."""
        return cls(os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_CLOEXEC))

    def text(self) -> str:
        """What was written so far."""
        if self.descriptor < 0:
            return ""
        data = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)
        return data.rstrip(b"\0").decode(errors="replace")

    def last_line(self) -> str:
        """The last line that says something."""
        lines = self.text().strip().splitlines()
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """Give up the descriptor; the writer keeps its own. Repeatable."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
