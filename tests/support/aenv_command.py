"""The `aenv` command as the program, of a user who has a node's address and key in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.running import RunningNode

PROGRAM = [sys.executable, "-m", "agentenv"]
LIMIT_S = 120.0


class AenvCommand:
    """Runs it.

    Args:
        node: whose sandboxes.
        home: the user's home directory.
    """

    def __init__(self, node: RunningNode, home: Path) -> None:
        others = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AENV_", "E2B_", "XDG_"))
        }
        self.environment = {**others, **node.client_environment, "HOME": str(home), "LANG": "C.UTF-8"}

    def __call__(
        self, *words: str, given: bytes = b"", status: int = 0
    ) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end, which is to have that status."""
        done = subprocess.run(
            [*PROGRAM, *words], env=self.environment, input=given, capture_output=True, timeout=LIMIT_S
        )
        assert done.returncode == status, (words, done.returncode, done.stdout[-2000:], done.stderr)
        return done

    def text(self, *words: str, given: bytes = b"") -> str:
        """What it prints."""
        return self(*words, given=given).stdout.decode()

    @contextmanager
    def begin(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """One that goes on, for the time of the block; killed if it has not ended by then."""
        with subprocess.Popen(
            [*PROGRAM, *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                yield process
            finally:
                process.kill()
