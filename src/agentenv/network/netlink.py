"""The few rtnetlink requests that slots need, many in one system call.

A general netlink library costs a quarter of a second to import and about a millisecond per
request; a slot takes a dozen requests, so they are packed here. Formats: netlink(7), rtnetlink(7)
and the kernel's `include/uapi/linux/{rtnetlink,if_link,neighbour}.h`.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_GETROUTE = 24, 26
RTM_NEWNEIGH = 28
RTM_NEWQDISC, RTM_DELQDISC, RTM_GETQDISC = 36, 37, 38

SCOPE_GLOBAL, SCOPE_LINK = 0, 253

_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _ACK = 0x1, 0x4
_DUMP = 0x300
_REPLACE, _EXCLUSIVE, _CREATE = 0x100, 0x200, 0x400
_SOL_NETLINK, _CAP_ACK, _EXT_ACK, _STRICT_CHECK = 270, 10, 11, 12
_EXTENDED_ACK_FLAG, _CAPPED_FLAG, _ACK_MESSAGE = 0x200, 0x100, 1

_IFF_UP = 0x1
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO, _IFLA_AF_SPEC, _IFLA_NET_NS_FD = 1, 3, 4, 18, 26, 28
_IFLA_STATS64 = 23  # a struct rtnl_link_stats64: packets received and sent, then bytes
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_PEER = 1, 2, 1
_IFLA_INET_CONF, _DEVCONF_FORWARDING = 1, 1
_IFLA_INET6_ADDR_GEN_MODE, _ADDR_GEN_NONE = 8, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_F_NODAD = 0x02  # an address of IPv6 would wait for what nobody answers
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PREFSRC, _RTA_TABLE = 1, 4, 5, 7, 15
_RTNH_ONLINK, _RTPROT_STATIC, _RTN_UNICAST, _RT_TABLE_MAIN = 4, 4, 1, 254
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
_TCA_KIND, _TCA_OPTIONS = 1, 2
_TC_ROOT, _TC_HANDLE, _TC_ETHERNET = 0xFFFFFFFF, 0x0AE0000, 1
_TBF_PARAMETERS, _TBF_RATE64, _TBF_BURST = 1, 4, 6


Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Request:
    """One message to the kernel: type, flags beyond request and acknowledge, and body."""

    type: int
    flags: int
    body: bytes


@dataclass(frozen=True)
class Link:
    """A network interface as the kernel reports it."""

    index: int
    name: str
    mtu: int
    up: bool


@dataclass(frozen=True)
class Route:
    """An IPv4 route of the main table. `device` is the interface's index, 0 where there is none."""

    destination: IPv4Network
    device: int


def _family(address: Address | IPv4Network | IPv6Network) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def attribute(kind: int, payload: bytes) -> bytes:
    """A netlink attribute, padded to four bytes."""
    size = 4 + len(payload)
    return struct.pack("=HH", size, kind) + payload + b"\0" * (-size % 4)


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _link_header(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


def add_veth(name: str, mac: str, peer: str, peer_mac: str, peer_namespace: int, mtu: int) -> Request:
    """A veth pair whose peer end appears in the namespace of the descriptor `peer_namespace`."""
    far = (
        _link_header()
        + _text(_IFLA_IFNAME, peer)
        + attribute(_IFLA_ADDRESS, _mac(peer_mac))
        + _number(_IFLA_MTU, mtu)
        + _number(_IFLA_NET_NS_FD, peer_namespace)
    )
    info = _text(_IFLA_INFO_KIND, "veth") + attribute(_IFLA_INFO_DATA, attribute(_VETH_PEER, far))
    body = (
        _link_header()
        + _text(_IFLA_IFNAME, name)
        + attribute(_IFLA_ADDRESS, _mac(mac))
        + _number(_IFLA_MTU, mtu)
        + attribute(_IFLA_LINKINFO, info)
    )
    return Request(RTM_NEWLINK, _CREATE | _EXCLUSIVE, body)


def forwarding_only_ipv4(index: int, *, has_ipv6: bool) -> Request:
    """Let the interface forward IPv4, and give itself no IPv6 address."""
    forwarding = _number(_DEVCONF_FORWARDING, 1)
    families = attribute(socket.AF_INET, attribute(_IFLA_INET_CONF, forwarding))
    if has_ipv6:
        mode = attribute(_IFLA_INET6_ADDR_GEN_MODE, bytes([_ADDR_GEN_NONE]))
        families += attribute(socket.AF_INET6, mode)
    return Request(RTM_NEWLINK, 0, _link_header(index) + attribute(_IFLA_AF_SPEC, families))


def set_up(index: int, *, mac: str | None = None, mtu: int | None = None) -> Request:
    """Bring an interface up, with a hardware address and MTU if given."""
    body = _link_header(index, _IFF_UP, _IFF_UP)
    if mac is not None:
        body += attribute(_IFLA_ADDRESS, _mac(mac))
    if mtu is not None:
        body += _number(_IFLA_MTU, mtu)
    return Request(RTM_NEWLINK, 0, body)


def delete_link(name: str) -> Request:
    """Remove an interface; of a veth pair the other end goes with it."""
    return Request(RTM_DELLINK, 0, _link_header() + _text(_IFLA_IFNAME, name))


def _address_body(index: int, address: Address, prefix: int, scope: int) -> bytes:
    flags = 0 if address.version == 4 else _IFA_F_NODAD
    return (
        struct.pack("=BBBBI", _family(address), prefix, flags, scope, index)
        + attribute(_IFA_LOCAL, address.packed)
        + attribute(_IFA_ADDRESS, address.packed)
    )


def add_address(index: int, address: Address, prefix: int, *, scope: int = SCOPE_GLOBAL) -> Request:
    """Give an interface an address, or refresh the same one."""
    return Request(RTM_NEWADDR, _CREATE | _REPLACE, _address_body(index, address, prefix, scope))


def delete_address(index: int, address: IPv4Address, prefix: int) -> Request:
    """Take an address from an interface."""
    return Request(RTM_DELADDR, 0, _address_body(index, address, prefix, SCOPE_GLOBAL))


def add_route(
    index: int,
    destination: IPv4Network | IPv6Network,
    *,
    gateway: Address | None = None,
    source: Address | None = None,
) -> Request:
    """A route through an interface, replacing one to the same destination.

    A gateway is taken to be on the link whatever the addresses say.
    """
    scope = SCOPE_LINK if gateway is None else SCOPE_GLOBAL
    flags = 0 if gateway is None else _RTNH_ONLINK
    prefix = destination.prefixlen
    body = struct.pack(
        "=BBBBBBBBI",
        _family(destination), prefix, 0, 0, _RT_TABLE_MAIN, _RTPROT_STATIC, scope, _RTN_UNICAST, flags,
    )  # fmt: skip
    if prefix:
        body += attribute(_RTA_DST, destination.network_address.packed)
    if gateway is not None:
        body += attribute(_RTA_GATEWAY, gateway.packed)
    if source is not None:
        body += attribute(_RTA_PREFSRC, source.packed)
    return Request(RTM_NEWROUTE, _CREATE | _REPLACE, body + _number(_RTA_OIF, index))


def add_neighbour(index: int, address: Address, mac: str) -> Request:
    """A neighbour that is never asked for by ARP or neighbour discovery."""
    body = struct.pack("=BxHiHBB", _family(address), 0, index, _NUD_PERMANENT, 0, 0)
    body += attribute(_NDA_DST, address.packed) + attribute(_NDA_LLADDR, _mac(mac))
    return Request(RTM_NEWNEIGH, _CREATE | _REPLACE, body)


def _discipline_header(index: int, handle: int = 0) -> bytes:
    return struct.pack("=BxxxiIII", socket.AF_UNSPEC, index, handle, _TC_ROOT, 0)


def shape(index: int, rate: int, burst: int, queue: int) -> Request:
    """Let an interface send `rate` bytes per second and `burst` bytes at once; up to `queue` bytes wait,
    more are dropped. In the place of what it was told before (tc-tbf(8))."""
    specification = struct.pack("=BBHhHI", 0, _TC_ETHERNET, 0, 0, 0, min(rate, 0xFFFFFFFF))
    parameters = specification + bytes(len(specification)) + struct.pack("=III", queue, 0, 0)
    options = (
        attribute(_TBF_PARAMETERS, parameters)
        + attribute(_TBF_RATE64, struct.pack("=Q", rate))
        + _number(_TBF_BURST, burst)
    )
    body = _discipline_header(index, _TC_HANDLE) + _text(_TCA_KIND, "tbf") + attribute(_TCA_OPTIONS, options)
    return Request(RTM_NEWQDISC, _CREATE | _REPLACE, body)


def unshape(index: int) -> Request:
    """Let an interface send as fast as it can again; ENOENT when it was never told otherwise."""
    return Request(RTM_DELQDISC, 0, _discipline_header(index))


class Rtnetlink:
    """A socket to the kernel's network configuration.

    It belongs to the namespace that the calling thread was in when it was made, wherever the
    thread goes afterwards. Not shared between threads.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._sequence = 0
        try:
            self._socket.bind((0, 0))
            for option in (_CAP_ACK, _EXT_ACK, _STRICT_CHECK):
                self._socket.setsockopt(_SOL_NETLINK, option, 1)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Rtnetlink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def apply(self, *requests: Request) -> None:
        """Have the kernel do all of them, in order.

        Raises:
            OSError: the first that failed, with the kernel's own words if it gave any; the others
                were carried out nevertheless.
        """
        pending = {}
        parts = []
        for position, request in enumerate(requests):
            self._sequence += 1
            pending[self._sequence] = position
            parts.append(self._message(request.type, request.flags | _ACK, request.body))
        self._socket.send(b"".join(parts))
        failures: dict[int, OSError] = {}
        while pending:
            for kind, sequence, flags, body in self._receive():
                if kind == _NLMSG_ERROR and sequence in pending:
                    position = pending.pop(sequence)
                    failure = _failure(flags, body)
                    if failure is not None:
                        failures[position] = failure
        if failures:
            raise failures[min(failures)]

    def links(self) -> list[Link]:
        """All interfaces of the namespace."""
        return [_link(body) for body in self._dump(RTM_GETLINK, _link_header())]

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes received and sent by each interface of the namespace, by its name."""
        found = {}
        for body in self._dump(RTM_GETLINK, _link_header()):
            attributes = dict(_attributes(body[16:]))
            if (counted := attributes.get(_IFLA_STATS64)) is not None:
                _, _, received, sent = struct.unpack_from("=QQQQ", counted)
                found[attributes[_IFLA_IFNAME].rstrip(b"\0").decode()] = (received, sent)
        return found

    def link(self, name: str) -> Link | None:
        """The interface of that name, if there is one."""
        self._sequence += 1
        wanted = self._sequence
        self._socket.send(self._message(RTM_GETLINK, 0, _link_header() + _text(_IFLA_IFNAME, name)))
        while True:
            for kind, sequence, flags, body in self._receive():
                if sequence != wanted:
                    continue
                if kind == RTM_NEWLINK:
                    return _link(body)
                failure = _failure(flags, body)
                if failure is not None and failure.errno != errno.ENODEV:
                    raise failure
                return None

    def addresses(self) -> list[tuple[int, IPv4Address, IPv4Network]]:
        """IPv4 addresses: interface index, address, and the network it is in."""
        found = []
        for body in self._dump(RTM_GETADDR, struct.pack("=BBBBI", socket.AF_INET, 0, 0, 0, 0)):
            _, prefix, _, _, index = struct.unpack_from("=BBBBI", body)
            attributes = dict(_attributes(body[8:]))
            packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
            if packed is not None:
                address = IPv4Address(packed)
                found.append((index, address, IPv4Network((address, prefix), strict=False)))
        return found

    def routes(self) -> list[Route]:
        """IPv4 routes of the main table."""
        found = []
        for body in self._dump(RTM_GETROUTE, struct.pack("=BBBBBBBBI", socket.AF_INET, *[0] * 8)):
            prefix, table = body[1], body[4]
            attributes = dict(_attributes(body[12:]))
            if _RTA_TABLE in attributes:
                (table,) = struct.unpack("=I", attributes[_RTA_TABLE])
            if table != _RT_TABLE_MAIN:
                continue
            destination = IPv4Network((attributes.get(_RTA_DST, bytes(4)), prefix))
            (device,) = struct.unpack("=I", attributes.get(_RTA_OIF, bytes(4)))
            found.append(Route(destination, device))
        return found

    def _message(self, kind: int, flags: int, body: bytes) -> bytes:
        return struct.pack("=IHHII", 16 + len(body), kind, flags | _REQUEST, self._sequence, 0) + body

    def _receive(self) -> list[tuple[int, int, int, bytes]]:
        data = self._socket.recv(1 << 18)
        return list(messages(data))

    def _dump(self, kind: int, body: bytes) -> Iterator[bytes]:
        self._sequence += 1
        wanted = self._sequence
        self._socket.send(self._message(kind, _DUMP, body))
        parts: list[bytes] = []
        while True:
            for answered, sequence, flags, part in self._receive():
                if sequence != wanted:
                    continue
                if answered == _NLMSG_DONE:
                    yield from parts
                    return
                if answered == _NLMSG_ERROR:
                    failure = _failure(flags, part)
                    if failure is not None:
                        raise failure
                parts.append(part)


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(type, sequence, flags, body) of each message in a datagram."""
    offset = 0
    while offset + 16 <= len(data):
        size, kind, flags, sequence, _ = struct.unpack_from("=IHHII", data, offset)
        if size < 16:
            return
        yield kind, sequence, flags, data[offset + 16 : offset + size]
        offset += size + (-size % 4)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, offset)
        if size < 4:
            return
        yield kind & 0x3FFF, data[offset + 4 : offset + size]
        offset += size + (-size % 4)


def _failure(flags: int, body: bytes) -> OSError | None:
    (code,) = struct.unpack_from("=i", body)
    if code == 0:
        return None
    text = os.strerror(-code)
    if flags & _EXTENDED_ACK_FLAG and flags & _CAPPED_FLAG:
        message = dict(_attributes(body[20:])).get(_ACK_MESSAGE)
        if message:
            text += ": " + message.rstrip(b"\0").decode(errors="replace")
    return OSError(-code, text)


def _link(body: bytes) -> Link:
    _, _, index, flags, _ = struct.unpack_from("=BxHiII", body)
    attributes = dict(_attributes(body[16:]))
    name = attributes[_IFLA_IFNAME].rstrip(b"\0").decode()
    (mtu,) = struct.unpack("=I", attributes.get(_IFLA_MTU, bytes(4)))
    return Link(index, name, mtu, bool(flags & _IFF_UP))
