"""The Connect protocol with JSON (https://connectrpc.com/docs/protocol): unary and streaming calls.

A streaming message is an envelope: one byte of flags, four bytes of length (big-endian), the JSON. The
last envelope has flag 2 and holds `{}` or `{"error": …}`; a stream that ends without one was cut off.
"""

from __future__ import annotations

from binascii import a2b_base64

from agentenv.guest import loop
from agentenv.guest.http import (
    ClientGone,
    FinalChunk,
    HttpError,
    Request,
    Response,
    json_response,
)
from agentenv.guest.lean import dump_json, load_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from typing import Any, Union

    from agentenv.guest.http import Router

    Message = dict[str, Any]
    Unary = Callable[[Message, Request], Awaitable[Message]]
    Item = Union[Message, bytes, tuple[bytes, ...], "Last"]  # noqa: UP007 (the name comes later)
    ServerStream = Callable[[Message, Request], AsyncIterator[Item]]
    ClientStream = Callable[[AsyncIterator[Message], Request], Awaitable[Message]]

STREAM_TYPE = "application/connect+json"  # exactly: the Python SDK refuses a parameter
MAX_MESSAGE = 64 * 1024 * 1024
KEEPALIVE_SECONDS = 90.0
_END_FLAG = 2
STATUS_OF = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "out_of_range": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "data_loss": 500,
    "unauthenticated": 401,
}


class ConnectError(Exception):
    """Ends a call with one of the codes in `STATUS_OF` and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Last:
    """Wraps a stream's last message: it leaves together with the end of the stream, in one write."""

    __slots__ = ("message",)

    def __init__(self, message: Message | bytes) -> None:
        self.message = message


def unary(router: Router, path: str, function: Unary) -> None:
    """Registers a call of one message and one answer."""

    async def handler(request: Request) -> Response:
        try:
            _refuse_other_types(request, "application/json")
            message = parse_message(await request.read(MAX_MESSAGE))
            return json_response(await function(message, request))
        except (HttpError, ClientGone):
            raise
        except Exception as error:  # every fault is answered in the protocol's own form
            return json_error(_as_connect_error(error))

    router.add("POST", path, handler)


def server_stream(router: Router, path: str, function: ServerStream) -> None:
    """Registers a call of one message whose answers are an async generator's items.

    An item is a message, or its JSON as bytes, whole or in pieces; `Last(message)` ends the stream. The
    first item should come at once: the response's head goes out with it.
    """

    async def handler(request: Request) -> Response:
        _refuse_other_types(request, STREAM_TYPE)
        return Response(200, _answers(function, request), STREAM_TYPE)

    router.add("POST", path, handler)


def client_stream(router: Router, path: str, function: ClientStream) -> None:
    """Registers a call of many messages and one answer, given when the messages have ended."""

    async def handler(request: Request) -> Response:
        _refuse_other_types(request, STREAM_TYPE)
        try:
            answer = envelope(dump_json(await function(_messages(request), request))) + end_of_stream(None)
        except (HttpError, ClientGone):
            raise
        except Exception as error:  # every fault is answered in the protocol's own form
            answer = end_of_stream(_as_connect_error(error))
        return Response(200, answer, STREAM_TYPE)

    router.add("POST", path, handler)


def json_error(error: ConnectError) -> Response:
    """The answer of a unary call that failed."""
    status = STATUS_OF.get(error.code, 500)
    return json_response({"code": error.code, "message": error.message}, status)


def envelope(payload: bytes, flags: int = 0) -> bytes:
    """One streaming message."""
    return b"%c%b%b" % (flags, len(payload).to_bytes(4, "big"), payload)


def end_of_stream(error: ConnectError | None) -> bytes:
    """The envelope that ends a stream."""
    if error is None:
        return b"\x02\x00\x00\x00\x02{}"
    return envelope(dump_json({"error": {"code": error.code, "message": error.message}}), _END_FLAG)


def parse_message(data: bytes) -> Message:
    """A JSON object; no bytes are an empty one."""
    if not data:
        return {}
    try:
        value = load_json(data)
    except (ValueError, RecursionError) as error:
        raise ConnectError("invalid_argument", f"the message is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConnectError("invalid_argument", "the message is not a JSON object")
    return value


def keepalive_interval(request: Request) -> float:
    """Seconds between the keepalive messages that the client asks for."""
    text = request.headers.get("keepalive-ping-interval", "")
    return float(text) if text.isascii() and text.isdigit() and 0 < int(text) < 10**6 else KEEPALIVE_SECONDS


def timeout_of(request: Request) -> float | None:
    """Seconds that the call may take (`Connect-Timeout-Ms`), None for no limit."""
    text = request.headers.get("connect-timeout-ms")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ConnectError(
            "invalid_argument", f"Connect-Timeout-Ms {text!r} is not a number of up to 10 digits"
        )
    return int(text) / 1000


def field(message: Message, name: str, default: Any = None) -> Any:
    """A field by its camelCase name, or by the same in snake_case; null counts as absent."""
    value = message.get(name)
    if value is None:
        value = message.get("".join(f"_{c.lower()}" if c.isupper() else c for c in name))
    return default if value is None else value


def text_field(message: Message, name: str, default: str = "") -> str:
    """A string field."""
    value = field(message, name, default)
    if not isinstance(value, str):
        raise ConnectError("invalid_argument", f"{name} is not a string")
    return value


def flag_field(message: Message, name: str, default: bool = False) -> bool:
    """A boolean field."""
    value = field(message, name, default)
    if not isinstance(value, bool):
        raise ConnectError("invalid_argument", f"{name} is not true or false")
    return value


def int_field(message: Message, name: str, default: int = 0) -> int:
    """An integer field; its value may come as a string, as JSON has it for 64-bit integers."""
    value = field(message, name, default)
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ConnectError("invalid_argument", f"{name} is not an integer") from None


def object_field(message: Message, name: str) -> Message | None:
    """A field that is a message itself, or None."""
    value = field(message, name)
    if value is not None and not isinstance(value, dict):
        raise ConnectError("invalid_argument", f"{name} is not an object")
    return value


def bytes_field(message: Message, name: str) -> bytes | None:
    """A bytes field (base64, of either alphabet, padded or not), or None."""
    value = field(message, name)
    if value is None:
        return None
    try:
        text = value.rstrip("=").replace("-", "+").replace("_", "/")
        return a2b_base64(text + "=" * (-len(text) % 4))
    except (ValueError, AttributeError):
        raise ConnectError("invalid_argument", f"{name} is not base64") from None


async def _answers(
    function: ServerStream, request: Request
) -> AsyncGenerator[bytes | tuple[bytes, ...], None]:
    stream = None
    try:
        data = await _next_envelope(request, bytearray())
        if data is None:
            raise ConnectError("invalid_argument", "the request holds no message")
        stream = function(parse_message(data), request)
        async for item in stream:
            if isinstance(item, tuple):
                yield (b"\0%b" % sum(map(len, item)).to_bytes(4, "big"), *item)
            elif isinstance(item, Last):
                yield FinalChunk(envelope(_encoded(item.message)) + end_of_stream(None))
                return
            else:
                yield envelope(_encoded(item))
        yield FinalChunk(end_of_stream(None))
    except ClientGone:
        raise
    except Exception as error:  # every fault is answered in the protocol's own form
        yield FinalChunk(end_of_stream(_as_connect_error(error)))
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


def _encoded(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else dump_json(message)


async def _messages(request: Request) -> AsyncGenerator[Message, None]:
    buffer = bytearray()
    while (data := await _next_envelope(request, buffer)) is not None:
        yield parse_message(data)


async def _next_envelope(request: Request, buffer: bytearray) -> bytes | None:
    """The next message's bytes; None at the end of the body. `buffer` holds what came early."""
    if not await _fill(request, buffer, 5):
        return None
    flags, size = buffer[0], int.from_bytes(buffer[1:5], "big")
    if flags & ~_END_FLAG:
        raise ConnectError("unimplemented", "compressed messages are not supported")
    if size > MAX_MESSAGE:
        raise ConnectError("resource_exhausted", f"a message is larger than {MAX_MESSAGE} bytes")
    if not await _fill(request, buffer, 5 + size):
        raise ConnectError("invalid_argument", "the last message is cut off")
    data = bytes(buffer[5 : 5 + size])
    del buffer[: 5 + size]
    return None if flags & _END_FLAG else data


async def _fill(request: Request, buffer: bytearray, size: int) -> bool:
    while len(buffer) < size:
        chunk = await request.next_chunk()
        if not chunk:
            if buffer:
                raise ConnectError("invalid_argument", "the last message is cut off")
            return False
        buffer += chunk
    return True


def _as_connect_error(error: Exception) -> ConnectError:
    if isinstance(error, ConnectError):
        return error
    if isinstance(error, HttpError):
        return ConnectError(
            "resource_exhausted" if error.status == 413 else "invalid_argument", error.message
        )
    loop.report(error)
    return ConnectError("internal", f"{type(error).__name__}: {error}")


def _refuse_other_types(request: Request, wanted: str) -> None:
    given = request.headers.get("content-type", wanted).partition(";")[0].strip().lower()
    if given != wanted:
        raise HttpError(415, f"content type {given!r} is not supported here: send {wanted}")
