"""What doctor shows to people and to programs."""

from __future__ import annotations

import json

import pytest

from agentenv.host.capability import Capability, Status, able, as_json, as_table


def one(name: str, status: Status, *, required: bool = True) -> Capability:
    return Capability(name, status, required, f"detail of {name}", f"why {name}", f"apt install {name}")


@pytest.mark.parametrize(
    ("status", "required", "expected"),
    [
        ("ok", True, True),
        ("ok", False, True),
        ("degraded", True, True),
        ("degraded", False, True),
        ("missing", False, True),
        ("missing", True, False),
    ],
)
def test_only_what_is_required_and_missing_stops_a_node(
    status: Status, required: bool, expected: bool
) -> None:
    assert able([one("a", "ok"), one("b", status, required=required)]) is expected


def test_the_table_names_reason_and_remedy_of_what_is_not_ok() -> None:
    text = as_table([one("good", "ok"), one("bad", "missing")])
    assert "why good" not in text
    assert "why bad" in text
    assert "remedy: apt install bad" in text
    assert text.endswith("No node can run here: bad missing.")


def test_the_table_ends_with_what_could_be_better() -> None:
    assert as_table([one("good", "ok")]).endswith("A node can run here.")
    text = as_table([one("slow", "degraded", required=False)])
    assert text.endswith("A node can run here; less than ideal: slow.")


def test_lines_are_no_wider_than_a_screen() -> None:
    wordy = Capability("name", "degraded", False, "word " * 60, "reason " * 60, "remedy " * 60)
    assert max(map(len, as_table([wordy]).splitlines())) <= 100


def test_programs_get_every_field() -> None:
    content = json.loads(as_json([one("bad", "missing")]))
    assert content["able"] is False
    assert content["capabilities"] == [
        {
            "name": "bad",
            "status": "missing",
            "required": True,
            "detail": "detail of bad",
            "why": "why bad",
            "remedy": "apt install bad",
        }
    ]
