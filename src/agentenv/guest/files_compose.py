"""`POST /files/compose`: several files become one, and go.

The new file is assembled under another name and renamed, so a file that was there is lost only to a
complete one. The bytes are copied inside the kernel.
"""

from __future__ import annotations

import errno
import os
import stat
from binascii import hexlify

from agentenv.guest.files import find_user, refuse
from agentenv.guest.http import HttpError, json_response
from agentenv.guest.lean import load_json
from agentenv.guest.loop import checkpoint
from agentenv.guest.paths import PathError, base_name, expand, make_directories, parent, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from agentenv.guest.context import Context
    from agentenv.guest.http import Request, Response
    from agentenv.guest.users import User

_LARGEST_REQUEST = 4 * 1024 * 1024
_STEP = 8 * 1024 * 1024
_FILE_MODE = 0o644


async def compose(request: Request, context: Context) -> Response:
    """Answer `{source_paths, destination, username?}` with `{path, name, type}` of the new file.

    Raises:
        HttpError: 400 malformed, or a source is no regular file or is the destination; 401 unknown
            user; 404 a source is missing; 507 no room.
    """
    sources, destination, username = _fields(await request.read(_LARGEST_REQUEST))
    user = find_user(username, context)
    target = _resolve(destination, user, context.default_workdir)
    found = [_source(path, _resolve(path, user, context.default_workdir), target) for path in sources]
    try:
        make_directories(parent(target), user.uid, user.gid)
        await _assemble(found, target, user)
        for source in dict.fromkeys(found):
            os.unlink(source)
    except OSError as error:
        raise refuse(error, f"error composing '{printable(target)}'") from None
    return json_response({"path": printable(target), "name": printable(base_name(target)), "type": "file"})


async def _assemble(sources: list[str], target: str, user: User) -> None:
    interim = f"{target}.e2b-compose.{hexlify(os.urandom(8)).decode()}.tmp"
    output = os.open(interim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        try:
            os.fchown(output, user.uid, user.gid)
            for source in sources:
                await _append(source, output)
        finally:
            os.close(output)
        os.rename(interim, target)
    except BaseException:
        os.unlink(interim)
        raise


async def _append(source: str, output: int) -> None:
    fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    copy: Callable[[int, int, int], int] = os.copy_file_range
    try:
        while True:
            try:
                copied = copy(fd, output, _STEP)
            except OSError as error:
                if copy is not os.copy_file_range or error.errno not in (
                    errno.EXDEV,
                    errno.EINVAL,
                    errno.ENOSYS,
                    errno.EOPNOTSUPP,
                ):
                    raise
                copy = _copy
                continue
            if not copied:
                return
            await checkpoint()
    finally:
        os.close(fd)


def _copy(source: int, output: int, size: int) -> int:
    return os.sendfile(output, source, None, size)


def _fields(body: bytes) -> tuple[list[str], str, str | None]:
    try:
        message = load_json(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"invalid request body: {error}") from None
    if not isinstance(message, dict):
        raise HttpError(400, "invalid request body: not an object")
    sources = message.get("source_paths")
    destination = message.get("destination")
    username = message.get("username")
    if not isinstance(sources, list) or not sources or not all(isinstance(path, str) for path in sources):
        raise HttpError(400, "source_paths must not be empty")
    if not isinstance(destination, str) or not destination:
        raise HttpError(400, "destination is required")
    if username is not None and not isinstance(username, str):
        raise HttpError(400, "invalid request body: username is not a string")
    return sources, destination, username


def _resolve(path: str, user: User, workdir: str | None) -> str:
    try:
        return expand(path, user, workdir)
    except PathError as error:
        raise HttpError(400, f"error resolving path: {error}") from None


def _source(given: str, path: str, target: str) -> str:
    if path == target:
        raise HttpError(400, f"source path '{printable(given)}' cannot be the same as destination")
    try:
        mode = os.stat(path).st_mode
    except OSError:
        raise HttpError(404, f"source file not found: {printable(given)}") from None
    if not stat.S_ISREG(mode):
        raise HttpError(400, f"source path is not a regular file: {printable(given)}")
    return path
