"""New connections to guests: who is dialled, how often, and the agent's help where nobody answers.

A service that listens at the guest's loopback address alone refuses connections from outside. The
agent can make it reachable, and is asked once when a connection to a port was refused.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

from agentenv.proxy.directory import Route
from agentenv.proxy.routing import AGENT_PORT
from agentenv.proxy.upstream import Key, Upstream

ASK_TIMEOUT_S = 1.0  # for all of the question to the agent
# A guest's server may be starting when its port is first asked for. A port that stays closed is
# known to be so after the sum, 0.35 s.
PAUSES_S = (0.05, 0.1, 0.2)
_RETRIED = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET})


async def dial(
    route: Route, port: int, current: Callable[[Route], bool], connect_s: float
) -> Upstream | None:
    """A connection to a port of a sandbox, on which nothing was sent; None when there is none to be had.

    Args:
        route: the sandbox, and the generation that the connection is for.
        port: of the guest.
        current: whether the route still leads to a running sandbox.
        connect_s: the time that one attempt may take.
    """
    pauses = iter(PAUSES_S)
    may_ask = port != AGENT_PORT
    while True:
        try:
            return await connect(route, port, connect_s)
        except OSError as error:
            if error.errno not in _RETRIED:
                return None
            refused = error.errno == errno.ECONNREFUSED
        if refused and may_ask:
            may_ask = False
            if await expose(route, port):
                continue
        pause = next(pauses, None)
        if pause is None:
            return None
        await asyncio.sleep(pause)  # nothing tells when a guest's server will listen
        if not current(route):
            return None


async def connect(route: Route, port: int, limit_s: float) -> Upstream:
    """Open a connection to a port of a sandbox. Nothing is sent.

    Raises:
        OSError: refused or unreachable; TimeoutError, which is one, after `limit_s`.
    """
    key = Key(route.sandbox_id, route.generation, port)
    async with asyncio.timeout(limit_s):
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: Upstream(key), route.address, port)
    return upstream


async def expose(route: Route, port: int) -> bool:
    """Have the agent relay a port to the guest's loopback address; whether to connect again makes sense.

    False also when the agent does not answer in time.
    """
    body = b'{"port":%d}' % port
    request = b"POST /forward HTTP/1.1\r\nHost: agent\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(route.address, AGENT_PORT)
            try:
                writer.write(request % (len(body), body))
                return await reader.readuntil(b" ") + await reader.readexactly(3) == b"HTTP/1.1 204"
            finally:
                writer.transport.abort()
    except (OSError, EOFError, asyncio.LimitOverrunError):  # no agent there, or not one that knows this
        return False
