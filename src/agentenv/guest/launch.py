"""Starts a program as a user, in the cheapest way there is.

posix_spawn shares the agent's memory until the exec, where a fork copies its page tables (and, under
emulation, pays for each page touched). It cannot change the user or the directory, but both are
inherited: so the agent, which has one thread, takes the user's identity and directory for the length of
the call. Real and effective ids become the user's and the saved one stays 0, which is the way back; the
exec makes the saved id the user's too, so nothing of root is left in the program. Pipes made meanwhile
belong to the user, which lets programs reopen /dev/stdout. Every descriptor of the agent is
close-on-exec.
"""

from __future__ import annotations

import errno
import os

from agentenv.guest.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentenv.guest.users import User

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BUSYBOX = os.environ.get("AGENTENV_BUSYBOX", "/.agentenv/bin/busybox")
_SHELLS = ("/bin/bash", "/usr/bin/bash", "bash")
# All of them: the C library looks each one up that it is not told about, which takes it two system calls
# instead of one. 32 and 33 are its own.
_DEFAULT_SIGNALS = tuple(
    number
    for number in range(1, signal.NSIG)
    if number not in (signal.SIGKILL, signal.SIGSTOP) and not 32 <= number <= 33
)
_oom_fd: int | None = None


def protect_from_oom() -> None:
    """The agent is spared when memory runs out; what it starts is not."""
    global _oom_fd
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"-1000")
    except PermissionError:  # a root without that right: then the agent takes its chances
        os.close(fd)
    else:
        _oom_fd = fd


class Identity:
    """The calling process is `user`, as far as files and programs see, within the block.

    Raises:
        PermissionError: the agent does not run as root, and `user` is another.
    """

    __slots__ = ("_switched", "_user")

    def __init__(self, user: User) -> None:
        self._user = user
        self._switched = False

    def __enter__(self) -> None:
        user = self._user
        if os.geteuid() != 0:
            if user.uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"the agent is not root and cannot act as {user.name}")
            return
        if _oom_fd is not None:  # inherited by what is started; both writes need root
            os.write(_oom_fd, b"0")
        self._switched = user.uid != 0 or user.gid != 0 or user.groups not in ((), (0,))
        if self._switched:
            try:
                os.setgroups(user.groups)
                os.setresgid(user.gid, user.gid, 0)
                os.setresuid(user.uid, user.uid, 0)
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_error: object) -> None:
        if self._switched:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups(())
        if _oom_fd is not None:
            os.write(_oom_fd, b"-1000")


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdio: Sequence[int] | str,
) -> int:
    """Starts `argv` with the caller's identity in a session of its own; returns its pid.

    Args:
        argv: the program and its arguments; a name without a slash is looked up in the PATH of env.
        env: its whole environment.
        cwd: its directory, entered with the identity in force.
        stdio: three descriptors for 0, 1 and 2, or a terminal's path, which becomes the controlling one.

    Raises:
        OSError: it cannot be started; `filename` says what was not found or allowed.
        ValueError: an argument or variable holds a NUL.
    """
    if isinstance(stdio, str):
        actions = [(os.POSIX_SPAWN_OPEN, 0, stdio, os.O_RDWR, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]  # type: ignore[list-item]
    else:
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(stdio)]  # type: ignore[misc]
    os.chdir(cwd)
    try:
        program, arguments = resolve(argv, env.get("PATH", PATH))
        return os.posix_spawn(
            program,
            arguments,
            env,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULT_SIGNALS,
        )
    finally:
        os.chdir("/")


def resolve(argv: Sequence[str], path: str) -> tuple[str, list[str]]:
    """The file to execute and its arguments.

    Clients run every command with /bin/bash. In an image without it, any bash on the path is taken,
    else /bin/sh, else the shell of the tools drive's busybox.
    """
    name = argv[0]
    found = _locate(name, path)
    if found is not None:
        return found, list(argv)
    if name in _SHELLS:
        for shell in ("bash", "/bin/sh"):
            found = _locate(shell, path)
            if found is not None:  # under its own name: a busybox looks at that to know what it is to be
                return found, [shell, *argv[1:]]
        if os.path.exists(BUSYBOX):
            return BUSYBOX, ["sh", *argv[1:]]
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _locate(name: str, path: str) -> str | None:
    if "/" in name:
        return name if os.path.exists(name) else None
    for folder in path.split(":"):
        candidate = f"{folder or '.'}/{name}"
        if os.access(candidate, os.X_OK, effective_ids=True) and not os.path.isdir(candidate):
            return candidate
    return None
