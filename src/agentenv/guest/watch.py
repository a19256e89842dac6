"""The calls of E2B's `filesystem.Filesystem` that watch: WatchDir (a stream of events) and the
CreateWatcher, GetWatcherEvents, RemoveWatcher trio (events are kept until they are fetched).
"""

from __future__ import annotations

import errno
import os
import stat
from binascii import hexlify

from agentenv.guest import loop
from agentenv.guest.connect import (
    ConnectError,
    flag_field,
    keepalive_interval,
    server_stream,
    text_field,
    unary,
)
from agentenv.guest.filesystem import failure, resolve
from agentenv.guest.filesystem_entry import entry
from agentenv.guest.paths import printable
from agentenv.guest.watch_inotify import on_network_filesystem
from agentenv.guest.watch_tree import CHANGED_MODE, CREATED, WRITTEN, TreeWatch, WatchLost, open_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from agentenv.guest.connect import Message
    from agentenv.guest.context import Context
    from agentenv.guest.http import Request, Router
    from agentenv.guest.watch_tree import Change

_PREFIX = "/filesystem.Filesystem/"

# What a watcher keeps for a client that does not come to fetch: some 20 MB.
_MOST_KEPT = 65536

# Kinds after which something is still at the path.
_WITH_ENTRY = frozenset((CREATED, WRITTEN, CHANGED_MODE))


def register(router: Router, context: Context) -> None:
    """Serve the watching calls."""
    service = Watching(context)
    server_stream(router, _PREFIX + "WatchDir", service.watch_dir)
    unary(router, _PREFIX + "CreateWatcher", service.create_watcher)
    unary(router, _PREFIX + "GetWatcherEvents", service.get_watcher_events)
    unary(router, _PREFIX + "RemoveWatcher", service.remove_watcher)


class Watching:
    """The service: it keeps the watchers that clients created, until they remove them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._watchers: dict[str, _Watcher] = {}
        self._open_ones: set[_Watcher] = set()
        context.catch_ups.append(self.catch_up)

    def catch_up(self) -> None:
        """Take what the kernel holds, for every watcher.

        A client that made a directory and now writes into it counts on the directory being followed,
        although its requests may come faster than the loop looks at the watchers.
        """
        for watcher in list(self._open_ones):
            watcher.collect()

    async def watch_dir(self, message: Message, request: Request) -> AsyncGenerator[Message, None]:
        """`{path, recursive, includeEntry, allowNetworkMounts}` → `{start}`, then `{filesystem}` each.

        not_found, invalid_argument for a file or a network mount. Ends when the client leaves, and
        with an internal error when events were lost.
        """
        interval = keepalive_interval(request)
        watcher = await self._open(message, request)
        try:
            yield {"start": {}}
            while True:
                events = watcher.take()
                for event in events:
                    yield {"filesystem": event}
                if not events and not await watcher.changed.wait(interval):
                    yield {"keepalive": {}}
        finally:
            watcher.close()

    async def create_watcher(self, message: Message, request: Request) -> Message:
        """The same request as WatchDir's → `{watcherId}`."""
        watcher = await self._open(message, request)
        identifier = "w" + hexlify(os.urandom(10)).decode()
        self._watchers[identifier] = watcher
        return {"watcherId": identifier}

    async def get_watcher_events(self, message: Message, request: Request) -> Message:
        """`{watcherId}` → `{events}` since the last call; not_found, internal when some were lost."""
        return {"events": self._find(message)[1].take()}

    async def remove_watcher(self, message: Message, request: Request) -> Message:
        """`{watcherId}` → `{}`; not_found."""
        identifier, watcher = self._find(message)
        del self._watchers[identifier]
        watcher.close()
        return {}

    def _find(self, message: Message) -> tuple[str, _Watcher]:
        identifier = text_field(message, "watcherId")
        watcher = self._watchers.get(identifier)
        if watcher is None:
            raise ConnectError("not_found", f"watcher with id {printable(identifier)} not found")
        return identifier, watcher

    async def _open(self, message: Message, request: Request) -> _Watcher:
        user = self._context.user_of(request)
        path = resolve(text_field(message, "path"), user, self._context)
        recursive = flag_field(message, "recursive")
        allowed = flag_field(message, "allowNetworkMounts")
        include_entry = flag_field(message, "includeEntry")
        shown = printable(path)
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise ConnectError("invalid_argument", f"path {shown} not a directory")
            if not allowed and on_network_filesystem(path):
                raise ConnectError("invalid_argument", f"cannot watch path on network filesystem: {shown}")
            return _Watcher(await open_tree(path, recursive=recursive), include_entry, self._open_ones)
        except (FileNotFoundError, NotADirectoryError):
            raise ConnectError("not_found", f"path {shown} not found") from None
        except OSError as error:
            raise _refused(error, f"error watching {shown}") from None


class _Teller:
    """Events in the protocol's form."""

    def __init__(self, tree: TreeWatch, include_entry: bool) -> None:
        self._root = tree.root.rstrip("/")
        self._include_entry = include_entry

    def event(self, change: Change) -> Message:
        path, kind = change
        told: Message = {"name": printable(path), "type": kind}
        if self._include_entry and kind in _WITH_ENTRY:
            try:
                told["entry"] = entry(f"{self._root}/{path}" if path != "." else self._root or "/")
            except OSError:
                pass  # gone again: the event stands without it
        return told


class _Watcher:
    """A watch whose events wait to be taken; `changed` is set while there are some.

    It is in `registry` until it is closed.

    They are collected the moment the kernel has them: a new directory must be followed before more
    happens in it.
    """

    def __init__(self, tree: TreeWatch, include_entry: bool, registry: set[_Watcher]) -> None:
        self.changed = loop.Event()
        self._tree = tree
        self._teller = _Teller(tree, include_entry)
        self._events: list[Message] = []
        self._error: ConnectError | None = None
        self._registry = registry
        registry.add(self)
        loop.watch(tree.fd, lambda events: self.collect())

    def take(self) -> list[Message]:
        """The events so far, also those that the kernel still holds."""
        self.collect()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        self.changed.clear()
        return events

    def close(self) -> None:
        self._registry.discard(self)
        if self._tree.fd >= 0:
            loop.unwatch(self._tree.fd)
            self._tree.close()

    def collect(self) -> None:
        """Take over what the kernel holds."""
        if self._error is not None:
            return
        try:
            changes = _read(self._tree)
            if len(self._events) + len(changes) > _MOST_KEPT:
                raise ConnectError("internal", f"more than {_MOST_KEPT} events were not fetched in time")
        except ConnectError as error:
            self._error = error
            self._events.clear()
            self.changed.set()
            self.close()
            return
        if changes:
            self._events += map(self._teller.event, changes)
            self.changed.set()


def _read(tree: TreeWatch) -> list[Change]:
    try:
        return tree.read()
    except WatchLost as error:
        raise ConnectError("internal", f"watcher error: {error}") from None
    except OSError as error:
        raise _refused(error, "watcher error") from None


def _refused(error: OSError, doing: str) -> ConnectError:
    # For a watch these two are its own limits, not a full disk or too many open files.
    if error.errno in (errno.ENOSPC, errno.EMFILE):
        return ConnectError("resource_exhausted", f"{doing}: {error.strerror}")
    return failure(error, doing)
