"""Answers to lookups of allowed names: read, reduced to what was asked, and written anew.

An answer is never passed on as it came: a record that belongs to another name, or that a client could
read otherwise than we do, is not in the one that the guest gets. Pure: messages in, messages out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from agentenv.network.messages import PAYLOAD
from agentenv.network.policy import Address

ADDRESSES_MAX = 128  # of one answer; more are left out
TTL_MAX_S = 24 * 3600
OPEN_AT_LEAST_S = 5  # a client needs a moment from the answer to the connection

_PLAIN_PAYLOAD = 512  # bytes of a datagram to a client that says nothing: RFC 1035, 4.2.1
_STREAM_MAX = 65535
# They hold addresses beside names (hints), or stand for all types. Clients do without them.
_WITHHELD = {dns.rdatatype.HTTPS, dns.rdatatype.SVCB, dns.rdatatype.OPT}
_META = range(128, 256)


@dataclass(frozen=True)
class Found:
    """What an upstream's answer comes to: a code, the records that answer the question, and for how many
    seconds; with the addresses among them."""

    code: dns.rcode.Rcode
    records: tuple[dns.rrset.RRset, ...] = ()
    seconds: int = 0
    addresses: tuple[Address, ...] = ()

    @property
    def open_s(self) -> int:
        """Seconds for which the addresses are to be open."""
        return max(self.seconds, OPEN_AT_LEAST_S)


NOTHING = Found(dns.rcode.NOERROR)


def withheld(rdtype: int) -> bool:
    """Whether questions of a type are answered with nothing, unasked."""
    return rdtype in _WITHHELD or rdtype in _META


def read(answer: bytes) -> Found | None:
    """What an upstream says to the question in its answer; None if it says nothing that can be understood.

    Only the chain of aliases from the name that was asked counts, and what is at its end.
    """
    try:
        message = dns.message.from_wire(answer, ignore_trailing=True)
        if not isinstance(message, dns.message.QueryMessage):
            return None
        if message.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
            return Found(message.rcode())
        chain = message.resolve_chaining()
    except (dns.exception.DNSException, ValueError):
        return None
    aliases = [_first(alias) for alias in chain.cnames]
    ends = [] if chain.answer is None else [_cut(chain.answer)]
    seconds = min((_bounded(each.ttl) for each in [*aliases, *ends]), default=0)
    records = tuple(_lasting(each, seconds) for each in [*aliases, *ends])
    return Found(message.rcode(), records, seconds, tuple(_addresses(ends)))


class Written(NamedTuple):
    """An answer to a guest, and whether all that was found is in it."""

    message: bytes
    whole: bool


def write(question: bytes, found: Found, *, stream: bool) -> Written | None:
    """The answer to a guest; over UDP one that would be too long says so and holds nothing.

    None if the question cannot be understood.
    """
    try:
        asked = dns.message.from_wire(question, ignore_trailing=True)
        made = dns.message.make_response(asked, recursion_available=True, our_payload=PAYLOAD)
    except (dns.exception.DNSException, ValueError):
        return None
    made.set_rcode(found.code)
    made.answer.extend(found.records)
    limit = _STREAM_MAX if stream else min(PAYLOAD, max(_PLAIN_PAYLOAD, asked.payload))
    try:
        return Written(made.to_wire(max_size=limit), True)
    except dns.exception.TooBig:
        made.answer.clear()
        made.flags |= dns.flags.TC
        return Written(made.to_wire(), False)


def _first(alias: dns.rrset.RRset) -> dns.rrset.RRset:
    """One alias: a name has one, and which was followed is the first."""
    return dns.rrset.from_rdata(alias.name, alias.ttl, alias[0])


def _cut(records: dns.rrset.RRset) -> dns.rrset.RRset:
    return dns.rrset.from_rdata_list(records.name, records.ttl, list(records)[:ADDRESSES_MAX])


def _lasting(records: dns.rrset.RRset, seconds: int) -> dns.rrset.RRset:
    return dns.rrset.from_rdata_list(records.name, seconds, list(records))


def _bounded(ttl: int) -> int:
    """Seconds of a TTL; one with the highest bit set is nothing: RFC 2181, section 8."""
    return min(ttl, TTL_MAX_S) if ttl < 1 << 31 else 0


def _addresses(answers: list[dns.rrset.RRset]) -> Iterator[Address]:
    for records in answers:
        if records.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA):
            for record in records:
                yield ip_address(record.address)
