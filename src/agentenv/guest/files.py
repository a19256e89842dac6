"""The REST side of files: `GET /files`, `POST /files` and `POST /files/compose`, as E2B's envd has them.

Who may: a request with the sandbox's access token, or with a signed URL. Whose files: `username` in
the query, else the default user; the agent acts as root and hands what it makes to that user.
"""

from __future__ import annotations

import errno

from agentenv.guest import signature, users
from agentenv.guest.http import HttpError
from agentenv.guest.paths import PathError, expand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentenv.guest.context import Context
    from agentenv.guest.http import Request, Response, Router
    from agentenv.guest.signature import Operation
    from agentenv.guest.users import User

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CALLER = (
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENXIO,
    errno.EINVAL,
    errno.EEXIST,
    errno.ENOTEMPTY,
)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY)


def register(router: Router, context: Context) -> None:
    """Serve /files and /files/compose."""
    from agentenv.guest.files_compose import compose
    from agentenv.guest.files_download import download
    from agentenv.guest.files_upload import upload

    async def get_files(request: Request) -> Response:
        user = _user(request, context, "read")
        return download(request, _path(request, user, context))

    async def post_files(request: Request) -> Response:
        user = _user(request, context, "write")
        return await upload(request, user, context.default_workdir)

    async def post_compose(request: Request) -> Response:
        return await compose(request, context)

    router.add("GET", "/files", get_files)
    router.add("POST", "/files", post_files)
    router.add("POST", "/files/compose", post_compose)


def find_user(name: str | None, context: Context) -> User:
    """The user of that name, or the default one.

    Raises:
        HttpError: 401, the image has no such user.
    """
    name = name or context.default_user
    try:
        return users.find(name)
    except KeyError:
        raise HttpError(401, f"error looking up user '{name}': unknown user {name}") from None


def refuse(error: OSError, doing: str) -> HttpError:
    """What a failed system call is to the client: no room is 507, an impossible path 400.

    Args:
        error: what the system call said.
        doing: what was tried, to begin the message with.
    """
    number = error.errno
    if number in _NO_ROOM:
        return HttpError(507, "not enough disk space available")
    status = 400 if number in _CALLER else 403 if number in _FORBIDDEN else 500
    return HttpError(status, f"{doing}: {error.strerror or error}")


def _user(request: Request, context: Context, operation: Operation) -> User:
    username = request.query_one("username")
    refusal = signature.refusal(
        token=context.token,
        header=request.headers.get("x-access-token"),
        path=request.query_one("path") or "",
        operation=operation,
        user=username,
        signature=request.query_one("signature"),
        expiration=request.query_one("signature_expiration"),
    )
    if refusal is not None:
        raise HttpError(401, refusal)
    return find_user(username, context)


def _path(request: Request, user: User, context: Context) -> str:
    try:
        return expand(request.query_one("path") or "", user, context.default_workdir)
    except PathError as error:
        raise HttpError(400, str(error)) from None
