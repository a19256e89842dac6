"""The terminal that a command runs in: raw while something in a sandbox has it, and as it was afterwards."""

from __future__ import annotations

import os
import re
import select
import shutil
import termios
import tty
from types import TracebackType
from typing import Any

from agentenv.errors import InvalidRequest

DETACH_KEYS = "ctrl-p,ctrl-q"
_NAMED = {"[": 27, "\\": 28, "]": 29, "^": 30, "_": 31, "@": 0}

# Modes that a program may leave on (xterm's control sequences, "DEC Private Mode Set"), and how they are
# undone. The cursor is the one that is on by itself.
_MODE = re.compile(rb"\x1b\[\?([0-9;]+)([hl])")
_TAIL = 32
_CURSOR = 25
_UNDONE = frozenset((1, 9, 47, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004))


class Terminal:
    """Raw within the block.

    Args:
        given: the descriptor that keys come from, a terminal.
        shown: the one that is written to.
    """

    def __init__(self, given: int = 0, shown: int = 1) -> None:
        self._given = given
        self._shown = shown
        self._before: list[Any] | None = None
        self.modes = Modes()

    def __enter__(self) -> Terminal:
        self._before = termios.tcgetattr(self._given)
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        undo = self.modes.undo()
        if undo and os.isatty(self._shown):
            write_all(self._shown, undo)
        if self._before is not None:
            termios.tcsetattr(self._given, termios.TCSADRAIN, self._before)

    def take(self) -> None:
        """Make it raw; again, when it was another program's meanwhile."""
        tty.setraw(self._given, termios.TCSADRAIN)

    def show(self, data: bytes) -> None:
        """Write what a program in the sandbox wrote."""
        self.modes.see(data)
        write_all(self._shown, data)

    def size(self) -> tuple[int, int]:
        """Its columns and rows."""
        return size_of(self._given)


class Modes:
    """Which modes of a terminal were switched on by what was written to it."""

    def __init__(self) -> None:
        self._on: set[int] = set()
        self._cursor_off = False
        self._tail = b""

    def see(self, data: bytes) -> None:
        """Look at what is written; a sequence may come in pieces."""
        data = self._tail + data
        end = 0
        for match in _MODE.finditer(data):
            end = match.end()
            self._note(match[1].split(b";"), on=match[2] == b"h")
        last = data.rfind(b"\x1b", max(end, len(data) - _TAIL))
        self._tail = data[last:] if last >= 0 else b""

    def undo(self) -> bytes:
        """What is to be written so that the terminal is a shell's again; nothing, when nothing is on."""
        text = b"".join(b"\x1b[?%dl" % mode for mode in sorted(self._on))
        if self._cursor_off:
            text += b"\x1b[?25h"
        if text:
            text += b"\x1b[0m\x1b>"
        self._on.clear()
        self._cursor_off = False
        return text

    def _note(self, numbers: list[bytes], *, on: bool) -> None:
        for number in (int(each) for each in numbers if each):
            if number == _CURSOR:
                self._cursor_off = not on
            elif number in _UNDONE:
                (self._on.add if on else self._on.discard)(number)


class DetachKeys:
    """Looks for a sequence of keys in what is typed.

    What may be its beginning is held back until the next key, or until `release`.
    """

    def __init__(self, keys: bytes) -> None:
        self._keys = keys
        self._seen = 0
        self.found = False

    @property
    def holding(self) -> bool:
        return self._seen > 0

    def feed(self, data: bytes) -> bytes:
        """What of `data` is for the sandbox; `found` is set when the sequence is complete."""
        if not self._keys or not (self._seen or self._keys[:1] in data):
            return data
        passed = bytearray()
        for at in range(len(data)):
            key = data[at : at + 1]
            while self._seen and key != self._keys[self._seen : self._seen + 1]:
                passed += self._step_back()
            if key != self._keys[self._seen : self._seen + 1]:
                passed += key
                continue
            self._seen += 1
            if self._seen == len(self._keys):
                self._seen = 0
                self.found = True
                break
        return bytes(passed)

    def release(self) -> bytes:
        """What was held back, since no further key came."""
        held, self._seen = self._keys[: self._seen], 0
        return held

    def _step_back(self) -> bytes:
        """Let go of as little as makes what remains a beginning of the sequence again."""
        held = self._keys[: self._seen]
        for drop in range(1, self._seen + 1):
            if self._keys.startswith(held[drop:]):
                self._seen -= drop
                return held[:drop]
        raise AssertionError("nothing is a beginning of everything")


def parse_keys(text: str) -> bytes:
    """Keys as Docker writes them: `ctrl-p,ctrl-q`, `ctrl-]`, single characters; none for an empty text.

    Raises:
        InvalidRequest: it names no key.
    """
    keys = bytearray()
    for name in filter(None, (each.strip() for each in text.split(","))):
        key = name.lower().removeprefix("ctrl-")
        if len(name) == 1 and name.isascii():
            keys += name.encode()
        elif key != name.lower() and len(key) == 1 and "a" <= key <= "z":
            keys.append(ord(key) - ord("a") + 1)
        elif key != name.lower() and key in _NAMED:
            keys.append(_NAMED[key])
        else:
            raise InvalidRequest(f"detach keys: {name!r} is no key", remedy="such as ctrl-p,ctrl-q or ctrl-]")
    return bytes(keys)


def size_of(fd: int) -> tuple[int, int]:
    """Columns and rows of a terminal; of 80 and 24 where it does not know."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        size = shutil.get_terminal_size()
    return (size.columns or 80, size.lines or 24)


def locale_variables() -> dict[str, str]:
    """What programs in a terminal of the sandbox are told of this one, as ssh does."""
    told = {name: value for name, value in os.environ.items() if name == "LANG" or name.startswith("LC_")}
    told = told or {"LANG": "C.UTF-8"}
    told["TERM"] = os.environ.get("TERM", "xterm-256color")
    if colours := os.environ.get("COLORTERM"):
        told["COLORTERM"] = colours
    return told


def tell(message: str) -> None:
    """Tell something to a person whose terminal is raw."""
    write_all(2, f"\r\n[aenv: {message}]\r\n".encode())


def write_all(fd: int, data: bytes) -> None:
    """Write all, to a descriptor that may be non-blocking because another program shares it."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
