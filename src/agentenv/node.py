"""The composition root: what a node consists of, and in which order that starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop

from agentenv import __version__, run_record
from agentenv.api.app import create_app
from agentenv.building import assemble
from agentenv.building.builder import Builder
from agentenv.config import Settings
from agentenv.errors import AenvError, HostFault
from agentenv.guestimage import build as guest
from agentenv.host import accelerator, tsc
from agentenv.host.setup import make_directories
from agentenv.identity import first
from agentenv.identity.audit import Audit
from agentenv.identity.keys import Keys
from agentenv.image.cache import Images
from agentenv.listening import bound
from agentenv.network.refusals import Refusals
from agentenv.network.resolver import Resolver
from agentenv.network.slots import Slots
from agentenv.network.upstreams import Upstreams
from agentenv.notify import notify
from agentenv.observe import logs
from agentenv.observe.observation import Observation
from agentenv.proxy.front import front_protocol
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.sandbox.service import Sandboxes
from agentenv.snapshot.chains import Limits
from agentenv.snapshot.store import Snapshots
from agentenv.snapshot.upkeep import Upkeep
from agentenv.template.create import reap as reap_builds
from agentenv.template.store import Templates
from agentenv.tls.endpoint import Endpoint
from agentenv.tls.serving import Served, source_of
from agentenv.vmm.machine import Hypervisor
from agentenv.vmm.qemu.hypervisor import Qemu

log = logging.getLogger(__name__)

# Longer than the 610 s that E2B's clients may keep a connection idle.
KEEP_ALIVE_S = 640
# Requests under way have this long when the node stops; operations go on without them.
GRACE_S = 10
BACKLOG = 1024
DESCRIPTORS = 65_536
SWEEP_S = 3600
UPKEEP_AFTER_S = 5.0


def serve(settings: Settings, *, ready_fd: int | None = None) -> None:
    """Run a node until SIGTERM or SIGINT; machines run on and are adopted by the next start.

    Args:
        settings: the settings in force.
        ready_fd: a descriptor that gets the URL and a newline once the node serves, and is closed.

    Raises:
        Conflict: another node has the data directory. HostFault, HostIncapable, StoreFault: it
            cannot start; the message says why.
    """
    logs.configure(settings)
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, ready_fd))


async def _serve(settings: Settings, ready_fd: int | None) -> None:
    with _signals() as stop:
        node = Node(settings)
        await node.start()
        # What is there now stays. A collection that walked it would hold all requests up for 50 ms.
        gc.freeze()
        try:
            _tell(ready_fd, node.url)
            notify("READY=1", f"STATUS=serving {node.url}")
            ended = asyncio.create_task(node.ended())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
        finally:
            notify("STOPPING=1")
            await node.stop()


def raise_descriptor_limit() -> None:
    """Let this process open `DESCRIPTORS` files, or as many as it may: a relayed connection takes two, and
    the usual limit, 1024, is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Node:
    """One data directory being served. `start` once, then `stop` once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._parts = AsyncExitStack()
        self._keep = True
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""
        self.refusals = Refusals()  # the lookups that sandboxes' rules did not allow
        self.tls_url: str | None = None

    async def start(self) -> None:
        """Bring up all parts; returns once requests are answered. On failure all are down again."""
        async with AsyncExitStack() as parts:
            await self._start(parts)
            self._parts = parts.pop_all()
        if self.tls_url is not None:
            log.info("serving %s for %s", self.tls_url, self.settings.domain_name)
        log.info("serving %s (version %s, data in %s)", self.url, __version__, self.settings.home)

    async def _start(self, parts: AsyncExitStack) -> None:
        settings = self.settings
        _directories(settings)
        parts.callback(_leave_runtime, settings.runtime_dir)
        parts.enter_context(run_record.hold(settings.home))
        listener = parts.enter_context(bound(settings.host, settings.port))
        address = listener.getsockname()
        tls = _tls(parts, settings)
        if stale := guest.stale(settings):  # a node without guest files is told at once
            log.warning("%s of the guest are not those of this program: run aenv setup", " and ".join(stale))
        database = Database(settings.database)
        parts.callback(database.close)
        keys = Keys(database, first.load_or_create(settings))
        audit = Audit(
            settings.audit_file, file_bytes=settings.audit_file_mib << 20, files=settings.audit_files
        )
        parts.callback(audit.close)
        ledger = Ledger(database)
        reap_builds(ledger, database)
        hypervisor = await _hypervisor(settings, ledger)
        slots = Slots(settings, ledger)
        await slots.start()
        parts.push_async_callback(slots.stop)
        upstreams = Upstreams(settings.nameservers)
        resolver = Resolver(str(slots.identity.address), upstreams, slots, refusals=self.refusals)
        await resolver.start()
        parts.push_async_callback(resolver.stop)
        templates = Templates(database, settings)
        snapshots = Snapshots(database, ledger, settings.home)
        images = Images(settings, database, ledger)
        parts.push_async_callback(images.close)
        service = Sandboxes(
            settings,
            database,
            ledger,
            hypervisor,
            slots,
            templates,
            partial(guest.load, settings),
            snapshots=snapshots,
            upkeep=Upkeep(snapshots, Limits.of(settings), rest_s=UPKEEP_AFTER_S),
            images=images,
            quota_of=keys.quota_of,
        )
        observation = Observation(service)
        parts.push_async_callback(observation.stop)
        await service.start()
        parts.push_async_callback(self._stop_sandboxes, service)
        observation.start()
        builder = assemble.builder(settings, database, service, templates, images)
        observation.watch(builder, images)
        builder.start()
        parts.push_async_callback(builder.stop)
        sweeping = asyncio.create_task(_sweep(templates, service, builder, images), name="sweep")
        parts.push_async_callback(_cancelled, sweeping)
        front = front_protocol(service, settings, partial(_may_forward, keys, service))
        service.on_generation_end(front.plane.abort)
        observation.metrics.plane = front.plane
        parts.callback(front.plane.close)
        app = create_app(
            service,
            templates,
            settings,
            keys=keys,
            port=address[1],
            builder=builder,
            observation=observation,
            audit=audit,
        )
        await self._begin_serving(parts, uvicorn_config(app, front), listener, tls)
        parts.callback(observation.events.close)  # before the server ends, which waits for them
        self.url = _url(settings.host, address[1])
        run_record.write(settings, self.url)
        parts.callback(run_record.remove, settings)

    async def _begin_serving(
        self,
        parts: AsyncExitStack,
        config: uvicorn.Config,
        listener: socket.socket,
        tls: Endpoint | None,
    ) -> None:
        self._server = _Server(config, tls)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="server")
        parts.push_async_callback(self._stop_serving)
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({up, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._serving.done():
            self._serving.result()
            raise HostFault("the HTTP server ended at its start")
        if tls is not None:
            self.tls_url = _url(self.settings.host, tls.port, "https")
            parts.push_async_callback(_cancelled, asyncio.create_task(tls.watch(), name="certificate"))

    async def ended(self) -> None:
        """Return if the server ends by itself."""
        assert self._serving is not None
        await asyncio.wait({self._serving})

    async def stop(self, *, keep: bool = True) -> None:
        """Take down all parts, in the reverse order. With `keep` the machines run on, to be adopted
        by the next start; else they are ended."""
        self._keep = keep
        await self._parts.aclose()
        log.info("stopped")

    async def _stop_serving(self) -> None:
        assert self._server is not None and self._serving is not None
        self._server.should_exit = True
        await self._serving

    async def _stop_sandboxes(self, service: Sandboxes) -> None:
        running = service.count
        await service.stop(keep=self._keep)
        if running and self._keep:
            log.info("%d sandboxes run on without the node; its next start adopts them", running)


def _may_forward(keys: Keys, service: Sandboxes, secret: bytes, sandbox_id: str) -> bool | None:
    """As proxy.plane.MayForward. An admin's key reaches the sandboxes of all projects."""
    found = keys.find(secret)
    if found is None:
        return None
    return found.is_admin or service.project_of(sandbox_id) == found.project


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals alone, says when it is up, and may take TLS on a second port."""

    def __init__(self, config: uvicorn.Config, tls: Endpoint | None = None) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._tls = tls

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._tls is not None:
            self.servers.append(await self._tls.listen(self._protocol, BACKLOG))
        self.up.set()

    def _protocol(self) -> asyncio.Protocol:
        kind = cast(Any, self.config.http_protocol_class)
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def _tls(parts: AsyncExitStack, settings: Settings) -> Endpoint | None:
    """The port for TLS, if there is a certificate."""
    source = source_of(settings)
    if source is None:
        return None
    served = Served(source, settings.domain_name)
    listener = bound(settings.host, settings.tls_port, "AENV_TLS_PORT")
    return Endpoint(parts.enter_context(listener), served)


async def _sweep(templates: Templates, service: Sandboxes, builder: Builder, images: Images) -> None:
    """Remove what replaced templates and old builds left, and images beyond the budget, now and from time to
    time."""
    while True:
        try:
            builder.sweep()
            service.drop_outdated()
            templates.sweep()
            await images.evict()
        except (AenvError, OSError) as error:  # nothing waits for it, and the next round comes
            log.warning("files that nothing needs are not removed: %s", error)
        await asyncio.sleep(SWEEP_S)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def uvicorn_config(app: Any, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    """How the API is served behind the front `protocol`."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
    )


async def _hypervisor(settings: Settings, ledger: Ledger) -> Hypervisor:
    choice = await asyncio.to_thread(accelerator.choose, settings)  # may boot a kernel to find out
    tsc_khz = await asyncio.to_thread(tsc.khz)
    log.info("machines run with %s", choice)
    return Qemu(settings, ledger, accelerator=choice.accelerator, tsc_khz=tsc_khz)


def _directories(settings: Settings) -> None:
    make_directories(settings)
    try:
        settings.runtime_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        raise HostFault(f"cannot make {settings.runtime_dir}: {error.strerror}") from error


def _leave_runtime(directory: Path) -> None:
    """Remove the run-time directory unless machines, or another node's start, have something in it."""
    for path in (directory / "machines", directory):
        with contextlib.suppress(OSError):
            path.rmdir()


def _url(host: str, port: int, scheme: str = "http") -> str:
    """How clients on this host reach the node."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


def _tell(ready_fd: int | None, url: str) -> None:
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, f"{url}\n".encode())
    except BrokenPipeError:
        pass  # who started it has gone on
    finally:
        os.close(ready_fd)


@contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set; nothing else happens at a signal."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
