"""A builder over parts in memory: guests that note what they are told to do, and images that are a name."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from agentenv.building import assemble
from agentenv.building.builder import Builder
from agentenv.errors import NotFound
from agentenv.image.cache import CachedImage
from agentenv.image.config import ImageConfig
from agentenv.image.credentials import Credentials
from agentenv.sandbox.guest import Command, CommandFailed, Output
from agentenv.vmm.machine import Machine
from support.sandbox_parts import MemoryNode

T = TypeVar("T")


class MemoryGuest:
    """One machine's guest. A command's last word is what it is known by."""

    def __init__(self, workplace: Workplace, machine: Machine) -> None:
        self._workplace = workplace
        self._machine = machine

    async def run(self, command: Command, output: Output, *, limit_s: float = 0) -> None:
        text = command.argv[-1]
        self._workplace.commands.append(command)
        await self._workplace.steps.at(f"run {text}")
        output("stdout", self._workplace.says.get(text, f"ran {text}\n").encode())
        if text in self._workplace.failing:
            raise CommandFailed(self._workplace.failing[text])

    async def put(self, path: str, file: BinaryIO, size: int) -> None:
        self._workplace.put.append(file.read(size))

    async def fetch(self, path: str, take: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, T]]) -> T:
        async def body() -> AsyncIterator[bytes]:
            yield b"\n.\n"

        return await take(body())


class MemoryHold:
    def __init__(self, held: list[str], digest: str) -> None:
        self._held, self._digest = held, digest
        held.append(digest)

    def release(self) -> None:
        self._held.remove(self._digest)


class MemoryImages:
    """Every image is there but those whose name begins with `missing`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.asked: list[tuple[str, Credentials | None]] = []
        self.held: list[str] = []
        self.config = ImageConfig(env={"FROM_IMAGE": "1"})

    async def get(
        self,
        source: str,
        *,
        credentials: Credentials | None = None,
        disk_mib: int | None = None,
        progress: Callable[[str], None],
    ) -> CachedImage:
        source = source.removeprefix("docker:")
        self.asked.append((source, credentials))
        if source.startswith("missing"):
            raise NotFound(f"{source}: no such image")
        progress(f"pulled {source}")
        digest = f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"
        rootfs = self._directory / f"{digest[7:20]}.ext4"
        rootfs.write_bytes(b"a filesystem")
        return CachedImage(
            digest, rootfs, disk_mib or 1024, 200 << 20, self.config, self.config.user or "root", "/root"
        )

    def keep(self, digest: str) -> MemoryHold:
        return MemoryHold(self.held, digest)


class Workplace:
    """A node in memory with a builder."""

    def __init__(self, home: Path, **settings: Any) -> None:
        self.node = MemoryNode(home, **settings)
        self.steps = self.node.steps
        self.commands: list[Command] = []
        self.failing: dict[str, str] = {}
        # As systemctl once all is up, and as a shell where a COPY wants to know the home.
        self.says = {"--wait": "running\n", 'printf %s "$HOME"': "/home/user"}
        self.put: list[bytes] = []
        self.images = MemoryImages(home / "images")
        self.builder = self._builder()

    def _builder(self) -> Builder:
        node = self.node
        return assemble.builder(
            node.settings,
            node.database,
            node.service,
            node.templates,
            self.images,
            guest_at=lambda machine, address: MemoryGuest(self, machine),
        )

    async def start(self) -> None:
        await self.node.service.start()
        self.builder.start()

    async def restart(self) -> None:
        """A new life of the node; the builds of the one before were broken off by its death."""
        await self.node.restart()
        self.builder = self._builder()
        self.builder.start()

    @property
    def ran(self) -> list[str]:
        """The texts of the commands that steps ran."""
        return [each.argv[-1] for each in self.commands if each.argv[0] in ("/bin/bash", "/bin/sh")]

    @property
    def machines_made(self) -> int:
        """How many machines were booted or restored since last looked."""
        made = sum(step in ("boot", "restore") for step in self.steps.passed)
        self.steps.passed.clear()
        return made
