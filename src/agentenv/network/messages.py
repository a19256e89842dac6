"""The few parts of DNS messages that pass without being interpreted: header and first question.

What is allowed by name is parsed as a whole, elsewhere (lookups.py). Format: RFC 1035, section 4.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

HEADER = 12
FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = 1, 2, 3, 4, 5
PAYLOAD = 1232  # bytes of a datagram that no path fragments: https://www.dnsflagday.net/2020/
INTERNET = 1  # the class

_QR, _TC, _RD, _RA, _OPCODE = 0x8000, 0x0200, 0x0100, 0x0080, 0x7800
_OPT = 41
_LABEL = re.compile(rb"[A-Za-z0-9_-]{1,63}")
_BLOCKED = 15  # RFC 8914: an extended error, by which `dig` says why
_NO_BLOCKED = struct.pack(">BHHIHHHH", 0, _OPT, PAYLOAD, 0, 6, 15, 2, _BLOCKED)


class Asked(NamedTuple):
    """A question: a name in lowercase without the final dot, and the numbers of type and class.

    What could not be a host's name (other letters, a dot within a label) has no name here but a
    description, in `odd`.
    """

    name: str | None
    odd: str
    type: int
    rdclass: int


def is_question(message: bytes) -> bool:
    """Whether a message is long enough for one and no answer."""
    return len(message) >= HEADER and not message[2] & (_QR >> 8)


def questions(message: bytes) -> int:
    """How many questions the header counts."""
    (count,) = struct.unpack_from(">H", message, 4)
    return int(count)


def is_query(message: bytes) -> bool:
    """Whether its operation is the ordinary one, of asking."""
    return not message[2] & (_OPCODE >> 8)


def is_truncated(message: bytes) -> bool:
    """Whether an answer says that it is not whole."""
    return bool(message[2] & (_TC >> 8))


def code(message: bytes) -> int:
    """The response code of an answer."""
    return message[3] & 0x0F


def asked(message: bytes) -> Asked | None:
    """The first question; None if it cannot be read."""
    end = question_end(message)
    if end == HEADER:
        return None
    labels = []
    offset = HEADER
    while message[offset]:
        labels.append(message[offset + 1 : offset + 1 + message[offset]])
        offset += 1 + message[offset]
    rdtype, rdclass = struct.unpack_from(">HH", message, end - 4)
    if labels and all(map(_LABEL.fullmatch, labels)) and offset - HEADER < 255:
        return Asked(b".".join(labels).decode().lower(), "", rdtype, rdclass)
    return Asked(None, ".".join(map(_described, labels)) or ".", rdtype, rdclass)


def _described(label: bytes) -> str:
    """A label as RFC 1035, section 5.1, writes it, so that nothing in it means anything to a log."""
    return "".join(
        chr(each) if 0x21 <= each <= 0x7E and chr(each) not in '.\\"' else f"\\{each:03d}" for each in label
    )


def plain_question(name: str, rdtype: int) -> bytes:
    """A recursive question of class IN, with nothing of the one who asks in it but name and type."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    header = struct.pack(">HHHHHH", 0, _RD, 1, 0, 0, 1)
    extension = struct.pack(">BHHIH", 0, _OPT, PAYLOAD, 0, 0)
    return header + labels + b"\0" + struct.pack(">HH", rdtype, INTERNET) + extension


def failure(question: bytes, code: int) -> bytes:
    """An answer without records to a question: its header and question section, and a code."""
    return _without_records(question, code, b"")


def forbidden(question: bytes) -> bytes:
    """The answer to a question that the rules of who asks do not allow: there is no such name.

    Not "refused", since the C library of Alpine (musl) passes such an answer over and waits out its 5 s;
    this one ends every client's lookup at once, and without an authority record nobody remembers it.
    """
    return _without_records(question, NXDOMAIN, _NO_BLOCKED if _extended(question) else b"")


def _without_records(question: bytes, code: int, extension: bytes) -> bytes:
    (flags,) = struct.unpack_from(">H", question, 2)
    flags = _QR | flags & (_OPCODE | _RD) | _RA | code
    end = question_end(question)
    counts = struct.pack(">HHHHH", flags, 0 if end == HEADER else 1, 0, 0, 1 if extension else 0)
    return question[:2] + counts + question[HEADER:end] + extension


def _extended(question: bytes) -> bool:
    """Whether a question is followed by an EDNS record at once, as clients send them."""
    end = question_end(question)
    alone = question[6:12] == b"\0\0\0\0\0\1"
    return alone and question[end : end + 3] == struct.pack(">BH", 0, _OPT)


def question_end(message: bytes) -> int:
    """Where the first question of a message ends; the header's end if it cannot be read."""
    offset = HEADER
    while offset < len(message) and message[offset]:
        if message[offset] > 63:  # a compressed name has no place in a question
            return HEADER
        offset += 1 + message[offset]
    end = offset + 5  # the root label, type and class
    return end if end <= len(message) else HEADER


def answers(answer: bytes, question: bytes) -> bool:
    """Whether a message is the answer to that question: id, and the question where it is repeated."""
    if len(answer) < HEADER or answer[:2] != question[:2] or not answer[2] & (_QR >> 8):
        return False
    if answer[4:6] == b"\0\0":  # some servers leave the question out of an error
        return code(answer) != 0
    end = question_end(question)
    return answer[HEADER:end].lower() == question[HEADER:end].lower()
