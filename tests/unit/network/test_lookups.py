"""Messages of name servers, whatever is in them: read, reduced and written anew."""

from __future__ import annotations

import dns.message
import dns.rcode
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.network import lookups, messages
from support.zone import records

NAME = "allowed.test"
QUESTION = dns.message.make_query(NAME, "A", use_edns=-1).to_wire()


def answered(text: str) -> bytes:
    made = dns.message.make_response(dns.message.from_wire(QUESTION))
    made.answer.extend(records(text))
    return made.to_wire()


WHOLE = answered("allowed.test 60 CNAME a.cdn.test\na.cdn.test 60 A 192.0.2.1\nx.test 1 MX 1 allowed.test")


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=6))
def test_damaged_answers_are_read_or_not_and_never_more(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(WHOLE)
    for position, value in changes:
        damaged[position] = value
    found = lookups.read(bytes(damaged))
    if found is None:
        return
    assert len(found.addresses) <= lookups.ADDRESSES_MAX
    assert 0 <= found.seconds <= lookups.TTL_MAX_S <= found.open_s + lookups.TTL_MAX_S
    written = lookups.write(QUESTION, found, stream=True)
    assert written is not None
    again = dns.message.from_wire(written.message)
    assert again.answer == list(found.records)


@given(st.binary(min_size=12, max_size=400))
def test_any_bytes_are_a_question_or_none(message: bytes) -> None:
    asked = messages.asked(message)
    lookups.write(message, lookups.NOTHING, stream=False)
    refused = messages.forbidden(message)
    assert refused[:2] == message[:2] and messages.code(refused) == messages.NXDOMAIN
    if asked is not None:
        assert (asked.name is None) != (asked.odd == "")
        assert asked.odd.isascii() and asked.odd.isprintable()


@given(st.lists(st.binary(min_size=1, max_size=63), min_size=1, max_size=3))
def test_the_name_of_a_question_is_the_one_that_others_read(labels: list[bytes]) -> None:
    wire = b"".join(bytes([len(label)]) + label for label in labels)
    question = QUESTION[:12] + wire + b"\0\0\1\0\1"
    asked = messages.asked(question)
    assert asked is not None
    if asked.name is not None:
        theirs = dns.message.from_wire(question).question[0].name
        assert theirs.to_text(omit_final_dot=True).lower() == asked.name
        plain = dns.message.from_wire(messages.plain_question(asked.name, asked.type))
        assert plain.question[0].name == theirs


@pytest.mark.parametrize("rdtype", [64, 65, 255, 251, 252, 41, 250])
def test_types_that_are_withheld(rdtype: int) -> None:
    assert lookups.withheld(rdtype)


@pytest.mark.parametrize("rdtype", [1, 28, 5, 15, 16, 33, 257])
def test_types_that_are_not(rdtype: int) -> None:
    assert not lookups.withheld(rdtype)


def test_an_answer_to_nothing_says_nothing() -> None:
    bare = QUESTION[:2] + b"\x81\x80" + bytes(8)
    assert lookups.read(bare) is None
    failing = QUESTION[:2] + b"\x81\x82" + bytes(8)
    assert lookups.read(failing) == lookups.Found(dns.rcode.SERVFAIL)
