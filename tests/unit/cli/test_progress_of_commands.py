"""Progress on stderr: one line that is drawn anew on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import io
import threading

import pytest

from agentenv.cli import meter
from agentenv.cli.meter import TransferMeter, waiting
from agentenv.cli.progress import Steps
from agentenv.progress import Advance


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.drawn.set()


def shown_on(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from now on, where everything is shown at once."""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "60")
    for name in ("AFTER_S", "EVERY_S", "PLAIN_EVERY_S"):
        monkeypatch.setattr(meter, name, 0.0)
    return screen


def test_on_a_terminal_advances_share_a_line_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    with Steps() as steps:
        steps("looking up python:3.13")
        steps(Advance("fetching", 1, 4, 1.0))
        steps(Advance("unpacking layer 1 of 2", 1, 2, 1.0))
        steps(Advance("fetching", 4, 4, 2.0))
        steps("cleaning up")
    lines = terminal.getvalue().split("\r")
    assert lines[0].endswith("looking up python:3.13\n")
    assert lines[1].startswith("fetching:  25 %  1 B of 4 B")
    assert lines[2].startswith("fetching:  25 %") and "| unpacking" in lines[2]
    assert len(lines[2]) == 59 + len("\x1b[K")
    assert lines[3].startswith("unpacking layer 1 of 2:  50 %")
    assert lines[4].startswith("\x1b[K[") and lines[4].endswith("cleaning up\n")


def test_a_line_that_was_drawn_is_gone_when_a_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    with pytest.raises(OSError, match="broke"), TransferMeter() as shown:
        shown.total(1, 100)
        shown.add(50)
        raise OSError("broke")
    assert terminal.getvalue().startswith("\r 50 %  50 B of 100 B")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_elsewhere_there_is_a_plain_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Steps() as steps:
        steps(Advance("fetching", 1, 4, 1.0))  # it has only begun
        monkeypatch.setattr(meter, "PLAIN_EVERY_S", 0.0)
        with TransferMeter() as shown:
            shown.total(1, 100)
            shown.add(50)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(" 50 %  50 B of 100 B") and err.count("\n") == 1 and "\r" not in err


def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    with Steps(quiet=True) as steps, TransferMeter(quiet=True) as shown:
        steps("looking up a")
        steps(Advance("fetching", 1, 4, 1.0))
        shown.total(1, 100)
        shown.add(50)
    assert terminal.getvalue() == ""


def test_a_terminal_has_a_word_on_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    with pytest.raises(OSError, match="broke"), waiting("starting base"):
        assert terminal.drawn.wait(30)
        raise OSError("broke")
    assert terminal.getvalue() == "\rstarting base …\x1b[K\r\x1b[K"


def test_what_is_over_at_once_has_no_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting("starting base"):
        pass  # standard error is no terminal
    assert capsys.readouterr().err == ""
    terminal = shown_on(monkeypatch)
    monkeypatch.setattr(meter, "AFTER_S", 3600.0)
    with waiting("starting base"):
        pass
    assert terminal.getvalue() == ""
