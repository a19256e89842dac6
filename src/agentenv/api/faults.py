"""Errors as answers: `{"code": STATUS, "message": ...}` for everything, the framework's own included.

A message ends with what can be done, in brackets, for clients that show nothing else; `remedy` has it alone.

E2B's clients compare the code in the body with statuses, and retry by the headers set here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from agentenv.errors import AenvError

log = logging.getLogger(__name__)


def fault(
    status: int,
    message: str,
    *,
    retry: bool = False,
    retry_after: float | None = None,
    error_code: str | None = None,
    remedy: str | None = None,
) -> JSONResponse:
    """An error answer. Without `Should-Retry` the Python client repeats every 429, 502, 503 and 504."""
    headers = {"Should-Retry": "true" if retry else "false"}
    if retry_after is not None:
        headers["Retry-After"] = str(max(1, round(retry_after)))
    body = {"code": status, "message": _printable(message)}
    if remedy:
        body["remedy"] = _printable(remedy)
    if error_code is not None:
        body["error_code"] = error_code
    return JSONResponse(body, status, headers)


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def install(app: FastAPI) -> None:
    """Answer every error of `app` in that form."""
    app.add_exception_handler(AenvError, _known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(Exception, _unknown)


async def _known(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AenvError)
    if error.status >= 500:
        log.info("%s %s: %s", request.method, request.url.path, error)
    return fault(
        error.status,
        str(error),
        retry=error.retry,
        retry_after=error.retry_after,
        error_code=error.e2b_code,
        remedy=error.remedy,
    )


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return fault(400, "; ".join(_sentence(each) for each in error.errors()))


def _sentence(item: Mapping[str, object]) -> str:
    location = item.get("loc")
    parts = [str(part) for part in location] if isinstance(location, tuple | list) else []
    where = ".".join(parts[1:]) if len(parts) > 1 and item.get("type") != "json_invalid" else ""
    message = str(item.get("msg", "invalid"))
    if item.get("type") == "json_invalid":
        return f"the body is not JSON (at byte {parts[-1]})"
    return f"{where or 'the body'}: {message}"


async def _framework(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"no such route: {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.method} is not a method of {request.url.path}"
    else:
        message = str(error.detail or HTTPStatus(error.status_code).phrase)
    answer = fault(error.status_code, message)
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def _unknown(request: Request, _error: Exception) -> JSONResponse:
    # The server logs the traceback; the client gets none of it.
    return fault(500, f"internal error at {request.method} {request.url.path}; the node's log has more")
