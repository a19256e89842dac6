"""Which node serves a data directory now: a small file in the run-time directory.

The node writes it once it serves and removes it when it ends; a reader checks that the process it
names is still the same one, so that a file left by a killed node is not believed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agentenv.config import Settings
from agentenv.errors import Conflict
from agentenv.proc import start_time

NAME = "node.json"


@contextmanager
def hold(home: Path) -> Iterator[None]:
    """Hold the data directory: one node at a time.

    Raises:
        Conflict: another process does; the message has its id.
    """
    path = home / "node.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise Conflict(
                f"process {holder} already serves {home}", remedy="aenv node status; aenv node stop"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class RunRecord:
    """A serving node.

    `start_time` is the process's, in clock ticks since boot (proc(5), field 22); `home` the data directory,
    since a run-time directory that is set by hand may be another one's too."""

    pid: int
    start_time: int
    url: str
    home: str

    @property
    def host(self) -> str:
        """The address it listens on."""
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return urlsplit(self.url).port or 80

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return start_time(self.pid, zombie=False) == self.start_time


def write(settings: Settings, url: str) -> Path:
    """Record this process as the node that serves at `url`."""
    started = start_time(os.getpid())
    assert started is not None
    path = settings.runtime_dir / NAME
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(RunRecord(os.getpid(), started, url, str(settings.home)))))
    temporary.chmod(0o644)
    temporary.rename(path)
    return path


def read(settings: Settings) -> RunRecord | None:
    """The node that serves this data directory now, or None."""
    try:
        record = RunRecord(**json.loads((settings.runtime_dir / NAME).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    ours = Path(record.home).resolve() == settings.home.resolve()
    return record if ours and record.alive else None


def remove(settings: Settings) -> None:
    """Forget the record of this process; another process's is left alone."""
    path = settings.runtime_dir / NAME
    try:
        if json.loads(path.read_text()).get("pid") == os.getpid():
            path.unlink()
    except (FileNotFoundError, ValueError):
        pass
