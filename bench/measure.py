"""What benches share: percentiles, interleaved rounds, and the answer as a table or one JSON object."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any


def percentile(values: list[float], part: float) -> float:
    """The value below which `part` (0 to 1) of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def summary(values: list[float]) -> dict[str, float]:
    """p50, p95 and max of seconds, as milliseconds."""
    return {
        "p50_ms": round(percentile(values, 0.5) * 1e3, 2),
        "p95_ms": round(percentile(values, 0.95) * 1e3, 2),
        "max_ms": round(max(values) * 1e3, 2),
    }


def interleaved(
    actions: Mapping[str, Callable[[], object]], rounds: int, warm: int = 5
) -> dict[str, list[float]]:
    """Seconds of each action, one after the other in each round, so that a busy host hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(warm + rounds):
        for name, action in actions.items():
            begun = time.perf_counter()
            action()
            if number >= warm:
                taken[name].append(time.perf_counter() - begun)
    return taken


def show(result: Mapping[str, Any], as_json: bool) -> None:
    """One JSON object, or a line for each value."""
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        if isinstance(value, Mapping):
            value = "  ".join(f"{key} {number}" for key, number in value.items())
        print(f"{name:24} {value}")
