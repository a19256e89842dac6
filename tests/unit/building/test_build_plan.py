"""Keys and contexts: what of a definition counts, and what holds at each step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.building.definition import Step, define
from agentenv.building.expansion import expand
from agentenv.building.plan import Context, Plan, Root, plan
from agentenv.snapshot.records import GuestSettings, Resources, Start

ROOT = Root("image sha256:0", Resources(1, 512, 2048), Context("user", "", {"LANG": "C"}))


def planned(*steps: Step, root: Root = ROOT, **given: Any) -> Plan:
    copied = [f"identity of {step.source}" for step in steps if step.source]
    return plan(define(template="base", steps=steps, **given), root, copied)


def run(text: str, **given: Any) -> Step:
    return Step("RUN", (text,), **given)


def env(*pairs: str, **given: Any) -> Step:
    return Step("ENV", pairs, **given)


# Keys


def test_the_same_has_the_same_keys() -> None:
    steps = (env("A", "1"), run("true"), Step("COPY", ("a", "b"), "0" * 64))
    assert planned(*steps) == planned(*steps)


def test_a_changed_step_changes_its_key_and_those_after_it() -> None:
    first = planned(run("a"), run("b"), run("c"))
    second = planned(run("a"), run("other"), run("c"))
    same = [one.key == other.key for one, other in zip(first.steps, second.steps, strict=True)]
    assert same == [True, False, False]
    assert first.key != second.key


@pytest.mark.parametrize(
    "root",
    [
        replace(ROOT, identity="image sha256:1"),
        replace(ROOT, resources=Resources(2, 512, 2048)),
        replace(ROOT, resources=Resources(1, 1024, 2048)),
        replace(ROOT, resources=Resources(1, 512, 4096)),
        replace(ROOT, context=Context("root", "", {"LANG": "C"})),
        replace(ROOT, context=Context("user", "/srv", {"LANG": "C"})),
        replace(ROOT, context=Context("user", "", {"LANG": "D"})),
    ],
)
def test_the_base_and_the_machine_count(root: Root) -> None:
    assert planned(run("a")).steps[0].key != planned(run("a"), root=root).steps[0].key


@pytest.mark.parametrize(
    ("step", "other"),
    [
        (run("a"), Step("RUN", ("a", "root"))),
        (run("a"), run("a", login=False)),
        (Step("COPY", ("a", "b"), "0" * 64), Step("COPY", ("a", "b"), "1" * 64)),
        (Step("COPY", ("a", "b"), "0" * 64), Step("COPY", ("a", "b", "", "600"), "0" * 64)),
        (Step("COPY", ("a", "b"), source="one"), Step("COPY", ("a", "b"), source="other")),
        (Step("COPY", ("a", "b"), "0" * 64), Step("COPY", ("a", "b"), "0" * 64, archive_owners=True)),
        (env("A", "1"), Step("ARG", ("A", "1"))),
        (Step("USER", ("a",)), Step("USER", ("a", "true"))),
    ],
)
def test_everything_of_a_step_counts(step: Step, other: Step) -> None:
    assert planned(step).steps[0].key != planned(other).steps[0].key


@given(
    st.lists(st.text(max_size=3), min_size=1, max_size=4),
    st.lists(st.text(max_size=3), min_size=1, max_size=4),
)
def test_no_two_commands_share_a_key(one: list[str], other: list[str]) -> None:
    """Joined arguments must not look like others."""
    label, second = Step("LABEL", tuple(one)), Step("LABEL", tuple(other))
    assert (planned(label).key == planned(second).key) == (one == other)


def test_the_start_command_is_part_of_the_whole_only() -> None:
    plain = planned(run("a"))
    started = planned(run("a"), start=Start("serve", "true"))
    assert plain.steps == started.steps
    assert plain.key != started.key


def test_forcing_changes_no_key() -> None:
    assert planned(run("a", force=True)).key == planned(run("a"), force=True).key == planned(run("a")).key


# What may be used


def test_usable_are_kept_steps_before_the_first_forced_one() -> None:
    steps = (run("a"), env("A", "1"), Step("COPY", ("a", "b"), "0" * 64), run("c", force=True), run("d"))
    assert [each.number for each in planned(*steps).usable()] == [3, 1]
    assert [each.number for each in planned(*steps[:3]).usable()] == [3, 1]
    assert planned(*steps, force=True).usable() == ()


def test_what_is_left_to_do() -> None:
    steps = (
        Step("WORKDIR", ("/a",)),
        run("a"),
        Step("USER", ("b",)),
        env("A", "1"),
        run("c"),
        Step("LABEL", ("x",)),
    )
    assert [each.number for each in planned(*steps).rest(0)] == [1, 2, 3, 5]
    assert [each.number for each in planned(*steps).rest(2)] == [3, 5]
    assert planned(*steps).rest(5) == ()


# Contexts


def test_contexts_follow_each_other() -> None:
    made = planned(
        env("A", "1", "B", "$A-${LANG}"),
        env("C", "$A$B"),
        Step("WORKDIR", ("app",)),
        Step("WORKDIR", ("../$A",)),
        Step("USER", ("me:group",)),
        Step("ARG", ("D", "4")),
        run("$A stays the shell's"),
    )
    last = made.steps[-1]
    assert last.step.args == ("$A stays the shell's",)
    assert last.before.env == {"LANG": "C", "A": "1", "B": "-C", "C": "1-C"}
    assert last.before.variables == {**last.before.env, "D": "4"}
    assert (last.before.user, last.before.workdir) == ("me", "/1")
    assert made.context.settings == GuestSettings(last.before.env, "me", "/1")


def test_a_relative_directory_counts_from_the_root_where_none_was_said() -> None:
    assert planned(Step("WORKDIR", ("a/./b",))).context.workdir == "/a/b"


def test_defaults_hold_for_steps_where_the_base_does_not_say() -> None:
    steps = (Step("USER", ("root",), default=True), Step("WORKDIR", ("/",), default=True), run("a"))
    bare = replace(ROOT, says_user=False, says_workdir=False)
    made = planned(*steps, root=bare, start=Start("serve"))
    before = made.steps[-1].before
    assert (before.actor, before.directory) == ("root", "/")
    assert made.context.settings == GuestSettings({"LANG": "C"}, "user", None), "not for sandboxes"
    assert made.start.settings == GuestSettings({"LANG": "C"}, "root", "/")
    assert made.rest(0) == made.steps[2:], "there is nothing to do for them"

    told = planned(*steps).steps[-1].before
    assert (told.actor, told.directory) == ("user", "")
    own = planned(*steps, Step("USER", ("me",)), Step("WORKDIR", ("x",)), root=bare).context
    assert (own.actor, own.user, own.directory, own.workdir) == ("me", "me", "/x", "/x")


def test_verbatim_values_hold_no_variables() -> None:
    assert planned(env("A", "$LANG", verbatim=True)).context.env["A"] == "$LANG"


def test_a_start_command_is_inherited_with_what_it_runs_with() -> None:
    below = Start("serve", "ready", GuestSettings({}, "other", "/srv"))
    root = replace(ROOT, start=below)
    assert planned(run("a"), root=root).start == below
    assert planned(run("a"), root=root, start=Start(ready="true")).start.command == ""


# Variables


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A", "1"),
        ("${A}b", "1b"),
        ("$AB", ""),
        ("$none-x", "-x"),
        ("\\$A", "$A"),
        ("\\\\$A", "\\$A"),
        ("a\\b", "a\\b"),
        ("${none:-x}", "x"),
        ("${empty:-x}", "x"),
        ("${empty-x}", ""),
        ("${A:-x}", "1"),
        ("${A:+x}", "x"),
        ("${empty:+x}", ""),
        ("${empty+x}", "x"),
        ("${none:-$A}", "1"),
        ("$(cmd) `cmd` $", "$(cmd) `cmd` $"),
        ("${unclosed", "${unclosed"),
    ],
)
def test_variables(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "empty": ""}) == expected


@given(st.text(max_size=20))
def test_values_are_not_expanded_again(value: str) -> None:
    assert expand("$A", {"A": value, "B": "no"}) == value
