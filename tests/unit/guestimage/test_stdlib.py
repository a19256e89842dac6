"""Which modules a program needs, judged by what the interpreter really loads."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from agentenv.guestimage import stdlib, tools
from agentenv.guestimage.stdlib import Library


@pytest.fixture(scope="module")
def library() -> Library:
    return tools.interpreter().library


def program(directory: Path, text: str) -> Path:
    path = directory / "program.py"
    path.write_text(text)
    return path


def test_every_form_of_import_is_seen() -> None:
    source = b"""
import a.b, c as d
from e import f, g
from . import h
from .i import j
from ..k import *
def later():
    import m
try:
    import n
except ImportError:
    pass
"""
    found = set(stdlib.imports(source, "one.two"))
    assert found == {
        *("a.b", "c", "e", "e.f", "e.g", "one.two", "one.two.h", "one.two.i", "one.two.i.j"),
        *("one.k", "m", "n"),
    }


def test_what_only_type_checkers_read_is_not() -> None:
    source = b"if TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
    assert list(stdlib.imports(source, "")) == ["b"]


def test_parents_come_with_their_children(library: Library, tmp_path: Path) -> None:
    found = library.closure([program(tmp_path, "import email.message")])
    assert {"email", "email.message", "re", "re._parser"} <= set(found)


def test_extensions_are_found_as_files(library: Library, tmp_path: Path) -> None:
    path = library.closure([program(tmp_path, "import json")]).get("_json")
    assert "_json" in sys.builtin_module_names or (path is not None and path.suffix == ".so")


def test_the_start_of_the_interpreter_is_always_covered(library: Library) -> None:
    assert {"encodings", "encodings.utf_8", "io", "os", "posixpath"} <= set(library.closure([]))


def test_what_is_left_out_stays_out_with_all_below_it(library: Library, tmp_path: Path) -> None:
    found = library.closure([program(tmp_path, "import asyncio, ssl, unittest.mock, tkinter.ttk")])
    assert "asyncio" in found
    assert not [name for name in found if name.partition(".")[0] in ("ssl", "_ssl", "unittest", "tkinter")]


def test_everything_that_the_agent_loads_is_there(library: Library) -> None:
    """The agent is imported on the host, by a bare interpreter that says what that took."""
    root = Path(tools.agent_sources()[0]).parent.parent
    text = (
        f"import sys; sys.path.append({str(root)!r})\nimport agentenv.guest.main\n"
        "out = {n: getattr(m, '__file__', None) for n, m in sys.modules.items()}\n"
        "import json; print(json.dumps(out))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", text], capture_output=True, check=True)
    loaded: dict[str, str | None] = json.loads(done.stdout)
    within = Path(sysconfig.get_path("stdlib"))
    needed = {Path(path).stem for path in loaded.values() if path and Path(path).is_relative_to(within)} - {
        "__init__"
    }
    frozen = {"_bootstrap_external", "zipimport"}  # in the interpreter, whatever their file is said to be
    there = {path.stem for path in library.closure(tools.agent_sources()).values()}
    assert needed - frozen - there == set()
