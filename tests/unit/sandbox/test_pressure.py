"""Who gives memory back, and when: decided from figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.config import Settings
from agentenv.sandbox.pressure import AT_ONCE, KINDS, LEAST_MIB, Decision, Host, Policy, Resident, decide

POLICY = Policy("pause", below_mib=1000, stalled=20.0, idle_s=30.0)


def resident(name: str, idle_s: float = 100, own_mib: int = 200, *done: str) -> Resident:
    return Resident(name, idle_s, own_mib, frozenset(done))  # type: ignore[arg-type]


def asked(host: Host, *residents: Resident, policy: Policy = POLICY, pressed: bool = False) -> Decision:
    return decide(host, residents, policy, pressed=pressed)


@pytest.mark.parametrize(
    ("host", "before", "pressed"),
    [
        (Host(1000), False, False),
        (Host(999), False, True),
        (Host(1249), True, True),
        (Host(1250), True, False),
        (Host(5000, stalled=20.0), False, False),
        (Host(5000, stalled=20.1), False, True),
        (Host(5000, stalled=10.1), True, True),
        (Host(5000, stalled=10.0), True, False),
        (Host(5000, stalled=None), True, False),
    ],
)
def test_pressure_ends_later_than_it_begins(host: Host, before: bool, pressed: bool) -> None:
    assert asked(host, pressed=before).pressed is pressed
    assert not asked(host, pressed=before, policy=replace(POLICY, most="off")).pressed


def test_where_waiting_is_not_looked_at_it_is_none() -> None:
    policy = replace(POLICY, stalled=0.0)
    assert not asked(Host(5000, stalled=99.0), policy=policy).pressed
    assert not asked(Host(5000, stalled=99.0), policy=policy, pressed=True).pressed


def test_the_idlest_first_and_no_more_than_is_wanted() -> None:
    found = asked(Host(900), resident("a", 40), resident("b", 400), resident("c", 90), resident("busy", 29))
    assert found.actions == (("refresh", "b"), ("refresh", "c"), ("refresh", "a"))
    assert asked(Host(900), resident("a"), resident("b", own_mib=1000)).actions == (
        ("refresh", "a"),
        ("refresh", "b"),
    )
    assert asked(Host(900), resident("a", 40), resident("b", own_mib=1000)).actions == (("refresh", "b"),)


def test_each_kind_after_the_one_before_and_once() -> None:
    one = resident("a")
    swap = Host(100, swap_free_mib=300)
    assert asked(swap, one).actions == (("page_out", "a"),)
    assert asked(swap, resident("a", 100, 200, "page_out")).actions == (("refresh", "a"),)
    assert asked(swap, resident("a", 100, 200, "page_out", "refresh")).actions == (("pause", "a"),)
    assert asked(swap, resident("a", 100, 200, *KINDS)).actions == ()
    assert asked(swap, one, resident("b", 50)).actions == (("page_out", "a"), ("refresh", "b"))
    for most, expected in (("page_out", ()), ("refresh", (("refresh", "a"),))):
        policy = replace(POLICY, most=most)  # type: ignore[arg-type]
        assert asked(Host(100), one, policy=policy).actions == expected
    done = resident("a", 100, 200, "refresh")
    assert asked(Host(100), done, policy=replace(POLICY, most="refresh")).actions == ()


def test_what_holds_little_is_left() -> None:
    assert asked(Host(1), resident("a", 100, LEAST_MIB - 1)).actions == ()


@given(
    st.integers(0, 2000),
    st.integers(0, 1000),
    st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 1000), st.frozensets(st.sampled_from(KINDS)))),
    st.sampled_from(("off", *KINDS)),
)
def test_whatever_there_is(
    available: int, swap: int, found: list[tuple[float, int, frozenset[str]]], most: str
) -> None:
    policy = replace(POLICY, most=most)  # type: ignore[arg-type]
    residents = {str(number): Resident(str(number), *each) for number, each in enumerate(found)}  # type: ignore[arg-type]
    decision = decide(Host(available, swap), residents.values(), policy, pressed=False)
    assert len(decision.actions) <= AT_ONCE
    assert len({name for _, name in decision.actions}) == len(decision.actions)
    assert not decision.actions or decision.pressed
    for kind, name in decision.actions:
        assert kind in policy.kinds and kind not in residents[name].done
        assert residents[name].idle_s >= policy.idle_s
    assert sum(residents[name].own_mib for kind, name in decision.actions if kind == "page_out") <= swap


def test_the_policy_is_the_settings() -> None:
    settings = Settings(pressure="pause", pressure_below_mib=5, pressure_stalled=1.5, pressure_idle_s=2)
    assert Policy.of(settings) == Policy("pause", 5, 1.5, 2.0)
    assert Policy.of(Settings()).most == "refresh"
