"""What names have opened, as values."""

from __future__ import annotations

from ipaddress import IPv4Address

from agentenv.network import applied
from agentenv.network.applied import Applied
from agentenv.network.egress import LASTING_S, Opening
from agentenv.network.policy import parse

ONE, TWO = IPv4Address("192.0.2.1"), IPv4Address("192.0.2.2")
POLICY = parse({"allowOut": ["a.test", "b.test"]}, False)


def opened(at: Applied, name: str, address: IPv4Address, seconds: float, now: float) -> None:
    wider = at.wider(name, [(address, seconds)], now)
    assert wider is not None
    at.note(wider, now)


def test_an_address_stays_open_for_the_longest_that_was_said() -> None:
    at = Applied()
    at.become(POLICY, 0.0)
    opened(at, "a.test", ONE, 60.0, 0.0)
    assert at.wider("b.test", [(ONE, 5.0), (TWO, 5.0)], 10.0) == [
        Opening(ONE, "b.test", 50.0, LASTING_S),
        Opening(TWO, "b.test", 5.0, LASTING_S),
    ]


def test_another_policy_keeps_what_its_names_opened() -> None:
    at = Applied()
    at.become(POLICY, 0.0)
    opened(at, "a.test", ONE, 60.0, 0.0)
    opened(at, "b.test", ONE, 90.0, 0.0)
    opened(at, "b.test", TWO, 30.0, 0.0)
    assert at.left(parse({"allowOut": ["a.test"]}, False), 20.0) == [
        Opening(ONE, "a.test", 40.0, LASTING_S - 20)
    ]
    assert {each.address: each.new_s for each in at.left(POLICY, 40.0)} == {ONE: 50.0, TWO: 0.0}
    assert at.left(parse(None, False), 20.0) == []
    assert at.left(POLICY, LASTING_S + 1) == []
    serial = at.serial
    at.become(POLICY, 40.0)
    assert at.serial == serial + 1
    assert {each.address for each in at.left(POLICY, 41.0)} == {ONE, TWO}
    only_b = parse({"allowOut": ["b.test"]}, False)
    at.become(only_b, 42.0)
    assert {each.address: each.new_s for each in at.left(POLICY, 42.0)} == {ONE: 48.0, TWO: 0.0}


def test_there_is_room_for_so_many_and_what_is_past_makes_more() -> None:
    at = Applied()
    at.become(POLICY, 0.0)
    most = applied.OPENINGS_MAX
    at.note([Opening(IPv4Address(number), "a.test", 1.0, number) for number in range(1, most + 1)], 0.0)
    assert at.wider("a.test", [(ONE, 1.0)], 0.5) is None
    assert at.wider("a.test", [(ONE, 1.0)], 1.5) == [Opening(ONE, "a.test", 1.0, LASTING_S)]
