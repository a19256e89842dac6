"""Limits as values: what is asked, the node's defaults and maxima, and what comes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from agentenv.config import Settings, load
from agentenv.errors import InvalidRequest
from agentenv.limits import BURST_MOST, MOST, NONE, DiskLimits, Limits, NetworkLimits, chosen

MIB = 1 << 20


def network(*values: int | None) -> Limits:
    return Limits(network=NetworkLimits(*values))


def disk(*values: int | None) -> Limits:
    return Limits(disk=DiskLimits(*values))


def test_nothing_is_limited_by_itself() -> None:
    assert not NONE
    assert chosen(NONE, NONE, NONE) == NONE
    assert chosen(network(0, 0, 0), NONE, NONE) == NONE


@pytest.mark.parametrize(
    ("asked", "default", "most", "expected"),
    [
        (network(MIB), NONE, NONE, network(MIB)),
        (NONE, network(MIB, 2 * MIB), NONE, network(MIB, 2 * MIB)),
        (network(3 * MIB), network(MIB, 2 * MIB), NONE, network(3 * MIB, 2 * MIB)),
        (network(0), network(MIB, 2 * MIB), NONE, network(None, 2 * MIB)),
        (NONE, NONE, network(MIB), network(MIB)),
        (NONE, network(4 * MIB), network(MIB), network(MIB)),
        (disk(MIB, 100, 2 * MIB, 200), NONE, NONE, disk(MIB, 100, 2 * MIB, 200)),
        # A default burst follows the rate that was asked, or goes.
        (disk(8 * MIB), disk(MIB, None, 2 * MIB), NONE, disk(8 * MIB)),
        (disk(0), disk(MIB, None, 2 * MIB), NONE, NONE),
    ],
)
def test_what_was_asked_wins_over_the_default_and_never_over_the_maximum(
    asked: Limits, default: Limits, most: Limits, expected: Limits
) -> None:
    assert chosen(asked, default, most) == expected


@pytest.mark.parametrize(
    ("asked", "most", "words"),
    [
        (network(2 * MIB), network(MIB), "limits.network.rxBytesPerSecond: 2097152 is more than the most"),
        (network(0), network(MIB), "this node limits it to 1048576"),
        (network(None, 1), NONE, "limits.network.txBytesPerSecond: must be at least 16384"),
        (network(MOST + 1), NONE, "more than the most"),
        (network(MIB, None, BURST_MOST + 1), NONE, "more than the most"),
        (network(None, None, MIB), NONE, "limits.network.burstBytes: a burst of what is not limited"),
        (network(MIB, None, 100), NONE, "limits.network.burstBytes: must be at least 16384"),
        (disk(1000), NONE, "limits.disk.bytesPerSecond: must be at least"),
        (disk(None, 1), NONE, "limits.disk.iops: must be at least 20"),
        (disk(MIB, None, MIB - 1), NONE, "limits.disk.burstBytes: must be at least 1048576"),
        (disk(MIB, None, None, 10), NONE, "limits.disk.burstOperations: a burst of what is not limited"),
    ],
)
def test_what_cannot_be_is_refused_by_name(asked: Limits, most: Limits, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chosen(asked, NONE, most)
    assert words in str(caught.value)


def test_settings_take_them_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    monkeypatch.setenv("AENV_LIMITS", '{"network": {"rx_bytes_per_second": 1048576}}')
    assert load().limits == network(MIB)
    (tmp_path / "aenv.toml").write_text("[limits_most.disk]\niops = 500\n")
    assert load().limits_most == disk(None, 500)


@pytest.mark.parametrize(
    "given",
    [
        {"limits": {"network": {"rx": 5}}},
        {"limits": {"disk": {"iops": 1}}},
        {"limits": {"disk": {"iops": 900}}, "limits_most": {"disk": {"iops": 500}}},
        {"limits_most": {"disk": {"burst_bytes": 5 * MIB}}},
    ],
)
def test_settings_that_cannot_be(given: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        Settings(home=tmp_path, **given)  # type: ignore[arg-type]
