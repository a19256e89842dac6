"""A shell of an agent on this host, attached to the terminal that this program runs in.

    attached_shell.py URL TAG start|follow [WORD...]

It prints how it went as its last line.
"""

from __future__ import annotations

import sys

from agentenv.cli.attached.processes import Command, follow, start
from agentenv.cli.attached.session import Session
from agentenv.cli.attached.terminal import Terminal, size_of
from agentenv.cli.attached.wire import Agent


def main(url: str, tag: str, how: str, *words: str) -> None:
    agent = Agent(url, "here", direct=True)
    command = Command(
        words or ("bash", "--norc", "-i"), env={"PS1": "ready> ", "TERM": "xterm"}, size=size_of(0), tag=tag
    )
    with Terminal() as terminal:
        session = Session(agent, tag, in_terminal=True, terminal=terminal, keys=b"\x10\x11")
        outcome = session.run(lambda: start(agent, command) if how == "start" else follow(agent, tag))
    print(f"outcome: {outcome}")


if __name__ == "__main__":
    main(*sys.argv[1:])
