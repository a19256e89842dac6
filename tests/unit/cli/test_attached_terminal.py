"""Keys that leave, modes that are undone, a terminal that is as it was."""

from __future__ import annotations

import os
import pty
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.cli.attached.terminal import DetachKeys, Modes, Terminal, parse_keys
from agentenv.errors import InvalidRequest

LEAVE = b"\x10\x11"
_PENDIN = 0o40000  # of a terminal's local modes


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("ctrl-p,ctrl-q", LEAVE),
        ("CTRL-P, ctrl-Q", LEAVE),
        ("ctrl-]", b"\x1d"),
        ("ctrl-@,a,~", b"\0a~"),
        ("", b""),
    ],
)
def test_keys_as_they_are_written(text: str, keys: bytes) -> None:
    assert parse_keys(text) == keys


@pytest.mark.parametrize("text", ["ctrl-", "ctrl-1", "alt-x", "ab", "ü"])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_keys(text)


@pytest.mark.parametrize(
    ("keys", "typed", "passed"),
    [
        (LEAVE, [b"ab\x10\x11cd"], b"ab"),
        (LEAVE, [b"ab\x10", b"\x11cd"], b"ab"),
        (LEAVE, [b"\x10\x10\x11"], b"\x10"),
        (b"aab", [b"aaab"], b"a"),
        (b"aab", [b"a", b"a", b"a", b"a", b"b"], b"aa"),
    ],
)
def test_the_sequence_is_found(keys: bytes, typed: list[bytes], passed: bytes) -> None:
    looking = DetachKeys(keys)
    assert b"".join(map(looking.feed, typed)) == passed
    assert looking.found


@given(st.lists(st.binary(max_size=6).map(lambda data: bytes(b % 4 for b in data))), st.binary(max_size=4))
def test_nothing_that_is_typed_is_lost(typed: list[bytes], given_keys: bytes) -> None:
    keys = bytes(b % 4 for b in given_keys)
    looking, passed, whole = DetachKeys(keys), b"", b"".join(typed)
    for data in typed:
        passed += looking.feed(data)
        if looking.found:
            break
    at = whole.find(keys) if keys else -1
    assert looking.found == (at >= 0)
    assert passed + looking.release() == (whole[:at] if looking.found else whole)


def test_what_is_held_back_is_released() -> None:
    looking = DetachKeys(LEAVE)
    assert (looking.feed(b"a\x10"), looking.holding, looking.release()) == (b"a", True, b"\x10")
    assert (looking.holding, looking.feed(b"\x11")) == (False, b"\x11")


def test_modes_that_were_left_on_are_undone() -> None:
    modes = Modes()
    for piece in (b"text\x1b[?104", b"9h\x1b[?25l\x1b[", b"?2004h", b"\x1b[?1000;1006h\x1b[?2004l"):
        modes.see(piece)
    undone = modes.undo()
    assert undone.startswith(b"\x1b[?1000l\x1b[?1006l\x1b[?1049l\x1b[?25h")
    assert modes.undo() == b""


def test_a_program_that_tidied_up_leaves_nothing_to_undo() -> None:
    modes = Modes()
    modes.see(b"\x1b[?1049h\x1b[?25l...\x1b[?25h\x1b[?1049l$ \x1b")
    assert modes.undo() == b""


def test_the_terminal_is_as_it_was_whatever_happens() -> None:
    master, slave = pty.openpty()
    try:
        before = termios.tcgetattr(slave)
        with pytest.raises(ZeroDivisionError), Terminal(slave, slave) as terminal:
            assert not termios.tcgetattr(slave)[3] & (termios.ECHO | termios.ICANON | termios.ISIG)
            terminal.show(b"\x1b[?1049h")
            raise ZeroDivisionError
        after = termios.tcgetattr(slave)
        assert after[3] & ~_PENDIN == before[3] & ~_PENDIN  # PENDIN comes and goes with the change itself
        assert after[:3] == before[:3]
        shown = b""
        while b"\x1b[?1049l" not in shown:
            shown += os.read(master, 1000)
    finally:
        os.close(master)
        os.close(slave)
