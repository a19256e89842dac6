"""Forwarding on the host's own interfaces, one by one where it is off; and whether guests can have IPv6.

The kernel looks at the interface by which a packet arrives: a slot's link is set when it is made, and for the
replies the ways out need it too. The global switches are not touched: they would make a router of every
interface, and a router of IPv6 takes no more advertisements of the routes that it has itself.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from ipaddress import IPv6Address, IPv6Network
from pathlib import Path
from typing import Literal, NamedTuple

from agentenv.errors import HostFault, HostIncapable
from agentenv.network.node import NodeRegistry, write_atomically

_GLOBAL = IPv6Network("2000::/3")  # what is assigned for use between networks: RFC 4291, 2.4, and IANA
_ANYWHERE = "2001:500:88:200::8"  # an address there; nothing is sent to it
_ROUTES = Path("/proc/thread-self/net/ipv6_route")
_LOOPBACK = "lo"
_NEAR = ("fe80", "ff")  # link-local and multicast: not what packets are forwarded to
_RTF_LOCAL = 0x80000000  # the host itself


class Family(NamedTuple):
    """Where the kernel has a family's interfaces, the name of an interface's own switch, the name of our
    record, and whether the switch for all makes an interface's own needless."""

    conf: Path
    switch: str
    record: str
    all_count: bool


IPV4 = Family(Path("/proc/sys/net/ipv4/conf"), "forwarding", "forwarding.json", False)
# An interface's `forwarding` lets nothing pass in IPv6; this does, in Linux 6.17 and newer.
IPV6 = Family(Path("/proc/sys/net/ipv6/conf"), "force_forwarding", "forwarding6.json", True)


class Forwarding:
    """One family's forwarding on the host's own interfaces.

    What each was before is kept beside the node registry, because it is the last node to leave that puts
    it back.
    """

    def __init__(self, registry: NodeRegistry, family: Family) -> None:
        self._registry = registry
        self._family = family
        self._record = registry.directory / family.record

    def switch_on(self, devices: Iterable[str]) -> None:
        """Let the devices forward, recording those that did not."""
        listed = list(devices)
        if all(self._forwards(device) for device in listed):
            return
        with self._registry.exclusive():
            changed = [device for device in listed if not self._forwards(device)]
            recorded = set(self._recorded())
            write_atomically(self._record, json.dumps(sorted(recorded.union(changed))))
            for device in changed:
                _write(self._family, device, "1")

    def restore(self) -> None:
        """Switch off what was switched on, unless the whole host forwards by now."""
        if not _forwards_all(self._family):
            for device in self._recorded():
                _write(self._family, device, "0")
        self._record.unlink(missing_ok=True)

    def _recorded(self) -> list[str]:
        try:
            return [str(device) for device in json.loads(self._record.read_text())]
        except (FileNotFoundError, ValueError):
            return []

    def _forwards(self, device: str) -> bool:
        if self._family.all_count and _forwards_all(self._family):
            return True
        own = _read(self._family.conf / device / self._family.switch)
        return own != "0"  # where it has gone there is nothing to do for it


def let_link_forward_ipv6(name: str) -> None:
    """Have IPv6 on a slot's link, and let pass what arrives by it."""
    _write(IPV6, name, "0", "disable_ipv6")
    if not _forwards_all(IPV6):
        _write(IPV6, name, "1")


def ipv6_for_guests(wanted: Literal["auto", "on", "off"]) -> bool:
    """Whether guests have IPv6 on this host.

    Of itself, where the host has a way to the whole internet and an address there: with one of its own
    network alone it would prefer IPv4 itself, and guests would wait for what does not answer. And where
    the host can forward IPv6 without becoming a router altogether, or is one.

    Raises:
        HostIncapable: it is wanted, and the host cannot forward it.
    """
    if wanted == "off":
        return False
    forwards = _forwards_all(IPV6) or (IPV6.conf / _LOOPBACK / IPV6.switch).exists()
    if wanted == "on":
        if not forwards:
            raise HostIncapable(
                "guests cannot have IPv6: the host does not forward it",
                remedy="set net.ipv6.conf.all.forwarding=1 (and accept_ra=2 where routers announce the"
                " way out), run Linux 6.17 or newer, or take away the setting ipv6",
            )
        return True
    return forwards and _has_global_ipv6()


def ipv6_uplinks() -> list[str]:
    """The interfaces through which the calling thread's namespace routes IPv6 to anywhere, slots aside."""
    try:
        lines = _ROUTES.read_text().splitlines()
    except FileNotFoundError:
        return []
    return sorted(
        {
            device
            for destination, *_, flags, device in map(str.split, lines)
            if not destination.startswith(_NEAR) and not int(flags, 16) & _RTF_LOCAL
            if device != _LOOPBACK and not device.startswith("aenv")
        }
    )


def _has_global_ipv6() -> bool:
    """Whether the host would go to the internet from a global address."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect((_ANYWHERE, 53))
            return IPv6Address(probe.getsockname()[0]) in _GLOBAL
    except OSError:
        return False


def _forwards_all(family: Family) -> bool:
    return _read(family.conf / "all" / "forwarding") == "1"


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return None


def _write(family: Family, device: str, value: str, switch: str | None = None) -> None:
    file = family.conf / device / (switch or family.switch)
    try:
        file.write_text(value)
    except FileNotFoundError:
        pass  # unplugged meanwhile
    except OSError as error:
        raise HostFault(
            f"cannot write {file}: {error.strerror}",
            remedy="run the node where /proc/sys is writable, or switch forwarding on for the whole host",
        ) from error
