"""Variables: what is expanded here, what is left to the node, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.dockerfile.scope import Arguments, Scope
from agentenv.dockerfile.syntax import DockerfileError, Instruction, parse

WORKDIR = Instruction("WORKDIR", 7, "WORKDIR x", ("x",))


def scope() -> Scope:
    return Scope(args={"A": "arg", "B": "hidden", "UNSET": None, "EMPTY": ""}, env={"B": "env", "PATH": None})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$A", "arg"),
        ("$B", "env"),
        ("${A}b", "argb"),
        ("${A:-x}", "arg"),
        ("${UNSET:-x}", "x"),
        ("${UNSET-x}", "x"),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY-x}", ""),
        ("${A:+x}", "x"),
        ("${UNSET:+x}", ""),
        ("${UNSET:-${A}}", "arg"),
        ("$UNSET", ""),
        ("${A#a}", "rg"),
        ("${A%%r*}", "a"),
        ("${A/r/l}", "alg"),
        (r"\$A", "$A"),
        ("'$A'", "$A"),
        ('"$A b"', "arg b"),
        (r'"a\"b"', 'a"b'),
        ("a'b c'd", "ab cd"),
    ],
)
def test_words(word: str, value: str) -> None:
    assert scope().expand(WORKDIR, word, "\\") == value


def test_the_other_escape_character() -> None:
    assert scope().expand(WORKDIR, "`$A\\x", "`") == "$A\\x"


@pytest.mark.parametrize("word", ["$PATH", "/x/$HOME", "${NOBODY:-x}", "${NOBODY:+x}"])
def test_what_depends_on_the_base_image_is_refused_where_it_must_be_known(word: str) -> None:
    with pytest.raises(DockerfileError, match=r"line 7: WORKDIR: .* is not set in this Dockerfile"):
        scope().expand(WORKDIR, word, "\\")


def test_an_unknown_variable_that_changes_nothing_is_no_matter() -> None:
    assert scope().expand(WORKDIR, "${A:-$NOBODY}", "\\") == "arg"


def test_before_the_first_from_everything_is_known() -> None:
    assert Scope(closed=True).expand(WORKDIR, "a${NOBODY}b", "\\") == "ab"


@pytest.mark.parametrize("word", ["${A", "${}", "'open", "${A:=x}", "${UNSET:?not there}"])
def test_malformed_words_are_refused(word: str) -> None:
    with pytest.raises(DockerfileError, match="line 7"):
        scope().expand(WORKDIR, word, "\\")


@pytest.mark.parametrize(
    ("word", "value", "whole"),
    [
        ("/opt/$A", "/opt/arg", True),
        ("/opt/$A:$PATH", "/opt/arg:$PATH", False),
        ("$UNSET:${HOME}", ":${HOME}", False),
        ("${LIB:+$LIB:}/x", "${LIB:+$LIB:}/x", False),
        ("'$x'", "$x", True),
    ],
)
def test_values_of_env_leave_to_the_node_what_it_alone_knows(word: str, value: str, whole: bool) -> None:
    assert scope().expand_value(WORKDIR, word, "\\") == (value, whole)


def test_a_literal_dollar_beside_such_a_variable_is_refused() -> None:
    with pytest.raises(DockerfileError, match="literal dollar sign"):
        scope().expand_value(WORKDIR, "'$x':$PATH", "\\")


@pytest.mark.parametrize("word", ["${PATH%:*}", "${PATH/a/b}", "${NOBODY:?no}", "${NOBODY:-${PATH}}"])
def test_what_nodes_cannot_expand_is_refused(word: str) -> None:
    with pytest.raises(DockerfileError, match=r"can be taken whole only|NOBODY: no"):
        scope().expand_value(WORKDIR, word, "\\")


def test_bodies_of_heredocs_keep_their_quotes() -> None:
    assert scope().expand_text(WORKDIR, "a '$A' \"x\" \\$A\n", "\\") == "a 'arg' \"x\" $A\n"


def test_what_commands_see_while_building() -> None:
    assert scope().build_only() == {"A": "arg", "EMPTY": ""}


def test_arguments_that_nobody_asks_for() -> None:
    arguments = Arguments({"A": "1", "B": "2", "http_proxy": "p", "BUILDKIT_INLINE_CACHE": "1"})
    assert arguments.take("A") == "1"
    assert arguments.take("C") is None
    assert arguments.unused == ["B"]


def quoted(value: str) -> str:
    return '"' + "".join("\\" + each if each in '\\"$' else each for each in value) + '"'


VALUES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40)


@given(VALUES)
def test_a_quoted_value_is_itself(value: str) -> None:
    instruction = parse(f"FROM a\nENV A={quoted(value)} B=1\n").instructions[1]
    assert len(instruction.words) == 6
    assert Scope().expand_value(instruction, instruction.words[1], "\\") == (value, True)


@given(VALUES)
def test_a_value_passes_through_a_variable_unread(value: str) -> None:
    assert Scope(args={"A": value}).expand(WORKDIR, "<$A>", "\\") == f"<{value}>"


@given(st.text("ab$\\{}:-+'\"# %/PATH", max_size=30))
def test_any_word_is_expanded_or_refused(word: str) -> None:
    try:
        scope().expand(WORKDIR, word, "\\")
        scope().expand_value(WORKDIR, word, "\\")
    except DockerfileError as error:
        assert error.line == 7
