"""Which modules of the standard library a set of programs needs, found by reading their imports.

Reading rather than running: what a function imports only when called counts too, and nothing of
the agent runs on the host. What is imported under a computed name is not seen; `ALWAYS` names it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# What the interpreter itself looks for as it starts, or when a program names a codec.
ALWAYS = (
    *("encodings", "encodings.aliases", "encodings.ascii", "encodings.idna", "encodings.latin_1"),
    *("encodings.utf_8", "encodings.utf_8_sig", "codecs", "io", "abc", "os"),
)
# Reached by imports that an agent never executes (interactive help, tests, windows, graphics).
LEFT_OUT = frozenset(
    (
        *("test", "unittest", "doctest", "pdb", "bdb", "cmd", "code", "codeop", "pydoc", "pydoc_data"),
        *(
            "tkinter",
            "turtle",
            "idlelib",
            "lib2to3",
            "distutils",
            "setuptools",
            "ensurepip",
            "venv",
            "curses",
        ),
        *(
            "readline",
            "rlcompleter",
            "sqlite3",
            "xmlrpc",
            "webbrowser",
            "antigravity",
            "this",
            "site",
            "_pyrepl",
        ),
        *("ctypes.macholib", "multiprocessing.dummy", "asyncio.windows_events", "asyncio.windows_utils"),
        *("asyncio.__main__", "sre_compile", "sre_parse", "sre_constants"),
        # The interpreter's own digests do; OpenSSL's libraries are the largest, and slow to load.
        *("ssl", "_ssl", "_hashlib"),
    )
)


_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")


class Library:
    """A standard library: a directory of sources and one of extension modules."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources
        shared = sorted((sources / "lib-dynload").glob("*.so"))
        self._extensions = {path.name.partition(".")[0]: path for path in shared}

    def source(self, name: str) -> Path | None:
        """The file of a pure module or package."""
        base = self.sources.joinpath(*name.split("."))
        for path in (base / "__init__.py", base.with_name(base.name + ".py")):
            if path.is_file():
                return path
        return None

    def extension(self, name: str) -> Path | None:
        """The shared object of an extension module, unless it is built into the interpreter."""
        return self._extensions.get(name)

    def closure(self, programs: Iterable[Path]) -> dict[str, Path]:
        """Module name → file of all that the programs and `ALWAYS` import, directly or not."""
        found: dict[str, Path] = {}
        seen: set[str] = set()
        waiting = [*ALWAYS]
        for program in programs:
            waiting += imports(program.read_bytes(), package="")
        while waiting:
            name = waiting.pop()
            path = None if name in seen or _left_out(name) else self._file(name)
            seen.add(name)
            if path is not None:
                found[name] = path
                waiting += _parents(name)
                if path.suffix == ".py":
                    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
                    waiting += imports(path.read_bytes(), package)
        return dict(sorted(found.items()))

    def _file(self, name: str) -> Path | None:
        if name in sys.builtin_module_names:
            return None
        return self.source(name) or self.extension(name)


def imports(source: bytes, package: str) -> Iterator[str]:
    """Every name that a source file may import; `from a import b` gives both `a` and `a.b`."""
    for node in _executed(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node.module, node.level, package)
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _executed(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement but those below `if TYPE_CHECKING:`, which no interpreter gets to."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        for part in _BLOCKS:
            for inner in getattr(node, part, ()):
                # handlers and cases are no statements, but hold some
                waiting += [inner] if isinstance(inner, ast.stmt) else inner.body


def _absolute(module: str | None, level: int, package: str) -> str:
    if not level:
        return module or ""
    kept = package.split(".")[: len(package.split(".")) - (level - 1)]
    return ".".join([*kept, *([module] if module else [])])


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _left_out(name: str) -> bool:
    return name in LEFT_OUT or any(parent in LEFT_OUT for parent in _parents(name))
