"""A slot in the kernel: its namespace, links, addresses and rules made, checked and removed.

Everything here blocks for milliseconds and moves the calling thread between namespaces, so it
runs in threads kept for it (see slots.py).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

from agentenv.errors import HostFault
from agentenv.network import egress, forwarding, netlink, nft
from agentenv.network.egress import Opening
from agentenv.network.netlink import Rtnetlink
from agentenv.network.opened import Opened
from agentenv.network.policy import UNRESTRICTED, Policy
from agentenv.network.slot import (
    GATEWAY_ADDRESS,
    GATEWAY_ADDRESS6,
    GATEWAY_MAC,
    GUEST_ADDRESS,
    GUEST_ADDRESS6,
    GUEST_MAC,
    GUEST_PREFIX,
    GUEST_PREFIX6,
)

NAMESPACES = Path("/run/netns")  # where `ip netns` looks

# Both ends' hardware addresses are fixed and entered as neighbours: no ARP goes over a veth pair.
_HOST_MAC = "02:fc:00:00:00:01"
_UPLINK_MAC = "02:fc:00:00:00:02"

_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CLONE_NEWNET = 0x40000000
_MS_BIND, _MNT_DETACH = 4096, 2

# No addresses but those given, which are there at once.
_IPV6_ON = {"addr_gen_mode": "1", "accept_dad": "0", "forwarding": "1", "disable_ipv6": "0"}
_IPV6_OFF = {"disable_ipv6": "1"}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Ipv6Wiring:
    """What of a slot is there where guests have IPv6: its address, and what it has for a gateway."""

    address: IPv6Address
    node: IPv6Address


@dataclass(frozen=True)
class Wiring:
    """All that a slot is made from."""

    name: str
    address: IPv4Address
    node: IPv4Address
    uid: int
    mtu: int
    ipv6: Ipv6Wiring | None = None

    @property
    def namespace(self) -> Path:
        """The file that names the namespace."""
        return NAMESPACES / self.name

    @property
    def ends(self) -> tuple[str, str]:
        """The addresses of the slot and of the node."""
        return str(self.address), str(self.node)

    @property
    def address6(self) -> IPv6Address | None:
        """The slot's address of IPv6, if it has one."""
        return None if self.ipv6 is None else self.ipv6.address


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _set_namespace(descriptor: int) -> None:
    _checked(_libc.setns(descriptor, _CLONE_NEWNET), "setns")


@contextmanager
def _returning() -> Iterator[None]:
    """Bring the thread back to its namespace, whichever it goes to meanwhile."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            yield
        finally:
            if _libc.setns(home, _CLONE_NEWNET) != 0:
                # This thread would act on the host in the wrong place from now on; nothing that
                # could be raised here keeps it from doing so.
                os.abort()
    finally:
        os.close(home)


@contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """Run the body, in this thread alone, in a named namespace."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _returning():
            _set_namespace(descriptor)
            yield
    finally:
        os.close(descriptor)


class NameTaken(HostFault):
    """The slot's name is that of something which this node did not make; nothing was touched."""


def build(wiring: Wiring, host: Rtnetlink, step: Callable[[str], None]) -> None:
    """Make a slot. On any failure but NameTaken the caller calls `destroy`.

    Args:
        wiring: what to make.
        host: a socket in the host's namespace.
        step: told the name of each step before it is taken.
    """
    if wiring.namespace.exists() or host.link(wiring.name) is not None:
        raise NameTaken(
            f"a namespace or link {wiring.name} exists that this node did not make",
            remedy=f"remove it: ip netns del {wiring.name}; ip link del {wiring.name}",
        )
    step("namespace")
    with _new_namespace(wiring.namespace):
        step("sysctls")
        _set_sysctls(ipv6=wiring.ipv6 is not None)
        step("tap")
        _make_tap(wiring)
        step("veth")
        _make_veth(wiring, host)
        _wire(wiring, host, step, nft.slot_rules(*wiring.ends, ipv6=wiring.address6, fresh=True))
    _wire_host_ipv6(wiring, host)


def repair(
    wiring: Wiring, host: Rtnetlink, policy: Policy = UNRESTRICTED, opened: Sequence[Opened] = ()
) -> list[Opening] | None:
    """Put a slot in order again, whatever is missing of it, with a policy in force there from before to
    after. Returns what names have opened.

    None where it cannot be: without the namespace or the tap that the machine has open,
    the machine has no network that could be mended.
    """
    if not is_namespace(wiring.namespace):
        return None
    with inside(wiring.namespace), Rtnetlink() as own:
        if own.link(nft.TAP) is None:
            return None
        openings = egress.listed(nft.ruleset(), policy) if policy.allow_names else []
        _set_sysctls(ipv6=wiring.ipv6 is not None)
        if own.link(nft.UPLINK) is None or host.link(wiring.name) is None:
            _delete_link(host, wiring.name)
            _make_veth(wiring, host)
        rules = nft.slot_rules(*wiring.ends, policy, opened, openings, ipv6=wiring.address6)
        _wire(wiring, host, lambda _: None, rules)
    _wire_host_ipv6(wiring, host)
    return openings


def destroy(wiring: Wiring, host: Rtnetlink) -> None:
    """Remove what there is of a slot; nothing being there is fine."""
    _delete_link(host, wiring.name)
    if _libc.umount2(os.fsencode(wiring.namespace), _MNT_DETACH) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOENT):  # not mounted, not there
            raise OSError(code, f"umount {wiring.namespace}: {os.strerror(code)}")
    wiring.namespace.unlink(missing_ok=True)


def is_namespace(path: Path) -> bool:
    """Whether the file names a network namespace that exists."""
    try:
        with inside(path):
            return True
    except OSError:
        return False


@contextmanager
def _new_namespace(path: Path) -> Iterator[None]:
    """A new namespace with the thread in it, bound to a file by which it can be found."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
    with _returning():
        _checked(_libc.unshare(_CLONE_NEWNET), "unshare")
        source = b"/proc/thread-self/ns/net"
        _checked(_libc.mount(source, os.fsencode(path), None, _MS_BIND, None), f"mount {path}")
        yield


def _set_sysctls(*, ipv6: bool) -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    for scope in (nft.TAP, nft.UPLINK, "default", "all"):  # those of a slot that is there, then all to come
        conf = Path("/proc/sys/net/ipv6/conf", scope)
        if conf.exists():  # as yet, and in a kernel with IPv6
            for name, value in (_IPV6_ON if ipv6 else _IPV6_OFF).items():
                (conf / name).write_text(value)


def _make_tap(wiring: Wiring) -> None:
    """A tap that stays, for the machine's user to open, whose packets carry a virtio header."""
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise HostFault("there is no /dev/net/tun", remedy="load the module: modprobe tun") from None
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", nft.TAP.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETOWNER, wiring.uid)
        fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)
    finally:
        os.close(descriptor)


def _make_veth(wiring: Wiring, host: Rtnetlink) -> None:
    """A veth pair from the host to the namespace that the thread is in."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        host.apply(
            netlink.add_veth(wiring.name, _HOST_MAC, nft.UPLINK, _UPLINK_MAC, here, wiring.mtu),
        )
    finally:
        os.close(here)


def _wire(wiring: Wiring, host: Rtnetlink, step: Callable[[str], None], rules: str) -> None:
    """Addresses, routes, neighbours and rules at both ends; all can be repeated."""
    step("host")
    _wire_host(wiring, host)
    step("addresses")
    with Rtnetlink() as own:
        _wire_namespace(wiring, own)
    step("rules")
    nft.apply(rules)


def _wire_host(wiring: Wiring, host: Rtnetlink) -> None:
    link = _expect(host, wiring.name)
    host.apply(
        netlink.forwarding_only_ipv4(link, has_ipv6=Path("/proc/sys/net/ipv6").exists()),
        netlink.set_up(link),
        netlink.add_neighbour(link, wiring.address, _UPLINK_MAC),
        netlink.add_route(link, IPv4Network(wiring.address), source=wiring.node),
    )


def _wire_host_ipv6(wiring: Wiring, host: Rtnetlink) -> None:
    """The same for IPv6, with the thread in the host's namespace: netlink has no means for one part of it."""
    if wiring.ipv6 is None:
        return
    forwarding.let_link_forward_ipv6(wiring.name)
    link = _expect(host, wiring.name)
    host.apply(
        netlink.add_neighbour(link, wiring.ipv6.address, _UPLINK_MAC),
        netlink.add_route(link, IPv6Network(wiring.ipv6.address)),
    )


def _wire_namespace(wiring: Wiring, own: Rtnetlink) -> None:
    uplink, tap, loopback = (_expect(own, name) for name in (nft.UPLINK, nft.TAP, "lo"))
    own.apply(
        netlink.set_up(loopback),
        netlink.add_address(uplink, wiring.address, 32),
        netlink.set_up(uplink),
        netlink.add_neighbour(uplink, wiring.node, _HOST_MAC),
        netlink.add_route(uplink, IPv4Network("0.0.0.0/0"), gateway=wiring.node),
        netlink.add_address(tap, IPv4Address(GATEWAY_ADDRESS), GUEST_PREFIX),
        netlink.set_up(tap, mac=GATEWAY_MAC, mtu=wiring.mtu),
        netlink.add_neighbour(tap, IPv4Address(GUEST_ADDRESS), GUEST_MAC),
        *([] if wiring.ipv6 is None else _ipv6(wiring.ipv6, uplink, tap)),
    )


def _ipv6(wiring: Ipv6Wiring, uplink: int, tap: int) -> list[netlink.Request]:
    return [
        netlink.add_address(uplink, wiring.address, 128),
        netlink.add_neighbour(uplink, wiring.node, _HOST_MAC),
        netlink.add_route(uplink, IPv6Network("::/0"), gateway=wiring.node),
        netlink.add_address(tap, IPv6Address(GATEWAY_ADDRESS6), GUEST_PREFIX6),
        netlink.add_neighbour(tap, IPv6Address(GUEST_ADDRESS6), GUEST_MAC),
    ]


def _expect(socket: Rtnetlink, name: str) -> int:
    link = socket.link(name)
    if link is None:
        raise HostFault(f"the link {name} has gone", remedy="see what else removes links on this host")
    return link.index


def _delete_link(host: Rtnetlink, name: str) -> None:
    try:
        host.apply(netlink.delete_link(name))
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
