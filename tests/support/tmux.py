"""A terminal as people have it: tmux, with a shell in it, typed into and looked at by a test."""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import pytest

LIMIT_S = 60.0


class Tmux:
    """One window with a plain shell; ended with the block."""

    def __init__(
        self, directory: Path, environment: Mapping[str, str], size: tuple[int, int] = (90, 28)
    ) -> None:
        self._socket = directory / "tmux"
        self._environment = {**environment, "TERM": "xterm-256color"}
        self._environment.pop("TMUX", None)
        fifo = directory / "output"
        os.mkfifo(fifo)
        self._output = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # both, so that it never ends
        shell = "exec bash --norc --noprofile"
        columns, rows = size
        self.run("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows), shell)
        self.run("pipe-pane", f"cat > {shlex.quote(str(fifo))}")

    def __enter__(self) -> Tmux:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run("kill-server")
        os.close(self._output)

    def run(self, *words: str) -> str:
        """What a command of tmux says."""
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def screen(self, *how: str) -> str:
        """What is shown now; with `-e` its colours too, as control sequences."""
        return self.run("capture-pane", "-p", *how)

    def fact(self, name: str) -> str:
        """What tmux knows of the window, such as `alternate_on`."""
        return self.run("display-message", "-p", f"#{{{name}}}").strip()

    def type(self, text: str) -> None:
        """Type a line."""
        self.run("send-keys", "-l", text)
        self.keys("Enter")

    def keys(self, *names: str) -> None:
        """Press keys by tmux's names: Enter, C-c, Escape."""
        self.run("send-keys", *names)

    def paste(self, content: Path) -> None:
        """Paste a file."""
        self.run("load-buffer", str(content))
        self.run("paste-buffer", "-d", "-r")

    def wait(self, fits: Callable[[str], bool]) -> str:
        """Wait until the screen is as `fits` wants it."""
        limit = time.monotonic() + LIMIT_S
        while not fits(shown := self.screen()):
            left = limit - time.monotonic()
            if left <= 0 or not select.select([self._output], [], [], left)[0]:
                pytest.fail(f"the screen did not come to be as it should:\n{shown}")
            os.read(self._output, 1 << 20)
        return shown

    def wait_for(self, text: str) -> str:
        """Wait until a line begins with that."""
        return self.wait(lambda shown: any(line.startswith(text) for line in shown.splitlines()))
