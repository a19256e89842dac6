"""The text of a Dockerfile: continuations, comments, directives, heredocs, flags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.dockerfile.syntax import DockerfileError, Document, flags_of, heredoc_name, parse


def test_lines_words_and_comments() -> None:
    document = parse("# comment\nFROM a AS b\n\nrun  one \\\n  # in between\n  two\n")
    assert [(each.name, each.line, each.words) for each in document.instructions] == [
        ("FROM", 2, ("a", "AS", "b")),
        ("RUN", 4, ("one   two",)),
    ]


def test_the_escape_directive_changes_what_continues_a_line() -> None:
    document = parse("# syntax=docker/dockerfile:1\n# escape=`\nFROM a\nRUN dir C:\\ `\n  && more\n")
    assert document.escape == "`"
    assert document.instructions[1].words == ("dir C:\\   && more",)


def test_heredocs_of_all_kinds() -> None:
    document = parse("FROM a\nCOPY <<A <<-'B' /d/\none $x\nA\n\ttwo $x\n\tB\nRUN cat <<X | tr a b\nhi\nX\n")
    copy, run = document.instructions[1:]
    assert [(each.name, each.content, each.expand) for each in copy.heredocs] == [
        ("A", "one $x\n", True),
        ("B", "two $x\n", False),
    ]
    assert [heredoc_name(word) for word in copy.words] == ["A", "B", None]
    assert run.heredocs[0].content == "hi\n"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("FROM a\nRUNN x\n", 2, "unknown instruction: RUNN"),
        ("FROM a\n\nCOPY <<EOF /x\nno end\n", 3, "unterminated heredoc"),
        ("# escape=x\nFROM a\n", 1, "invalid escape token"),
        ("FROM a\nENV A=1 B\n", 2, "can't find ="),
        ("FROM a\nRUN [1, 2]\n", 2, "Only strings"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, line: int, said: str) -> None:
    with pytest.raises(DockerfileError, match=said) as caught:
        parse(text)
    assert caught.value.line == line


def test_flags() -> None:
    instruction = parse(
        "FROM a\nRUN --mount=type=cache,target=/c --mount=type=tmpfs --security=x ls\n"
    ).instructions[1]
    flags = flags_of(instruction, {"mount": "list", "security": "text"})
    assert flags.values["mount"] == ("type=cache,target=/c", "type=tmpfs")
    assert flags.text("security") == "x"
    assert flags.text("other") is None


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("--nope=1", "unknown flag --nope"),
        ("--chown=a --chown=b", "given twice"),
        ("--chown", "needs a value"),
        ("--link=perhaps", "true or false"),
    ],
)
def test_flags_that_cannot_be(written: str, said: str) -> None:
    instruction = parse(f"FROM a\nCOPY {written} x y\n").instructions[1]
    with pytest.raises(DockerfileError, match=said):
        flags_of(instruction, {"chown": "text", "link": "switch"})


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert isinstance(parse(text), Document)
    except DockerfileError as error:
        assert error.line <= text.count("\n") + 1


LINES = st.lists(
    st.sampled_from(
        [
            "FROM a",
            "RUN x \\",
            "  y",
            "# c",
            "",
            "COPY <<E /x",
            "E",
            "ENV A=1 \\",
            "  B=2",
            "\tE",
            'CMD ["a"]',
            "  ",
        ]
    ),
    max_size=12,
)


@given(LINES)
def test_instructions_stand_on_the_lines_that_they_say(lines: list[str]) -> None:
    try:
        document = parse("\n".join(lines))
    except DockerfileError:
        return
    for instruction in document.instructions:
        assert lines[instruction.line - 1].strip().upper().startswith(instruction.name)
