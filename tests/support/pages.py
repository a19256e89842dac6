"""The documentation's code blocks: what is in a page, and sessions that run it as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# What a page says before a block that cannot run in a test: <!-- not run: why -->
_MARK = re.compile(r"<!-- not run: (.+) -->")
_FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is its fence's, and `not_run` why it cannot run in a test."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """All pages of the documentation, and those beside it."""
    return [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    mark = None
    for number, line in lines:
        fence = _FENCE.fullmatch(line)
        if fence is None:
            found = _MARK.fullmatch(line.strip())
            mark = found[1] if found else mark if not line.strip() else None
            continue
        indent, ends, language = len(fence[1]), fence[2], fence[3].strip()
        text = []
        for _, inner in lines:
            if inner.strip() == ends:
                break
            text.append(inner[indent:] if not inner[:indent].strip() else inner)
        yield Block(page, number, language, "".join(f"{each}\n" for each in text), mark)
        mark = None


_SHELL = r"""
set -e
while read -r -u "$1" file; do
    # shellcheck disable=SC1090
    source "$file" </dev/null
    printf '\n%s\n' "$2"
done
"""

_PYTHON = """
import sys
names = {"__name__": "__main__"}
with open(int(sys.argv[1])) as files:
    for file in files:
        with open(file.strip()) as source:
            exec(compile(source.read(), file.strip(), "exec"), names)
        print("\\n" + sys.argv[2], flush=True)
"""

_DONE = "b9a3-done"


class _Session:
    """Runs one file after another, each with what those before it left; the first that fails ends it."""

    def __init__(self, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
        theirs, self._control = os.pipe()
        self._process = subprocess.Popen(
            [*command, str(theirs), _DONE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=directory,
            env=dict(environment),
            pass_fds=(theirs,),
        )
        os.close(theirs)

    def run(self, file: Path) -> str:
        """What the file writes, errors included.

        Raises:
            AssertionError: it fails; the message has what it wrote.
        """
        os.write(self._control, f"{file}\n".encode())
        assert self._process.stdout is not None
        written: list[str] = []
        for line in self._process.stdout:
            if line == f"{_DONE}\n":
                return "".join(written).removesuffix("\n")
            written.append(line)
        raise AssertionError(f"ended with status {self._process.wait()}:\n{''.join(written)}")

    def close(self) -> None:
        os.close(self._control)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Reader:
    """Somebody who types a page's blocks: into one shell, and into one Python that was started in it."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._shell = _Session(["bash", "-c", _SHELL, "bash"], directory, environment)
        self._python: _Session | None = None

    def type(self, block: Block) -> None:
        """Run a block; of one in the language `console` what it writes is compared as well.

        Raises:
            AssertionError: a command of it failed, or wrote something else.
        """
        try:
            if block.language == "console":
                for command, expected in _dialogue(block.text):
                    written = self._shell.run(self._file("command.sh", command))
                    assert _alike(written, expected), f"{command}wrote\n{written}\nand not\n{expected}"
            elif block.language == "python":
                self._python = self._python or self._start_python()
                self._python.run(self._file("block.py", block.text))
            else:
                self._shell.run(self._file("block.sh", block.text))
        except AssertionError as error:
            raise AssertionError(f"{block}: {error}") from None

    def close(self) -> None:
        for session in (self._shell, self._python):
            if session is not None:
                session.close()

    def _start_python(self) -> _Session:
        """A Python with the variables that the shell has by now."""
        names = self._directory.with_suffix(".env")
        self._shell.run(self._file("environment.sh", f"env -0 >{names}\n"))
        pairs = (each.partition("=") for each in names.read_text().split("\0") if each)
        environment = {name: value for name, _, value in pairs}
        return _Session([sys.executable, "-c", _PYTHON], self._directory, environment)

    def _file(self, name: str, text: str) -> Path:
        file = self._directory.with_suffix(f".{name}")
        file.write_text(text)
        return file


def _dialogue(text: str) -> Iterator[tuple[str, str]]:
    """The commands after `$ `, each with the lines that it is said to write."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        length = 1
        while lines[length - 1].endswith("\\\n"):
            length += 1
        yield "".join(lines[:length]), "".join(lines[length:])


def _alike(written: str, expected: str) -> bool:
    """Whether a text is as expected, where `…` is any text."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, written.strip(), re.DOTALL) is not None
