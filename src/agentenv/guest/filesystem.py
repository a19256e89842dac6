"""The calls of E2B's `filesystem.Filesystem` that do one thing: Stat, MakeDir, Move, Remove, ListDir.

Paths are relative to the calling user's home. The agent acts as root, and what it makes it hands to
that user: this is E2B's contract, and what its clients expect.
"""

from __future__ import annotations

import errno
import os
import stat

from agentenv.guest.connect import ConnectError, int_field, text_field, unary
from agentenv.guest.filesystem_entry import entry
from agentenv.guest.filesystem_walk import remove_tree, walk
from agentenv.guest.loop import checkpoint
from agentenv.guest.paths import PathError, expand, make_directories, parent, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentenv.guest.connect import Message
    from agentenv.guest.context import Context
    from agentenv.guest.http import Request, Router
    from agentenv.guest.users import User

_PREFIX = "/filesystem.Filesystem/"

_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "invalid_argument",
    errno.EISDIR: "invalid_argument",
    errno.EINVAL: "invalid_argument",
    errno.ENAMETOOLONG: "invalid_argument",
    errno.ELOOP: "failed_precondition",
    errno.ENOTEMPTY: "failed_precondition",
    errno.EEXIST: "failed_precondition",
    errno.EXDEV: "failed_precondition",
    errno.EBUSY: "failed_precondition",
    errno.EROFS: "failed_precondition",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
}

# Files looked at or removed before others may run.
_BATCH = 128

_DEEPEST = 1000


def register(router: Router, context: Context) -> None:
    """Serve the calls; the watching ones are `watch.register`'s."""
    service = Filesystem(context)
    unary(router, _PREFIX + "Stat", service.stat)
    unary(router, _PREFIX + "MakeDir", service.make_dir)
    unary(router, _PREFIX + "Move", service.move)
    unary(router, _PREFIX + "Remove", service.remove)
    unary(router, _PREFIX + "ListDir", service.list_dir)


def resolve(path: str, user: User, context: Context) -> str:
    """The absolute path; ConnectError invalid_argument when it cannot be one."""
    try:
        return expand(path, user, context.default_workdir)
    except PathError as error:
        raise ConnectError("invalid_argument", str(error)) from None


def failure(error: OSError, doing: str) -> ConnectError:
    """What a failed system call is to the client; `doing` begins the message."""
    code = _CODES.get(error.errno or 0, "internal")
    return ConnectError(code, f"{doing}: {error.strerror or error}")


class Filesystem:
    """The service; `context` knows the users and the default directory."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def stat(self, message: Message, request: Request) -> Message:
        """`{path}` → `{entry}`; not_found."""
        path, _ = self._path(message, request)
        return {"entry": _told(path)}

    async def make_dir(self, message: Message, request: Request) -> Message:
        """`{path}` → `{entry}`, with parents; already_exists, invalid_argument for a file in the way."""
        path, user = self._path(message, request)
        shown = printable(path)
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            pass
        except OSError as error:
            raise failure(error, f"error getting file info of {shown}") from None
        else:
            if stat.S_ISDIR(mode):
                raise ConnectError("already_exists", f"directory already exists: {shown}")
            raise ConnectError("invalid_argument", f"path already exists but it is not a directory: {shown}")
        try:
            make_directories(path, user.uid, user.gid)
        except OSError as error:
            raise failure(error, f"error creating directory {shown}") from None
        return {"entry": _told(path)}

    async def move(self, message: Message, request: Request) -> Message:
        """`{source, destination}` → `{entry}` of the destination, its parents made; not_found."""
        user = self._context.user_of(request)
        source = resolve(text_field(message, "source"), user, self._context)
        destination = resolve(text_field(message, "destination"), user, self._context)
        try:
            os.lstat(source)
        except (FileNotFoundError, NotADirectoryError):
            raise ConnectError("not_found", f"source file not found: {printable(source)}") from None
        except OSError as error:
            raise failure(error, f"error moving {printable(source)}") from None
        try:
            make_directories(parent(destination), user.uid, user.gid)
            os.rename(source, destination)
        except OSError as error:
            raise failure(error, f"error moving {printable(source)} to {printable(destination)}") from None
        return {"entry": _told(destination)}

    async def remove(self, message: Message, request: Request) -> Message:
        """`{path}` → `{}`, with all below; fine when there is nothing."""
        path, _ = self._path(message, request)
        if not path.strip("/"):
            raise ConnectError("invalid_argument", "the root directory cannot be removed")
        try:
            for count, _ in enumerate(remove_tree(path)):
                if count % _BATCH == _BATCH - 1:
                    await checkpoint()
        except OSError as error:
            raise failure(error, f"error removing {printable(path)}") from None
        return {}

    async def list_dir(self, message: Message, request: Request) -> Message:
        """`{path, depth}` → `{entries}`, each directory followed by what is in it, down to `depth`.

        Links below are not followed. not_found, invalid_argument for a file, failed_precondition
        for a link that leads to itself.
        """
        path, _ = self._path(message, request)
        depth = int_field(message, "depth")
        if depth < 0:
            raise ConnectError("invalid_argument", "depth should be at least 1")
        real = _directory(path)
        entries: list[dict[str, object]] = []
        try:
            for below in walk(real, min(depth or 1, _DEEPEST)):
                try:
                    entries.append(entry(f"{real.rstrip('/')}/{below}", f"{path.rstrip('/')}/{below}"))
                except (FileNotFoundError, NotADirectoryError):
                    continue  # gone since it was listed
                if len(entries) % _BATCH == 0:
                    await checkpoint()
        except OSError as error:
            raise failure(error, f"error reading directory {printable(path)}") from None
        return {"entries": entries}

    def _path(self, message: Message, request: Request) -> tuple[str, User]:
        user = self._context.user_of(request)
        return resolve(text_field(message, "path"), user, self._context), user


def _told(path: str) -> dict[str, object]:
    try:
        return entry(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConnectError("not_found", f"file not found: {printable(path)}") from None
    except OSError as error:
        raise failure(error, f"error getting file info of {printable(path)}") from None


def _directory(path: str) -> str:
    """The resolved path of a directory."""
    shown = printable(path)
    try:
        real = os.path.realpath(path, strict=True)
        mode = os.stat(real).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ConnectError("not_found", f"path not found: {shown}") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConnectError("failed_precondition", f"cyclic symlink at '{shown}'") from None
        raise failure(error, f"error resolving {shown}") from None
    if not stat.S_ISDIR(mode):
        raise ConnectError("invalid_argument", f"path is not a directory: {shown}")
    return real
