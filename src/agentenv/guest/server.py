"""The HTTP server: connections over the guest's event loop.

One task per connection reads a head, lets its handler answer, and sends the answer. A handler can read
the body while it already produces its answer. A client that leaves is noticed at once (the kernel
reports its FIN without a read) and ends an answer in progress; a plain handler is let finish.
"""

from __future__ import annotations

import os

from agentenv.guest import loop
from agentenv.guest.http import (
    MAX_HEAD,
    ClientGone,
    FileSpan,
    FinalChunk,
    HttpError,
    Request,
    Response,
    body_framing,
    error_response,
    parse_head,
    preflight_response,
    response_head,
    wants_close,
)
from agentenv.guest.lean import accept, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from agentenv.guest.http import Router

    Gate = Callable[[Request], Response | None]

_READ = 256 * 1024
_SEND = 1024 * 1024
_DRAIN_LIMIT = 256 * 1024
_LINGER_SECONDS = 2.0


class Server:
    """Accepts connections and answers their requests.

    Args:
        router: who answers what.
        gate: looks at each request first; a response from it is the answer.
    """

    def __init__(self, router: Router, gate: Gate | None = None) -> None:
        self.router = router
        self.gate = gate
        self.connections: set[Connection] = set()
        self._listener: socket.socket | None = None

    def listen(self, host: str, port: int) -> int:
        """Binds, starts to accept, and returns the port (the kernel's choice for 0)."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these. Keep-alive finds clients that vanished without a FIN.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 120)
        listener.setblocking(False)
        listener.bind((host, port))
        listener.listen(1024)
        self._listener = listener
        accepting = loop.spawn(self._accept(listener))
        loop.watch(listener.fileno(), lambda _events: accepting.wake())
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Stops accepting and drops every connection."""
        if self._listener is not None:
            loop.unwatch(self._listener.fileno())
            self._listener.close()
        self.drop_others(None)

    def drop_others(self, keep: Request | None) -> None:
        """Ends every connection but the one that carries `keep`.

        For a machine that was restored: the peers of its connections exist no more, and nobody will
        ever tell.
        """
        for connection in list(self.connections):
            if keep is None or connection.request is not keep:
                connection.task.cancel()

    def descriptor(self, request: Request) -> int:
        """The connection that carries a request under way."""
        return next(connection.fileno for connection in self.connections if connection.request is request)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                fd, peer = accept(listener)
            except BlockingIOError:
                await loop.SUSPEND
                continue
            except OSError as error:  # out of descriptors, or a client gone before it was accepted
                loop.report(error)
                await loop.sleep(0.1)
                continue
            self.connections.add(Connection(self, fd, peer))


class Connection:
    """One client's connection, and the source of its requests' bodies."""

    __slots__ = (
        "_buffer",
        "_chunked",
        "_continue",
        "_ended",
        "_fd",
        "_gone",
        "_left",
        "_peer",
        "_server",
        "_streaming",
        "_waiting",
        "request",
        "task",
    )

    def __init__(self, server: Server, fd: int, peer: str) -> None:
        self._server = server
        self._fd = fd
        self._peer = peer
        self._buffer = b""
        self._waiting = False
        self._gone = False
        self._streaming = False
        self._chunked = False
        self._continue = False
        self._ended = True
        self._left = 0
        self.request: Request | None = None
        self.task = loop.spawn(self._run())
        loop.watch(fd, self._on_events)

    @property
    def fileno(self) -> int:
        """Its descriptor, which is the connection's to close."""
        return self._fd

    def _on_events(self, events: int) -> None:
        if events & loop.GONE:
            self._gone = True
            if self._streaming:
                self.task.cancel()
                return
        if self._waiting:
            self.task.wake()

    async def _run(self) -> None:
        try:
            while await self._exchange():
                pass
        except ClientGone:
            pass
        finally:
            loop.unwatch(self._fd)
            os.close(self._fd)
            self._server.connections.discard(self)

    async def _exchange(self) -> bool:
        """One request and its answer; False when the connection has served."""
        try:
            head = await self._read_head()
            if head is None:
                return False
            request = self._begin(head)
        except HttpError as error:
            await self._respond(None, error_response(error), keep=False)
            await self._linger()
            return False
        response = await self._answer(request)
        # A body that nobody read must still be taken off the connection, if it is a small rest of one.
        keep = not wants_close(request) and (self._ended or not self._continue)
        if request.version == "HTTP/1.0" and not isinstance(response.body, bytes | FileSpan):
            keep = keep and response.length is not None
        await self._respond(request, response, keep)
        self.request = None
        if keep and await self._drain():
            return True
        if not self._ended:
            await self._linger()
        return False

    def _begin(self, head: bytes) -> Request:
        request = parse_head(head)
        headers = request.headers
        self._chunked, self._left = body_framing(headers)
        self._ended = not self._chunked and not self._left
        self._continue = not self._ended and headers.get("expect", "").lower() == "100-continue"
        if not self._chunked and "content-length" in headers:
            request.content_length = self._left
        request.peer = self._peer
        if not self._ended:
            request._source = self
        self.request = request
        return request

    async def _answer(self, request: Request) -> Response:
        if request.method == "OPTIONS":
            return preflight_response(request)
        try:
            refusal = self._server.gate(request) if self._server.gate is not None else None
            return refusal if refusal is not None else await self._server.router.find(request)(request)
        except HttpError as error:
            return error_response(error)
        except ClientGone:
            raise
        except Exception as error:  # a handler's fault is answered and shown, and the agent goes on
            loop.report(error)
            return error_response(HttpError(500, f"the agent failed: {type(error).__name__}: {error}"))

    async def _respond(self, request: Request | None, response: Response, keep: bool) -> None:
        body = response.body
        if isinstance(body, bytes):
            framing = "" if response.status in (204, 304) else f"content-length: {len(body)}"
            head = response_head(response, request, framing, keep)
            without = request is not None and request.method == "HEAD"
            await self._send(head if without or not body else head + body)
        elif isinstance(body, FileSpan):
            head = response_head(response, request, f"content-length: {body.length}", keep)
            await self._send_file(head, body, bare=request is not None and request.method == "HEAD")
        else:
            await self._stream(request, response, body, keep)

    async def _stream(
        self,
        request: Request | None,
        response: Response,
        body: AsyncIterator[bytes | tuple[bytes, ...]],
        keep: bool,
    ) -> None:
        chunked = response.length is None and (request is None or request.version == "HTTP/1.1")
        if chunked:
            framing = "transfer-encoding: chunked"
        else:  # to an HTTP/1.0 client without a length, the end of the connection is the end of the body
            framing = "" if response.length is None else f"content-length: {response.length}"
        head = response_head(response, request, framing, keep)
        self._streaming = True
        try:
            if self._gone:
                raise ClientGone
            if request is not None and request.method == "HEAD":
                await self._send(head)
            else:
                await self._send_items(head, body, chunked)
        finally:
            self._streaming = False
            close = getattr(body, "aclose", None)
            if close is not None:
                await close()

    async def _send_items(
        self, head: bytes, body: AsyncIterator[bytes | tuple[bytes, ...]], chunked: bool
    ) -> None:
        async for item in body:
            last = type(item) is FinalChunk
            parts = item if isinstance(item, tuple) else (item,)
            size = sum(map(len, parts))
            if chunked and size:
                end = b"\r\n0\r\n\r\n" if last else b"\r\n"
                parts = (b"%b%x\r\n" % (head, size), *parts, end)
            elif head:
                parts = (head, *parts)
            await self._send_parts(parts)
            head = b""
            if last:
                return
        await self._send(head + b"0\r\n\r\n" if chunked else head)

    async def _send_file(self, head: bytes, span: FileSpan, bare: bool) -> None:
        try:
            await self._send(head)
            offset, left = span.offset, 0 if bare else span.length
            while left:
                try:
                    sent = os.sendfile(self._fd, span.fd, offset, min(left, _SEND))
                except BlockingIOError:
                    await self._suspend()
                    continue
                except (BrokenPipeError, ConnectionError) as error:
                    raise ClientGone from error
                if not sent:  # the file shrank: the promised length cannot be kept
                    raise ClientGone
                offset += sent
                left -= sent
        finally:
            os.close(span.fd)

    async def _read_head(self) -> bytes | None:
        buffer = self._buffer.lstrip(b"\r\n")
        while (end := buffer.find(b"\r\n\r\n")) < 0:
            if len(buffer) > MAX_HEAD:
                raise HttpError(431, f"the request's head is larger than {MAX_HEAD} bytes")
            data = await self._receive(MAX_HEAD)
            if not data:
                return None
            buffer = (buffer + data).lstrip(b"\r\n") if not buffer else buffer + data
        if end > MAX_HEAD:
            raise HttpError(431, f"the request's head is larger than {MAX_HEAD} bytes")
        self._buffer = buffer[end + 4 :]
        return buffer[:end]

    async def next_chunk(self) -> bytes:
        """Some more of the current request's body; b"" at its end."""
        if self._ended:
            return b""
        if self._continue:
            self._continue = False
            await self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._chunked and not self._left and not await self._next_size():
            return b""
        data, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
        if not data:
            data = await self._receive(min(self._left, _READ))
            if not data:
                raise ClientGone
        self._left -= len(data)
        if not self._left:
            if not self._chunked:
                self._ended = True
            elif await self._line():
                raise HttpError(400, "a chunk of the body is not followed by a line end")
        return data

    async def _next_size(self) -> bool:
        """Reads the size of the next chunk; False when that was the last one, with its trailer."""
        text = (await self._line()).partition(b";")[0].strip()
        try:
            if text[:1] in (b"+", b"-") or b"_" in text:
                raise ValueError
            self._left = int(text, 16)
        except ValueError:
            raise HttpError(400, "a chunk's size in the body is malformed") from None
        if self._left:
            return True
        while await self._line():
            pass
        self._ended = True
        return False

    async def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD:
                raise HttpError(400, "a line in the chunked body is too long")
            data = await self._receive(MAX_HEAD)
            if not data:
                raise ClientGone
            self._buffer += data
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        return line

    async def _drain(self) -> bool:
        """Takes what is left of the body off the connection; False when that is too much."""
        taken = 0
        try:
            while not self._ended:
                taken += len(await self.next_chunk())
                if taken > _DRAIN_LIMIT:
                    return False
        except HttpError:
            return False
        return True

    async def _linger(self) -> None:
        """Lets the client read the answer before the connection closes.

        Closing with unread data resets the connection, and the client might lose the answer.
        """
        half = socket.socket(fileno=os.dup(self._fd))
        try:
            half.shutdown(socket.SHUT_WR)
        except OSError:  # already gone
            return
        finally:
            half.close()
        timer = loop.call_later(_LINGER_SECONDS, self.task.cancel)
        try:
            while await self._receive(_READ):
                pass
        finally:
            timer.cancel()

    async def _suspend(self) -> None:
        self._waiting = True
        try:
            await loop.SUSPEND
        finally:
            self._waiting = False

    async def _receive(self, size: int) -> bytes:
        while True:
            try:
                return os.read(self._fd, size)
            except BlockingIOError:
                await self._suspend()
            except OSError as error:  # reset by the peer, timed out
                raise ClientGone from error

    async def _send_parts(self, parts: tuple[bytes, ...]) -> None:
        """Sends what is together one piece, without making it one: copies cost, large ones most."""
        size = sum(map(len, parts))
        try:
            sent = os.writev(self._fd, parts)
        except BlockingIOError:
            sent = 0
        except OSError as error:  # reset by the peer, timed out
            raise ClientGone from error
        if sent < size:
            await self._send(memoryview(b"".join(parts))[sent:])

    async def _send(self, data: bytes | memoryview) -> None:
        view: bytes | memoryview = data
        while True:
            try:
                sent = os.write(self._fd, view)
            except BlockingIOError:
                await self._suspend()
                continue
            except OSError as error:  # reset by the peer, timed out
                raise ClientGone from error
            if sent == len(view):
                return
            view = memoryview(view)[sent:]
