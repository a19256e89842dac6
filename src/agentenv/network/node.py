"""Which of the nodes on this host one is: its index, and the addresses and uids that follow.

Nodes with different data directories run side by side. Each holds an index, host-wide, as a file
in a directory under /run that names its data directory. The file outlives the node's process, so
a restarted node finds its own index again, and with it the namespaces that it left behind.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

from agentenv.errors import CapacityExceeded, HostFault, InvalidRequest
from agentenv.records.ledger import host_boot_id

REGISTRY = Path("/run/aenv-nodes")

INDEXES = 64
BLOCK_PREFIX = 18
UID_BASE = 1_900_000_000
SLOTS_PER_NODE = 9_999  # the uids of a node are UID_BASE + index * 10_000 + slot
# Of IPv6 each node has a /64 of this prefix, by its index, and slots have the same numbers in it.
NODES6 = IPv6Network("fd5e:c37b:91ab::/48")
_FIRST_SLOT_OFFSET = 256  # slot n has the address number 256 + n of the block


@dataclass(frozen=True)
class NodeIdentity:
    """A node's place on its host: everything that must differ from the other nodes'."""

    index: int
    block: IPv4Network

    @property
    def name(self) -> str:
        """Names the node's nftables table, and begins its slots' names."""
        return f"aenv{self.index}"

    @property
    def links(self) -> str:
        """What the host's ends of this node's slots are called, as nftables matches names."""
        return f"{self.name}-*"

    @cached_property
    def address(self) -> IPv4Address:
        """The host's own address towards the guests: their resolver, and where connections come from."""
        return self.block[1]

    def slot_name(self, number: int) -> str:
        """The name of a slot's namespace and of its link on the host."""
        return f"{self.name}-{number}"

    def slot_address(self, number: int) -> IPv4Address:
        """The address at which the host reaches the guest in a slot."""
        return self.block[_FIRST_SLOT_OFFSET + number]

    @cached_property
    def block6(self) -> IPv6Network:
        """The addresses of this node's slots in IPv6, which are seen on this host alone."""
        return IPv6Network((int(NODES6.network_address) + (self.index << 64), 64))

    @property
    def address6(self) -> IPv6Address:
        """What slots have for a gateway in IPv6. The host needs no such address: it is only a way to it."""
        return self.block6[1]

    def slot_address6(self, number: int) -> IPv6Address:
        """The address of IPv6 by which a slot's guest goes out of its namespace."""
        return self.block6[_FIRST_SLOT_OFFSET + number]

    def slot_number(self, address: IPv4Address) -> int:
        """The number of the slot with that address; not positive when it is no slot's."""
        return int(address) - int(self.block[_FIRST_SLOT_OFFSET])

    def uid(self, number: int) -> int:
        """The user that the machine in a slot runs as."""
        return UID_BASE + self.index * 10_000 + number


def blocks(network_range: str) -> list[IPv4Network]:
    """The blocks of a range, in order of index, at most `INDEXES`.

    Raises:
        InvalidRequest: it is no IPv4 network, or smaller than one block.
    """
    try:
        network = IPv4Network(network_range)
    except ValueError as error:
        raise InvalidRequest(
            f"network_range: {error}", remedy="give an IPv4 network such as 10.192.0.0/12"
        ) from None
    if network.prefixlen > BLOCK_PREFIX:
        raise InvalidRequest(
            f"network_range {network} is smaller than the /{BLOCK_PREFIX} that a node takes",
            remedy="give a /12, which has room for 64 nodes",
        )
    count = min(INDEXES, 1 << (BLOCK_PREFIX - network.prefixlen))
    base = int(network.network_address)
    return [IPv4Network((base + (index << (32 - BLOCK_PREFIX)), BLOCK_PREFIX)) for index in range(count)]


class NodeRegistry:
    """The nodes of this host, by index. Every method takes the host-wide lock while it runs."""

    def __init__(self, directory: Path = REGISTRY, boot_id: str | None = None) -> None:
        self.directory = directory
        self._boot_id = boot_id or host_boot_id()

    def claim(
        self,
        home: Path,
        network_range: str,
        in_use: Callable[[NodeIdentity], str | None],
        *,
        before: NodeIdentity | None = None,
    ) -> NodeIdentity:
        """The identity of the node with that data directory: the one it had, or a free one.

        Args:
            home: the node's data directory, which must exist.
            network_range: of which each node takes one block.
            in_use: says why the host cannot give away an identity (its addresses or names are
                taken by something else), or None. Not asked about one's own.
            before: the identity that the node's own records name, taken again if its file was
                lost and no other node has it.

        Raises:
            InvalidRequest: the range cannot be used.
            CapacityExceeded: no index is left.
            HostFault: every index that no other node holds is unusable on this host.
        """
        choices = blocks(network_range)
        with self._locked():
            claims = self._live_claims()
            for index, (owner, block) in claims.items():
                if owner == str(home):
                    return NodeIdentity(index, block)
            candidates = [NodeIdentity(index, block) for index, block in enumerate(choices)]
            if before is not None:
                candidates.insert(0, before)
            reasons = []
            for identity in candidates:
                index, block = identity.index, identity.block
                if index in claims or any(block.overlaps(other) for _, other in claims.values()):
                    continue
                reason = in_use(identity) if identity != before else None
                if reason is None:
                    self._write(identity, home)
                    return identity
                reasons.append(f"{block}: {reason}")
        raise _none_left(network_range, len(choices), reasons)

    def free(self, home: Path, last: Callable[[], None] | None = None) -> None:
        """Give the node's index back; when no other node remains, call `last` under the lock."""
        with self._locked():
            claims = self._live_claims()
            if last is not None and all(owner == str(home) for owner, _ in claims.values()):
                last()
            for index, (owner, _) in claims.items():
                if owner == str(home):
                    self._file(index).unlink(missing_ok=True)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock, for changes to what all nodes of the host share."""
        with self._locked():
            yield

    def _file(self, index: int) -> Path:
        return self.directory / str(index)

    def _write(self, identity: NodeIdentity, home: Path) -> None:
        record = {"home": str(home), "block": str(identity.block), "boot_id": self._boot_id}
        write_atomically(self._file(identity.index), json.dumps(record))

    def _live_claims(self) -> dict[int, tuple[str, IPv4Network]]:
        """Claims of this boot whose data directory exists; the others are removed on the way."""
        claims = {}
        for index in range(INDEXES):
            file = self._file(index)
            try:
                record = json.loads(file.read_text())
                home, block = str(record["home"]), IPv4Network(record["block"])
                alive = record["boot_id"] == self._boot_id and Path(home).is_dir()
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError):
                alive = False  # never half written (it is renamed into place): not ours to keep
            if alive:
                claims[index] = (home, block)
            else:
                file.unlink(missing_ok=True)
        return claims

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostFault(
                f"cannot open the node registry {self.directory}: {error.strerror}",
                remedy="run the node as root",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(path)


def _none_left(network_range: str, count: int, reasons: list[str]) -> HostFault | CapacityExceeded:
    if not reasons:
        return CapacityExceeded(
            f"all {count} node indexes of this host are taken",
            remedy=f"stop another node, or see who holds them in {REGISTRY}",
        )
    return HostFault(
        f"no block of network_range {network_range} is free on this host: {'; '.join(reasons[:3])}"
        + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""),
        remedy="set network_range to a range that the host neither uses nor routes",
    )
