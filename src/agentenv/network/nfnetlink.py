"""Adding addresses to nftables sets over netlink, in microseconds where the program takes milliseconds.

Rules are written by `nft`; this is for what happens at every lookup of a guest. Formats: netlink(7) and the
kernel's `include/uapi/linux/netfilter/{nfnetlink,nf_tables}.h`; comments as libnftnl keeps them.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from agentenv.network.netlink import attribute, messages
from agentenv.network.policy import Address

COMMENT_MAX = 120  # characters; nft itself takes 128

_NETLINK_NETFILTER = 12
_NFPROTO_INET, _SUBSYSTEM = 1, 10
_BATCH_BEGIN, _BATCH_END = 16, 17
_NEW_ELEMENT, _DELETE_ELEMENT = _SUBSYSTEM << 8 | 12, _SUBSYSTEM << 8 | 14
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_NESTED = 0x8000
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS, _LIST_MEMBER = 1, 2, 3, 1
_KEY, _TIMEOUT, _USERDATA, _VALUE = 1, 4, 6, 1
_ERROR = 2
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Element:
    """An address for a set with timeouts, for how many seconds, and what to note beside it."""

    set: str
    address: Address
    seconds: float
    comment: str = ""


def add(table: str, elements: Iterable[Element]) -> None:
    """Add elements to sets of a table of the family `inet`, in the calling thread's namespace, all or none.
    One that is there lives for its new time.

    Raises:
        OSError: the kernel refused it: there is no such table or set.
    """
    listed = list(elements)
    if not listed:
        return
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as connection:
        connection.bind((0, 0))
        connection.settimeout(_ANSWER_S)
        connection.send(batch(table, listed))
        _await(connection)


def batch(table: str, elements: Iterable[Element]) -> bytes:
    """The messages of one transaction. Adding alone would leave the time of an element that is there as it
    was, and to delete one that is not there is an error: so each is added, deleted and added."""
    steps = [
        (kind, flags, element)
        for element in elements
        for kind, flags in ((_NEW_ELEMENT, _CREATE), (_DELETE_ELEMENT, 0), (_NEW_ELEMENT, _CREATE))
    ]
    parts = [_message(_BATCH_BEGIN, 0, _SUBSYSTEM, b"")]
    for number, (kind, flags, element) in enumerate(steps, 1):
        flags |= _ACK if number == len(steps) else 0
        parts.append(_message(kind, flags, 0, _body(table, element), family=_NFPROTO_INET))
    return b"".join([*parts, _message(_BATCH_END, 0, _SUBSYSTEM, b"")])


def _body(table: str, element: Element) -> bytes:
    key = attribute(_KEY | _NESTED, attribute(_VALUE, element.address.packed))
    timeout = attribute(_TIMEOUT, struct.pack(">Q", max(1, round(element.seconds * 1000))))
    note = element.comment.encode() + b"\0"
    noted = attribute(_USERDATA, bytes([0, len(note)]) + note) if element.comment else b""
    member = attribute(_LIST_MEMBER | _NESTED, key + timeout + noted)
    return (
        attribute(_LIST_TABLE, table.encode() + b"\0")
        + attribute(_LIST_SET, element.set.encode() + b"\0")
        + attribute(_LIST_ELEMENTS | _NESTED, member)
    )


def _message(kind: int, flags: int, resource: int, body: bytes, *, family: int = socket.AF_UNSPEC) -> bytes:
    payload = struct.pack(">BBH", family, 0, resource) + body
    return struct.pack("=IHHII", 16 + len(payload), kind, flags | _REQUEST, 1, 0) + payload


def _await(connection: socket.socket) -> None:
    """Read until the last message is acknowledged, or one is refused: what is refused comes first."""
    while True:
        for kind, _, _, body in messages(connection.recv(1 << 16)):
            if kind == _ERROR:
                (code,) = struct.unpack_from("=i", body)
                if code:
                    raise OSError(-code, os.strerror(-code))
                return
