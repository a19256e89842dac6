"""The agent's life: settings from the command line, set-up of the process, then serving."""

from __future__ import annotations

import gc
import os
import resource
import sys

from agentenv.guest import forward, init, launch, loop, process_service, reaper, remembered
from agentenv.guest.context import GATEWAY, UNAUTHORIZED, Context
from agentenv.guest.http import HttpError, Request, Response, Router, error_response
from agentenv.guest.lean import signal
from agentenv.guest.server import Server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_USAGE = """usage: python -m agentenv.guest [options]
  --listen ADDRESS   where to listen (default 0.0.0.0)
  --port PORT        on which port, 0 for any (default 49983)
  --gateway ADDRESS  from where /init is accepted (default 169.254.0.22)
  --user NAME        the default user until /init names one (default root)
  --init             set up as process 1 of a machine, and let /init change the machine
"""
_OPEN_FILES = (65536, 1048576)
_KEPT_MEMORY = 2 * 1024 * 1024
_OPEN_PATHS = frozenset(("/health", "/files", "/init", "/forward", "/fsfreeze", "/fsthaw"))


class Options:
    """What the command line says."""

    def __init__(self) -> None:
        self.listen = "0.0.0.0"
        self.port = 49983
        self.gateway = GATEWAY
        self.user = "root"
        self.init = False


def parse_options(arguments: list[str]) -> Options:
    """Options from arguments; SystemExit with the usage when one is unknown."""
    options = Options()
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        name, equals, value = name.partition("=")
        if name == "--init":
            options.init = True
            continue
        if name not in ("--listen", "--port", "--gateway", "--user") or not (equals or rest):
            raise SystemExit(_USAGE)
        value = value if equals else rest.pop(0)
        if name == "--port":
            if not value.isdigit():
                raise SystemExit(_USAGE)
            options.port = int(value)
        else:
            setattr(options, name[2:], value)
    return options


def main(arguments: list[str] | None = None) -> None:
    """Runs the agent; does not return."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    prepare(init_mode=options.init)
    loop.run(serve(options))


def is_service(options: Options) -> bool:
    """Whether something else is process 1, which starts the agent again when it ends."""
    return options.init and os.getpid() != 1


async def serve(options: Options) -> None:
    """Serves for ever."""
    reaper.start()
    context = Context(options.gateway, options.user)
    context.env["E2B_SANDBOX"] = "true"
    if is_service(options):
        remembered.recall(context)
    router = Router()
    server = Server(router, gate_of(context))
    init.register(router, context, server, change_system=options.init, remember=is_service(options))
    process_service.register(router, context)
    forward.register(router, context)
    _register_files(router, context)
    port = server.listen(options.listen, options.port)
    # Freeing one large block makes the C library keep freed memory, up to twice that size, instead of
    # giving it back and faulting it in anew for each piece of a large output.
    bytes(_KEPT_MEMORY)
    gc.collect()
    gc.freeze()  # what is there now stays; later collections need not walk it (nor touch its pages)
    gc.set_threshold(20000, 20, 100)
    print(f"agent ready on {options.listen}:{port}", flush=True)
    await loop.Event().wait()


def gate_of(context: Context) -> Callable[[Request], Response | None]:
    """Comes before each request's handler: without the access token only a few paths are open.

    /files also accepts a signature and checks by itself; /init and /forward are the host's.
    """

    def gate(request: Request) -> Response | None:
        if request.raw_path in _OPEN_PATHS or context.token_ok(request):
            for catch_up in context.catch_ups:
                catch_up()
            return None
        return error_response(HttpError(401, UNAUTHORIZED))

    return gate


def prepare(*, init_mode: bool) -> None:
    """Sets up this process: limits, umask, signals, directory; and what it is for its descendants."""
    os.umask(0o022)
    os.chdir("/")
    _allow_open_files()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if init_mode:
        # Ctrl-Alt-Del and console signals mean nothing here; the host ends the machine.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if os.getpid() != 1:  # which the kernel never picks when memory is short
            launch.protect_from_oom()


def _allow_open_files() -> None:
    soft, hard = _OPEN_FILES
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except ValueError:  # the hard limit may not be raised here (not root, or a root without that right)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, limit), limit))


def _register_files(router: Router, context: Context) -> None:
    from agentenv.guest import files, filesystem, metrics, watch

    for module in (filesystem, watch, files, metrics):
        module.register(router, context)
