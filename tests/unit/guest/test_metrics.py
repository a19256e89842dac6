"""Readings of processor, memory and disk."""

from __future__ import annotations

import os

from agentenv.guest.metrics import CpuTimes, Metrics, parse_meminfo, parse_stat, used_percent


def test_idle_and_waiting_are_not_busy_and_guest_time_is_not_counted_twice() -> None:
    times = parse_stat("cpu  10 1 5 80 4 0 0 0 7 7\ncpu0 1 1 1 1\n")
    assert (times.busy, times.total) == (16, 100)


def test_percent_is_the_share_between_two_readings() -> None:
    assert used_percent(CpuTimes(10, 100), CpuTimes(60, 200)) == 50.0
    assert used_percent(CpuTimes(10, 100), CpuTimes(10, 100)) == 0.0
    assert used_percent(CpuTimes(10, 100), CpuTimes(5, 200)) == 0.0


def test_meminfo_is_in_bytes() -> None:
    assert parse_meminfo("MemTotal:  2 kB\nHugePages_Total:   3\n") == {
        "MemTotal": 2048,
        "HugePages_Total": 3,
    }


def test_a_reading_of_this_machine() -> None:
    told = Metrics().read()
    assert told["cpu_count"] == os.cpu_count()
    assert 0 <= told["cpu_used_pct"] <= 100
    assert 0 < told["mem_used"] < told["mem_total"]
    assert told["mem_total_mib"] == told["mem_total"] // 2**20
    assert 0 < told["disk_used"] <= told["disk_total"]
    assert set(told) == {
        "ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "mem_total_mib",
        "mem_used_mib", "disk_used", "disk_total",
    }  # fmt: skip
