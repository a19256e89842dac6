"""The TSC's rate, read and measured."""

from __future__ import annotations

import pytest

from agentenv.host import tsc

LOG = """\
6,1,0,-;Linux version 6.12
6,90,26,-;tsc: Fast TSC calibration using PIT
6,91,26,-;tsc: Detected 2445.441 MHz processor
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", None),
        ("nothing of it", None),
        (LOG, 2_445_441),
        (LOG + "6,92,26,-;tsc: Detected 2445.406 MHz TSC\n", 2_445_406),
        (LOG + "6,200,99,-;tsc: Refined TSC clocksource calibration: 2445.404 MHz\n", 2_445_404),
    ],
)
def test_the_kernels_last_word_counts(log: str, expected: int | None) -> None:
    assert tsc.from_log(log) == expected


def test_it_can_be_measured() -> None:
    known = tsc.from_sysfs() or tsc.from_log(tsc.kernel_log())
    measured = tsc.measured()
    assert 100_000 < measured < 10_000_000
    if known is not None:
        assert measured == pytest.approx(known, rel=0.01)


def test_the_answer_stays_the_same() -> None:
    assert tsc.khz() == tsc.khz()
