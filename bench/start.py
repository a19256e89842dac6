"""What the command line costs before it does anything: start times beside those of the interpreter alone.

    python bench/start.py [--rounds 20] [--json]

Each round starts `python -c pass`, and `aenv` with --version, --help, the help of a command that asks a
server, and what a shell starts to complete a command's name. `times_python` is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

from measure import interleaved, percentile, show, summary

COMMANDS = {
    "python": ["-c", "pass"],
    "version": ["-m", "agentenv", "--version"],
    "help": ["-m", "agentenv", "--help"],
    "list_help": ["-m", "agentenv", "list", "--help"],
    "complete": ["-m", "agentenv"],
}
COMPLETING = {"_AENV_COMPLETE": "bash_complete", "COMP_WORDS": "aenv sna", "COMP_CWORD": "1"}


def start(name: str) -> Callable[[], object]:
    """Starts one of them, and waits for its end."""
    more = COMPLETING if name == "complete" else {}
    environment = {**os.environ, **more}

    def run() -> object:
        return subprocess.run(
            [sys.executable, *COMMANDS[name]], env=environment, stdout=subprocess.DEVNULL, check=True
        )

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    taken = interleaved({name: start(name) for name in COMMANDS}, given.rounds, warm=2)
    python = percentile(taken["python"], 0.5)
    result = {
        name: {**summary(values), "times_python": round(percentile(values, 0.5) / python, 2)}
        for name, values in taken.items()
    }
    show(result, given.json)


if __name__ == "__main__":
    main()
