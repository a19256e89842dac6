"""What the sandbox service needs of other rooms, as protocols: slots, templates, images, a clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from agentenv.image.cache import CachedImage
from agentenv.image.credentials import Credentials
from agentenv.limits import NetworkLimits
from agentenv.network.policy import Policy
from agentenv.network.slot import Slot
from agentenv.progress import Progress
from agentenv.snapshot.records import Init, Start
from agentenv.vmm.machine import GuestFiles


class Slots(Protocol):
    """Network slots, each owned by one sandbox at a time."""

    async def acquire(self, owner: str) -> Slot:
        """A free slot, recorded as `owner`'s.

        Raises:
            CapacityExceeded: none is free. HostFault: one could not be made.
        """

    async def release(self, slot: Slot) -> None:
        """Take a slot back. Nothing of its owner's is reachable through it afterwards."""

    async def limit(self, slot: Slot, limits: NetworkLimits) -> None:
        """Limit the traffic of a slot from now on; the limits go with it.

        Raises:
            HostFault: they cannot be set.
        """

    @property
    def free(self) -> int:
        """How many more can be acquired."""

    def hand_over(self, slot: Slot, owner: str) -> None:
        """Record another owner of a slot.

        Raises:
            HostFault: it was released.
        """

    @property
    def ipv6(self) -> bool:
        """Whether guests have IPv6."""

    def check(self, policy: Policy) -> None:
        """See that a policy can be in force on this node.

        Raises:
            InvalidRequest: it cannot.
        """

    async def apply(self, slot: Slot, policy: Policy) -> None:
        """Have a policy in force at a slot: what the guest in it may reach.

        Raises:
            HostFault: it could not be applied; the one before is in force.
        """

    async def adopt(self, owner: str, policy: Policy = ...) -> Slot | None:
        """The slot that `owner` held in an earlier life of this node, if it is whole, with that policy in
        force."""

    async def reap(self, keep: set[str]) -> list[str]:
        """Release every recorded slot whose owner is not in `keep`; returns their names."""


class Template(Protocol):
    """What of a template is needed to start from it."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def build_id(self) -> str: ...
    @property
    def vcpus(self) -> int: ...
    @property
    def memory_mib(self) -> int: ...
    @property
    def disk_mib(self) -> int: ...
    @property
    def rootfs(self) -> Path | None:
        """What its first snapshot is booted from; None where a build made that."""

    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def default_user(self) -> str: ...
    @property
    def default_workdir(self) -> str | None: ...
    @property
    def init(self) -> Init: ...
    @property
    def start(self) -> Start:
        """What runs in each of its sandboxes from the first snapshot on."""


class Templates(Protocol):
    """Templates by id or name."""

    def get(self, reference: str) -> Template:
        """The template of that id or name.

        Raises:
            NotFound: there is none.
        """

    def serves(self, build_id: str) -> bool:
        """Whether sandboxes may still be started from that build of a template."""


class Held(Protocol):
    """What keeps something until it is released."""

    def release(self) -> None: ...


class Images(Protocol):
    """Where root filesystems of images come from; see image.cache.Images."""

    async def get(
        self,
        source: str,
        *,
        credentials: Credentials | None = None,
        disk_mib: int | None = None,
        progress: Progress,
    ) -> CachedImage: ...

    def keep(self, digest: str) -> Held: ...


class Clock(Protocol):
    """Wall time and a timer, so that tests need not wait."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after a delay; the answer cancels that."""


class SystemClock:
    """The host's clock and the running event loop's timer."""

    def now(self) -> float:
        return time.time()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        return asyncio.get_running_loop().call_later(delay_s, callback).cancel


class GuestFilesSource(Protocol):
    """What guests boot with."""

    def __call__(self, recorded: Mapping[str, str] | None = None, /) -> GuestFiles:
        """The files in force; or those of the digests in a snapshot's fingerprint, if they are there."""
