"""The tools drive: a private CPython, the agent and a busybox, as a small read-only filesystem.

It is mounted at `/.agentenv`, and nothing of it relies on the image in which it appears:

    bin/agentenv    the C library's loader, under the name that `ps` then shows
    bin/python3     the interpreter; started by the loader, with `lib` as library path
    bin/busybox
    lib/*.so*       shared libraries
    lib/pythonX.Y   the standard library's part that the agent uses, compiled, and the agent
"""

from __future__ import annotations

import py_compile
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import agentenv
from agentenv.errors import HostFault
from agentenv.guestimage import libraries
from agentenv.guestimage.mounted import MOUNT_POINT
from agentenv.guestimage.stdlib import Library

AGENT_PROGRAM = "agentenv/guest/__main__.pyc"


@dataclass(frozen=True)
class Interpreter:
    """A CPython: its program, its standard library, and its version as X.Y."""

    program: Path
    library: Library
    version: str


def interpreter() -> Interpreter:
    """The one that runs this process. `python3` on the path may be a wrapper script, this is not."""
    program = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    if not program.is_file() or program.read_bytes()[:4] != b"\x7fELF":
        raise HostFault(f"the running interpreter, {program}, is no program that guests could run")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Interpreter(program, Library(Path(sysconfig.get_path("stdlib"))), version)


def agent_sources() -> list[Path]:
    """The files of the agent, sorted, and the package's own first file, which they are imported through."""
    root = Path(agentenv.__file__).parent
    return [root / "__init__.py", *sorted((root / "guest").rglob("*.py"))]


def command(version: str) -> list[str]:
    """How the agent is started as process 1, inside the guest.

    -I and -S leave out everything that an image could bring; utf8 makes text the same in any locale.
    A file rather than `-m`, which imports a dozen modules to find it.
    """
    loader = [f"{MOUNT_POINT}/bin/agentenv", "--argv0", f"{MOUNT_POINT}/bin/python3"]
    loader += ["--library-path", f"{MOUNT_POINT}/lib", f"{MOUNT_POINT}/bin/python3"]
    program = f"{MOUNT_POINT}/lib/python{version}/{AGENT_PROGRAM}"
    return [*loader, "-I", "-S", "-X", "utf8", program, "--init"]


def fill(tree: Path, busybox: Path) -> None:
    """Write the drive's files into an empty directory."""
    python = interpreter()
    sources = agent_sources()
    modules = python.library.closure(sources)
    stdlib = tree / "lib" / f"python{python.version}"
    for name, path in modules.items():
        add_module(stdlib, name, path)
    root = sources[0].parent
    for path in sources:
        compile_to(path, stdlib / "agentenv" / path.relative_to(root), f"agentenv/{path.relative_to(root)}")
    (stdlib / "lib-dynload").mkdir(exist_ok=True)  # the interpreter warns when it is absent
    extensions = [path for path in modules.values() if path.suffix == ".so"]
    needed = libraries.of([python.program, *extensions])
    for name, path in needed.files.items():
        _copy(path, tree / "lib" / name, 0o755)
    _copy(needed.loader, tree / "bin/agentenv", 0o755)
    _copy(python.program, tree / "bin/python3", 0o755)
    _copy(busybox, tree / "bin/busybox", 0o755)


def add_module(stdlib: Path, name: str, path: Path) -> None:
    """Put one module of the standard library into the drive's directory of them."""
    if path.suffix == ".so":
        _copy(path, stdlib / "lib-dynload" / path.name, 0o755)
    else:
        parts = name.split(".") + (["__init__"] if path.name == "__init__.py" else [])
        compile_to(path, stdlib.joinpath(*parts), "/".join(parts) + ".py")


def compile_to(source: Path, target: Path, shown: str) -> None:
    """Compile one module to a file that the interpreter loads without its source.

    `shown` is the path that tracebacks name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    py_compile.compile(
        str(source),
        cfile=str(target.with_suffix(".pyc")),
        dfile=shown,
        doraise=True,
        optimize=0,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _copy(source: Path, target: Path, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)
