"""How much the data plane carries: requests, latency, bodies, WebSockets, beside nginx and no proxy at all.

    python bench/proxy.py [--json]

A server in the host's namespace stands in for a guest. The proxy (the node's data plane, which routes and
authorises each request) has one core to itself, as has nginx (the distribution's), which relays all to the
guest; the guest and the load share the others. `requests_per_second` is with the load as fast as
answers come, and no figure of the proxy alone where the load's core is the busier one: `cpu_us_per_request`
is processor time of the process that was asked, and 1,000,000 / that is what its core can do.
`p99_ms_at_half` is at half of `--rate`, or of what was reached if that is less, from when a request was due.

On a machine that does other things as well, `chrt --rr 1 python bench/proxy.py` measures as if it did not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from measure import show
from proxy_ends import (
    TOKEN,
    Running,
    find_nginx,
    make_certificate,
    nginx,
    running,
    serve_guest,
    serve_proxy,
    trusting_all,
)
from proxy_load import Way, download, latency_at, most_requests, upload, websocket_memory


async def measure(way: Way, options: argparse.Namespace) -> dict[str, float]:
    """The four figures of a way."""
    result = await most_requests(way, options.connections, options.seconds)
    rate = min(result["requests_per_second"], options.rate) / 2
    result["p99_ms_at_half"] = await latency_at(way, options.connections, rate, options.seconds)
    result["upload_mb_s"] = await asyncio.to_thread(upload, way, options.mib)
    result["download_mb_s"] = await asyncio.to_thread(download, way, options.mib)
    return result


def proxied(process: Running, guest: Running, varied: bool) -> Way:
    """The way through the data plane to one of its sandboxes."""
    routing = (
        f"E2b-Sandbox-Id: box{{n}}\r\nE2b-Sandbox-Port: {guest.port}\r\nE2b-Traffic-Access-Token: {TOKEN}\r\n"
    )
    return Way("proxy", process, routing, varied)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    cores = sorted(os.sched_getaffinity(0))
    first, rest = {cores[0]}, set(cores[1:]) or {cores[0]}
    os.sched_setaffinity(0, rest)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aenv-bench-")))
        program = find_nginx(directory)
        if program is None:
            print("nginx is not here, so it is not measured: apt-get install nginx", file=sys.stderr)
        guest = stack.enter_context(running(["guest"], rest))
        with running(["proxy"], first) as process:
            way = proxied(process, guest, options.varied)
            result: dict[str, Any] = await measure(way, options)
            result["websockets_mib"] = await websocket_memory(way, options.websockets)
        with running(["proxy", str(make_certificate(directory))], first) as process:
            way = proxied(process, guest, options.varied)
            result["websockets_tls_mib"] = await websocket_memory(way, options.websockets, trusting_all())
        result["direct"] = await measure(Way("direct", guest), options)
        result["nginx"] = None
        if program is not None:
            with nginx(program, directory, guest.port, first) as process:
                result["nginx"] = await measure(Way("nginx", process), options)
    return result


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of the two request parts")
    parser.add_argument("--varied", action="store_true", help="no two requests in a row have the same fields")
    parser.add_argument("--mib", type=int, default=1024, help="size of the bodies")
    parser.add_argument("--rate", type=float, default=8000, help="the latency is taken at half of it")
    parser.add_argument("--websockets", type=int, default=500)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        role, *rest = options.role
        uvloop.run(serve_guest() if role == "guest" else serve_proxy(*rest or [None]))
        return
    show(uvloop.run(run(options)), options.json)


if __name__ == "__main__":
    main()
