"""What `/init` said, kept for an agent that is started again: where systemd is process 1, it may be killed.

In a file that only root reads, in memory, so that it ends with the boot.
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentenv.guest.context import Context

PATH = "/run/agentenv/context.json"
_KEPT = ("env", "token", "default_user", "default_workdir", "lifecycle")


def keep(context: Context, path: str = PATH) -> None:
    """Write it down, as a whole."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fresh = f"{path}.new"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps({name: getattr(context, name) for name in _KEPT}).encode())
    finally:
        os.close(fd)
    os.rename(fresh, path)


def recall(context: Context, path: str = PATH) -> None:
    """Take over what an agent before this one wrote down, if there was one."""
    try:
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
    except FileNotFoundError:
        return
    for name in _KEPT:
        setattr(context, name, known[name])
