"""The guest's address and route of IPv6, where the node has any: it says so with each start.

No router, no discovery and no address of the kernel's own making is needed: what is set here is in force
when it is set, and a clone needs no other. Formats: rtnetlink(7), and the kernel's
`include/uapi/linux/{rtnetlink,if_addr,neighbour}.h`.
"""

from __future__ import annotations

import os
import struct

from agentenv.guest.lean import socket

DEVICE = "eth0"
# As the node has them, in network.slot: GUEST_ADDRESS6, GUEST_PREFIX6, GATEWAY_ADDRESS6, GATEWAY_MAC.
_ADDRESS = "fd5e:c37b:91aa::15"
_PREFIX = 126
_GATEWAY = "fd5e:c37b:91aa::16"
_GATEWAY_MAC = bytes.fromhex("02fc00000006")

_NEW_ADDRESS, _NEW_ROUTE, _NEW_NEIGHBOUR, _ERROR = 20, 24, 28, 2
_FLAGS = 0x1 | 0x4 | 0x100 | 0x400  # a request, to be acknowledged, that makes or replaces
_NO_DETECTION = 0x02  # of duplicates, for which an address would wait
_IFA_ADDRESS, _IFA_LOCAL, _NDA_DST, _NDA_LLADDR, _RTA_OIF, _RTA_GATEWAY = 1, 2, 1, 2, 4, 5
_PERMANENT = 0x80
_MAIN, _STATIC, _GLOBAL, _UNICAST = 254, 4, 0, 1
_CONF = f"/proc/sys/net/ipv6/conf/{DEVICE}"
_BEFORE = (("accept_ra", "0"), ("addr_gen_mode", "1"), ("disable_ipv6", "0"))

_is_on = False  # as the machine boots


def set_up(on: bool) -> None:
    """Has the address and the route there, or nothing of IPv6 on the device; does nothing where it is so."""
    global _is_on
    if on is not _is_on:
        _change(on)
        _is_on = on


def _change(on: bool) -> None:
    if not on:
        _put("disable_ipv6", "1")
        return
    for name, value in _BEFORE:
        _put(name, value)
    _ask(_requests(socket.if_nametoindex(DEVICE)))


def _requests(device: int) -> list[tuple[int, bytes]]:
    """Address, gateway and route, as types and bodies of messages."""
    address, gateway = (socket.inet_pton(socket.AF_INET6, text) for text in (_ADDRESS, _GATEWAY))
    family = socket.AF_INET6
    own = struct.pack("=BBBBI", family, _PREFIX, _NO_DETECTION, _GLOBAL, device)
    known = struct.pack("=BxHiHBB", family, 0, device, _PERMANENT, 0, 0)
    way = struct.pack("=BBBBBBBBI", family, 0, 0, 0, _MAIN, _STATIC, _GLOBAL, _UNICAST, 0)
    by = _attribute(_RTA_GATEWAY, gateway) + _attribute(_RTA_OIF, struct.pack("=I", device))
    return [
        (_NEW_ADDRESS, own + _attribute(_IFA_ADDRESS, address) + _attribute(_IFA_LOCAL, address)),
        (_NEW_NEIGHBOUR, known + _attribute(_NDA_DST, gateway) + _attribute(_NDA_LLADDR, _GATEWAY_MAC)),
        (_NEW_ROUTE, way + by),
    ]


def _attribute(kind: int, payload: bytes) -> bytes:
    size = 4 + len(payload)
    return struct.pack("=HH", size, kind) + payload + b"\0" * (-size % 4)


def _ask(requests: list[tuple[int, bytes]]) -> None:
    """Has the kernel do all, in order."""
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    try:
        kernel.send(
            b"".join(
                struct.pack("=IHHII", 16 + len(body), kind, _FLAGS, number, 0) + body
                for number, (kind, body) in enumerate(requests)
            )
        )
        for _ in requests:
            answer = kernel.recv(4096)
            _, kind, _, _, _, code = struct.unpack_from("=IHHIIi", answer)
            if kind == _ERROR and code:
                raise OSError(-code, os.strerror(-code))
    finally:
        kernel.close()


def _put(name: str, value: str) -> None:
    try:
        with open(f"{_CONF}/{name}", "w", encoding="ascii") as file:
            file.write(value)
    except FileNotFoundError:
        pass  # a kernel without IPv6, or without this
