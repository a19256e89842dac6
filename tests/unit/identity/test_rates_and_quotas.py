"""Token buckets and quotas, as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.identity.quotas import QuotaExceeded, require_room
from agentenv.identity.rates import Bucket, Rates
from agentenv.identity.records import Quota, Rate


def test_a_burst_and_then_the_rate() -> None:
    now = [0.0]
    rates = Rates(lambda: now[0])
    rate = Rate(2.0, 3)
    assert [rates.take("a", rate) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rates.take("b", rate) == 0.0
    now[0] = 0.5
    assert [rates.take("a", rate), rates.take("a", rate)] == [0.0, 0.5]
    now[0] = 100.0
    assert [rates.take("a", rate) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    rates.forget("a")
    assert rates.take("a", Rate(1.0, 1)) == 0.0


@given(st.lists(st.floats(0, 10), max_size=200), st.floats(0.1, 50), st.integers(1, 20))
def test_never_more_than_burst_and_rate(pauses: list[float], per_second: float, burst: int) -> None:
    bucket, now, taken = Bucket(Rate(per_second, burst), 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        taken += bucket.take(now) == 0.0
    assert taken <= burst + now * per_second + 1e-6


def test_each_figure_of_a_quota_is_kept_to() -> None:
    taken = [Quota(1, 2, 512, 2048), Quota(1, 0, 0, 2048)]
    wanted = Quota(1, 1, 512, 1024)
    require_room(Quota(), taken, wanted)
    require_room(Quota(3, 3, 1024, 5120), taken, wanted)
    for quota, words in [
        (Quota(sandboxes=2), "2 sandboxes: 2 are taken, and 1 more"),
        (Quota(vcpus=2), "2 vcpus: 2 are taken"),
        (Quota(memory_mib=1023), "1023 MiB of memory: 512 are taken"),
        (Quota(disk_mib=5119), "5119 MiB of disk: 4096 are taken"),
    ]:
        with pytest.raises(QuotaExceeded, match=words):
            require_room(quota, taken, wanted)


def test_what_takes_nothing_of_a_figure_may_be_beyond_it() -> None:
    require_room(Quota(vcpus=1), [Quota(1, 4, 0, 0)], Quota(1, 0, 0, 10))
