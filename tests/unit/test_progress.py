"""How far something is, in numbers: told from time to time, to logs seldom, and from another process."""

from __future__ import annotations

import io
import json

import pytest

from agentenv.progress import Advance, Counted, Seldom, Tally, document, from_document


class Clock:
    """A clock that is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_tally_tells_from_time_to_time_and_when_it_is_over() -> None:
    told: list[str] = []
    clock = Clock()
    tally = Tally("fetching", 4 << 20, told.append, clock)
    tally.add(1 << 20)
    assert told == []
    clock.now += 2
    tally.add(1 << 20)
    tally.add(1 << 20)
    tally.add(1 << 20)
    assert told == [
        "fetching:  50 %  2.0 MiB of 4.0 MiB  1.0 MiB/s  0:02 left",
        "fetching: 100 %  4.0 MiB of 4.0 MiB  2.0 MiB/s",
    ]
    assert [(each.done, each.total) for each in told if isinstance(each, Advance)] == [
        (2 << 20, 4 << 20),
        (4 << 20, 4 << 20),
    ]


def test_of_what_is_over_at_once_nothing_is_told() -> None:
    told: list[str] = []
    Tally("fetching", 10, told.append, Clock()).add(10)
    assert told == []


def test_without_a_total_there_are_amount_and_rate_alone() -> None:
    assert Advance("copying", 3 << 20, -1, 3.0) == "copying: 3.0 MiB  1.0 MiB/s"


def test_a_log_gets_every_step_and_some_advances() -> None:
    told: list[str] = []
    clock = Clock()
    seldom = Seldom(told.append, clock)
    seldom("looking up a")
    for second in range(10):
        clock.now = 100.0 + second
        seldom(Advance("fetching", second, 10, second))
    seldom("unpacking layer 1 of 1")
    assert (told[0], told[-1]) == ("looking up a", "unpacking layer 1 of 1")
    assert [each.done for each in told if isinstance(each, Advance)] == [2, 4, 6, 8]


@pytest.mark.parametrize("text", ["looking up a", Advance("fetching", 5, 10, 1.5)])
def test_what_a_worker_tells_arrives_as_it_was(text: str) -> None:
    heard = from_document(json.loads(json.dumps(document(text))))
    assert (type(heard), heard) == (type(text), text)
    assert document(heard) == document(text)


def test_what_is_read_of_a_file_is_counted() -> None:
    sizes: list[int] = []
    file = Counted(io.BytesIO(b"12345"), sizes.append)
    assert (file.read(3), file.read()) == (b"123", b"45")
    assert sizes == [3, 2]
