"""Pseudo-terminals."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from agentenv.guest import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentenv.guest.users import User

_TTY_GROUP = 5


def open_pair(user: User, cols: int, rows: int) -> tuple[int, int, str]:
    """A new terminal of that size, owned by `user`: (master, non-blocking; slave; the slave's path)."""
    master, slave = os.openpty()
    try:
        path = os.ttyname(slave)
        resize(master, cols, rows)
        if os.geteuid() == 0:
            group = users.gid_of("tty")
            os.fchown(slave, user.uid, _TTY_GROUP if group is None else group)
            os.fchmod(slave, 0o620)
        os.set_blocking(master, False)
    except BaseException:
        os.close(master)
        os.close(slave)
        raise
    return master, slave, path


def resize(master: int, cols: int, rows: int) -> None:
    """Sets the size; the programs in the terminal get SIGWINCH."""
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows & 0xFFFF, cols & 0xFFFF, 0, 0))
