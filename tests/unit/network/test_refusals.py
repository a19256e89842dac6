"""What is kept of refused lookups."""

from __future__ import annotations

import itertools
import logging

import pytest

from agentenv.network import refusals as module
from agentenv.network.refusals import Refusal, Refusals


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_name_is_counted_with_its_times() -> None:
    clock = Clock()
    kept = Refusals(clock)
    for name, at in (("a.test", 1.0), ("b.test", 2.0), ("a.test", 3.0)):
        clock.now = at
        kept.note("one", name)
    kept.note("two", "c.test")
    assert kept.of("one") == [Refusal("b.test", 1, 2.0, 2.0), Refusal("a.test", 2, 1.0, 3.0)]
    assert [each.name for each in kept.of("two")] == ["c.test"]
    assert kept.of("three") == []


def test_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NAMES", 2)
    monkeypatch.setattr(module, "OWNERS", 2)
    kept = Refusals()
    for owner, name in itertools.product(("one", "two", "three"), ("a.test", "b.test", "c.test")):
        kept.note(owner, name)
    assert kept.of("one") == []
    assert [each.name for each in kept.of("two")] == ["b.test", "c.test"]


def test_the_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    kept = Refusals(monotonic=clock)
    with caplog.at_level(logging.INFO, logger=module.__name__):
        for _ in range(4):
            kept.note("one", "a.test")
        kept.note("two", "b.test")
        clock.now += module.LOG_EVERY_S
        kept.note("one", "c.test")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "one" in said[0] and "a.test" in said[0]
    assert "two" in said[1] and "b.test" in said[1]
    assert "c.test" in said[2] and "3 more" in said[2]
