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


class Sets:
    """The sets of one table of the family `inet` in one namespace: that which the calling thread is in when
    this is made, which exists as long as this is open.

    It stays open between uses: to close a socket after something was removed by it waits for the
    kernel, a thousand times as long as an addition takes. Not for several threads at a time.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self._sequence = 0
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        try:
            self._socket.bind((0, 0))
            self._socket.settimeout(_ANSWER_S)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Let go of the namespace."""
        self._socket.close()

    def add(self, elements: Iterable[Element]) -> None:
        """Add elements, all or none. One that is there lives for its new time.

        Raises:
            OSError: the kernel refused it: there is no such table or set.
        """
        listed = list(elements)
        if listed:
            self._sequence += 1
            self._socket.send(batch(self._table, listed, self._sequence))
            self._await()

    def _await(self) -> None:
        """Read until the last message is acknowledged, or one is refused: what is refused comes first."""
        while True:
            for kind, sequence, _, body in messages(self._socket.recv(1 << 16)):
                if kind == _ERROR and sequence == self._sequence:
                    (code,) = struct.unpack_from("=i", body)
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return


def batch(table: str, elements: Iterable[Element], sequence: int) -> bytes:
    """The messages of one transaction, all with the same number. Adding alone would leave the time of an
    element that is there as it was, and to delete one that is not there is an error: so each is added,
    deleted and added."""
    steps = [
        (kind, flags, element)
        for element in elements
        for kind, flags in ((_NEW_ELEMENT, _CREATE), (_DELETE_ELEMENT, 0), (_NEW_ELEMENT, _CREATE))
    ]
    parts = [_message(_BATCH_BEGIN, 0, sequence, b"", resource=_SUBSYSTEM)]
    for number, (kind, flags, element) in enumerate(steps, 1):
        flags |= _ACK if number == len(steps) else 0
        parts.append(_message(kind, flags, sequence, _body(table, element), family=_NFPROTO_INET))
    return b"".join([*parts, _message(_BATCH_END, 0, sequence, b"", resource=_SUBSYSTEM)])


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


def _message(
    kind: int, flags: int, sequence: int, body: bytes, *, family: int = socket.AF_UNSPEC, resource: int = 0
) -> bytes:
    payload = struct.pack(">BBH", family, 0, resource) + body
    return struct.pack("=IHHII", 16 + len(payload), kind, flags | _REQUEST, sequence, 0) + payload
