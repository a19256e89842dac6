"""What a pool holds, as a function of demand, bounds and room."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agentenv.sandbox.admission import Need
from agentenv.sandbox.pool_plan import Bounds, Plan, Shelf, SlotShelf, peak_demand, plan

BOUNDS = Bounds(least=1, most=4, total=6, slots_least=2, slots_most=5, window_s=5.0, keep_s=60.0)
NEED = Need(600, 2000, 1, 1)
ROOM = Need(600_000, 2_000_000, 1000, 1000)
SLOTS = SlotShelf(2, 0, (), 100)


def shelf(
    name: str = "s1", ready: int = 0, making: int = 0, asked: tuple[float, ...] = (), **more: bool
) -> Shelf:
    return Shelf(name, NEED, ready, making, asked, **more)


def planned(now: float, *shelves: Shelf, slots: SlotShelf = SLOTS, room: Need = ROOM) -> Plan:
    return plan(now, shelves, slots, room, BOUNDS)


def test_without_demand_nothing_is_held() -> None:
    assert planned(100, shelf()) == Plan()
    assert planned(100, shelf(ready=3)).drop == {"s1": 3}


def test_one_start_keeps_the_least_ready_for_a_while() -> None:
    asked = (100.0,)
    assert planned(101, shelf(asked=asked)).make == {"s1": 1}
    assert planned(101, shelf(ready=1, asked=asked)) == Plan()
    assert planned(159, shelf(ready=1, asked=asked)) == Plan()
    assert planned(160, shelf(ready=1, asked=asked)).drop == {"s1": 1}


def test_a_burst_is_held_ready_up_to_the_most() -> None:
    assert planned(101, shelf(asked=(100.0, 100.1, 100.2))).make == {"s1": 3}
    assert planned(101, shelf(asked=tuple(100 + n / 10 for n in range(20)))).make == {"s1": 4}


def test_starts_far_apart_are_no_burst() -> None:
    assert planned(131, shelf(asked=(100.0, 110.0, 120.0, 130.0))).make == {"s1": 1}


def test_what_is_under_way_counts() -> None:
    asked = (100.0, 100.1, 100.2)
    assert planned(101, shelf(ready=1, making=1, asked=asked)).make == {"s1": 1}
    assert planned(101, shelf(ready=1, making=2, asked=asked)) == Plan()


def test_a_shelf_that_is_held_back_is_not_filled_but_shrinks() -> None:
    assert planned(101, shelf(asked=(100.0,), held_back=True)) == Plan()
    assert planned(900, shelf(ready=1, asked=(100.0,), held_back=True)).drop == {"s1": 1}


def test_everybody_has_a_first_before_anybody_has_a_second() -> None:
    burst = tuple(100 + n / 10 for n in range(4))
    found = planned(110, shelf("a", asked=burst), shelf("b", asked=burst), shelf("c", asked=(101.0,)))
    assert found.make == {"c": 1, "b": 3, "a": 2}
    assert next(iter(found.make)) == "c"  # asked for last


def test_memory_that_is_not_there_is_not_held() -> None:
    burst = (100.0, 100.1, 100.2)
    assert planned(101, shelf(asked=burst), room=Need(1300, 10_000, 9, 9)).make == {"s1": 2}
    assert planned(101, shelf(asked=burst), room=Need(100, 10_000, 9, 9)) == Plan()


def test_what_has_to_be_given_back_is_dropped() -> None:
    burst = (100.0, 100.1, 100.2)
    short = Need(-700, 10_000, 9, 9)
    assert planned(101, shelf(ready=3, asked=burst), room=short).drop == {"s1": 2}
    old, new = shelf("old", ready=2, asked=(90.0, 90.1)), shelf("new", ready=2, asked=(100.0, 100.1))
    assert planned(101, old, new, room=Need(-600, 10_000, 9, 9)).drop == {"old": 1}


def test_slots_follow_demand_between_their_bounds() -> None:
    assert planned(100, slots=SlotShelf(0, 0, (), 100)).make_slots == 2
    assert planned(101, slots=SlotShelf(1, 1, (100.0,) * 4, 100)).make_slots == 2
    assert planned(101, slots=SlotShelf(0, 0, (100.0,) * 9, 100)).make_slots == 5
    assert planned(101, slots=SlotShelf(0, 0, (100.0,) * 9, 1)).make_slots == 1
    assert planned(900, slots=SlotShelf(5, 0, (100.0,) * 9, 100)).drop_slots == 3


shelves = st.lists(
    st.builds(
        lambda ready, making, asked, cost: Shelf(
            "", Need(cost, 10, 1, 1), ready, making, tuple(sorted(asked))
        ),
        st.integers(0, 6),
        st.integers(0, 3),
        st.lists(st.floats(0, 100), max_size=8),
        st.integers(1, 900),
    ),
    max_size=5,
).map(lambda found: [replace(each, snapshot_id=f"s{number}") for number, each in enumerate(found)])
rooms = st.builds(Need, st.integers(-3000, 3000), st.just(10_000), st.integers(-5, 9), st.just(100))


@given(shelves, rooms, st.floats(0, 200))
def test_a_plan_keeps_to_its_bounds_and_is_done_once(found: list[Shelf], room: Need, now: float) -> None:
    result = plan(now, found, SLOTS, room, BOUNDS)
    assert not result.make.keys() & result.drop.keys()
    after = []
    for each in found:
        make, drop = result.make.get(each.snapshot_id, 0), result.drop.get(each.snapshot_id, 0)
        assert 0 <= drop <= each.ready
        assert make >= 0
        if make:
            assert each.ready + each.making + make <= min(
                BOUNDS.most, max(1, peak_demand(each.asked, now, BOUNDS))
            )
        room += sum([each.need] * drop, Need()) - sum([each.need] * make, Need())
        after.append(replace(each, ready=each.ready - drop + make))
    if result.make:
        assert sum(each.ready + each.making for each in after) <= BOUNDS.total + sum(e.making for e in found)
        assert min(room.memory_mib, room.vcpus) >= 0 or any(each.making for each in found)
    if min(room.memory_mib, room.vcpus) < 0:  # all that could be given back was
        assert not any(each.ready for each in after) or any(each.making for each in found)
    assert plan(now, after, SLOTS, room, BOUNDS) == Plan()
