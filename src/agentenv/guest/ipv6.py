"""The guest's address and route of IPv6, where the node has any: it says so with each start.

No router and no address of the kernel's own making is needed, so the address is there at once, and a
clone needs no other. Structures: the kernel's `include/uapi/linux/{ipv6,ipv6_route,sockios}.h`.
"""

from __future__ import annotations

import errno
import fcntl
import struct

from agentenv.guest.lean import socket

DEVICE = "eth0"
# Known to the node as network.slot.GUEST_ADDRESS6, GUEST_PREFIX6 and GATEWAY_ADDRESS6.
_ADDRESS = "fd5e:c37b:91aa::15"
_PREFIX = 126
_GATEWAY = "fd5e:c37b:91aa::16"

_SIOCADDRT, _SIOCSIFADDR = 0x890B, 0x8916
_RTF_UP, _RTF_GATEWAY = 0x1, 0x2
_METRIC = 1024
_CONF = f"/proc/sys/net/ipv6/conf/{DEVICE}"
_BEFORE = (("accept_ra", "0"), ("addr_gen_mode", "1"), ("accept_dad", "0"), ("disable_ipv6", "0"))


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
    device = socket.if_nametoindex(DEVICE)
    address, gateway = (socket.inet_pton(socket.AF_INET6, text) for text in (_ADDRESS, _GATEWAY))
    kernel = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        _ask(kernel, _SIOCSIFADDR, struct.pack("=16sIi", address, _PREFIX, device))
        route = struct.pack(
            "16s16s16sIHHILIi",
            *(bytes(16), bytes(16), gateway, 0, 0, 0, _METRIC, 0, _RTF_UP | _RTF_GATEWAY, device),
        )
        _ask(kernel, _SIOCADDRT, route)
    finally:
        kernel.close()


def _ask(kernel: socket.socket, request: int, argument: bytes) -> None:
    try:
        fcntl.ioctl(kernel, request, argument)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise


def _put(name: str, value: str) -> None:
    try:
        with open(f"{_CONF}/{name}", "w", encoding="ascii") as file:
            file.write(value)
    except FileNotFoundError:
        pass  # a kernel without IPv6, or without this
