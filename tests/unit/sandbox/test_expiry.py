"""The timer of expiries, on a clock that jumps."""

from __future__ import annotations

from agentenv.sandbox.expiry import LOOK_AGAIN_S, Expiry
from support.sandbox_parts import JumpingClock


def clock_and_expiry() -> tuple[JumpingClock, Expiry, list[str]]:
    clock, due = JumpingClock(0.0), list[str]()
    return clock, Expiry(clock, due.append), due


def test_each_expires_at_its_time() -> None:
    clock, expiry, due = clock_and_expiry()
    expiry.set("b", 20.0)
    expiry.set("a", 10.0)
    clock.jump(9.9)
    assert due == []
    clock.jump(0.1)
    assert due == ["a"]
    clock.jump(100)
    assert due == ["a", "b"]


def test_a_new_time_replaces_the_old_one_earlier_or_later() -> None:
    clock, expiry, due = clock_and_expiry()
    expiry.set("later", 10.0)
    expiry.set("later", 20.0)
    expiry.set("sooner", 20.0)
    expiry.set("sooner", 5.0)
    clock.jump(10.0)
    assert due == ["sooner"]
    clock.jump(10.0)
    assert due == ["sooner", "later"]


def test_a_time_set_twice_expires_once() -> None:
    clock, expiry, due = clock_and_expiry()
    for end in (10.0, 20.0, 10.0):
        expiry.set("a", end)
    clock.jump(30.0)
    assert due == ["a"]


def test_what_is_dropped_does_not_expire() -> None:
    clock, expiry, due = clock_and_expiry()
    expiry.set("a", 10.0)
    expiry.set("b", 10.0)
    expiry.drop("a")
    expiry.drop("unknown")
    clock.jump(20.0)
    assert due == ["b"]


def test_the_past_is_due_at_once() -> None:
    clock, expiry, due = clock_and_expiry()
    expiry.set("a", -5.0)
    clock.jump(0.0)
    assert due == ["a"]


def test_a_thousand_are_due_in_one_go() -> None:
    clock, expiry, due = clock_and_expiry()
    for number in range(1000):
        expiry.set(str(number), 10.0)
    clock.jump(10.0)
    assert len(set(due)) == 1000


def test_setting_from_within_an_expiry_counts() -> None:
    clock = JumpingClock(0.0)
    seen: list[float] = []

    def again(name: str) -> None:
        seen.append(clock.now())
        if len(seen) < 3:
            expiry.set(name, clock.now() + 5)

    expiry = Expiry(clock, again)
    expiry.set("a", 5.0)
    for _ in range(4):
        clock.jump(5.0)
    assert seen == [5.0, 10.0, 15.0]


def test_the_wall_clock_is_looked_at_again_before_a_distant_end() -> None:
    """A timer that was set for an hour must not sleep through a step of the wall clock."""
    clock, expiry, due = clock_and_expiry()
    expiry.set("a", 3600.0)
    clock._now = 3600.0 - LOOK_AGAIN_S  # the clock is stepped, and no timer knows
    clock.jump(LOOK_AGAIN_S)
    assert due == ["a"]


def test_nothing_expires_after_a_stop() -> None:
    clock, expiry, due = clock_and_expiry()
    expiry.set("a", 10.0)
    expiry.stop()
    expiry.set("b", 11.0)
    clock.jump(20.0)
    assert due == []
