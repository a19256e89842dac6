"""Running the host's programs, with their complaints as errors."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentenv.errors import HostFault, HostIncapable


def run(
    argv: Sequence[str | Path],
    *,
    package: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """What the program wrote to its output.

    Args:
        argv: program and arguments.
        package: the system package that has the program, for the remedy when it is missing.
        env: its whole environment; None passes ours on.
        cwd: directory to run in.
        stdin: text for its input; None gives it none.

    Raises:
        HostIncapable: there is no such program.
        HostFault: it failed; the message ends with what it complained of.
    """
    try:
        done = subprocess.run(
            [str(part) for part in argv],
            env=env,
            cwd=cwd,
            input=stdin or "",
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise HostIncapable(f"no program {argv[0]} on this host", remedy=f"apt install {package}") from None
    if done.returncode:
        complaint = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise HostFault(f"{argv[0]} failed with status {done.returncode}: {complaint or 'no message'}")
    return done.stdout
