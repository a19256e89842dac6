"""Filters, order and pages of lists."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InvalidRequest
from agentenv.sandbox.listing import Query, select
from agentenv.sandbox.records import Origin, Sandbox
from agentenv.sandbox.transitions import SHOWN, State


def box(
    name: str, started: float = 0.0, state: State = State.RUNNING, template: str = "t1", **metadata: str
) -> Sandbox:
    origin = Origin(template, f"name-{template}", "b")
    return Sandbox(name, state, origin, started, started + 300, 300, 1, 512, 2048, metadata=metadata)


def names(boxes: list[Sandbox], query: Query) -> list[str]:
    return [each.id for each in select(boxes, query).sandboxes]


def test_newest_first_unless_asked() -> None:
    boxes = [box("a", 1), box("b", 3), box("c", 2)]
    assert names(boxes, Query()) == ["b", "c", "a"]
    assert names(boxes, Query(ascending=True)) == ["a", "c", "b"]


def test_only_states_that_clients_know() -> None:
    boxes = [box(state, state=state) for state in State]
    assert set(names(boxes, Query())) == {str(state) for state in SHOWN}
    assert set(names(boxes, Query(states=frozenset({"paused"})))) == {"pausing", "paused"}


def test_all_metadata_pairs_must_match() -> None:
    boxes = [box("a", x="1", y="2"), box("b", x="1"), box("c")]
    assert set(names(boxes, Query(metadata={"x": "1"}))) == {"a", "b"}
    assert names(boxes, Query(metadata={"x": "1", "y": "2"})) == ["a"]
    assert names(boxes, Query(metadata={"x": ""})) == []


def test_template_by_id_or_name_and_an_unknown_one() -> None:
    boxes = [box("a", template="t1"), box("b", template="t2")]
    assert names(boxes, Query(template="t2")) == ["b"]
    assert names(boxes, Query(template="name-t2")) == ["b"]
    assert names(boxes, Query(template="t3")) == []


def test_started_after_includes_the_time_as_it_was_told() -> None:
    boxes = [box("a", 1.0), box("b", 1.9999996), box("c", 3.0)]
    assert names(boxes, Query(started_after=2.0)) == ["c", "b"]
    assert names(boxes, Query(started_after=2.1)) == ["c"]


def test_the_total_counts_all_that_run_not_the_page() -> None:
    boxes = [box("a"), box("b"), box("c", state=State.PAUSED)]
    page = select(boxes, Query(limit=1))
    assert (len(page.sandboxes), page.total_running) == (1, 2)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0]), max_size=12),
    st.integers(1, 5),
    st.booleans(),
)
def test_pages_put_together_are_the_whole_list(starts: list[float], limit: int, ascending: bool) -> None:
    boxes = [box(f"i{number}", start) for number, start in enumerate(starts)]
    whole = names(boxes, Query(ascending=ascending, limit=None))
    collected: list[str] = []
    token = None
    while True:
        page = select(boxes, Query(ascending=ascending, limit=limit, token=token))
        collected += [each.id for each in page.sandboxes]
        token = page.next_token
        if token is None:
            break
        assert len(page.sandboxes) == limit
    assert collected == whole


def test_a_page_goes_on_where_it_was_though_the_list_changed() -> None:
    boxes = [box("a", 4), box("b", 3), box("c", 2), box("d", 1)]
    token = select(boxes, Query(limit=2)).next_token
    changed = [box("new", 5), *boxes[:1], *boxes[2:]]  # b, the last one seen, is gone
    assert names(changed, Query(token=token)) == ["c", "d"]


@pytest.mark.parametrize(
    "token",
    ["x", "äöü", "bm90anNvbg", base64.urlsafe_b64encode(json.dumps([1]).encode()).decode(), "W1tdLCAiYSJd"],
)
def test_a_foreign_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest, match="nextToken"):
        select([box("a")], Query(token=token))
