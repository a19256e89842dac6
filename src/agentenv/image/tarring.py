"""A directory as a stream of tar, so that copying one goes the same way as unpacking an archive."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentenv.errors import HostFault, HostIncapable
from agentenv.image.streams import Readable

_CHANGED_WHILE_READ = 1  # tar's exit status when a file changed, grew or vanished under it


@contextmanager
def directory_stream(path: Path) -> Iterator[Readable]:
    """The tree at `path` without what is mounted in it; owners as numbers, xattrs, holes. The same tree gives
    the same bytes: no times of access and change, no process id.

    Raises:
        HostFault: tar could not read all of it.
    """
    command = [
        "tar",
        "--create",
        "--file=-",
        "--format=posix",
        "--sort=name",
        "--one-file-system",
        "--sparse",
        "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime",
    ]
    command += ["--numeric-owner", "--xattrs", "--xattrs-include=*", f"--directory={path}", "."]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise HostIncapable("there is no tar", remedy="apt-get install tar") from None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        try:
            yield process.stdout
        except BaseException:
            process.kill()
            raise
        message = process.stderr.read(4096).decode(errors="replace").strip()
        if process.wait() not in (0, _CHANGED_WHILE_READ):
            raise HostFault(f"{path} cannot be read whole: {message}", remedy="build as root")
