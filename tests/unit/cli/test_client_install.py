"""What an installation without the extra `server` has to work with: the client, and most commands.

macOS is no machine that these tests run on. What they can see is that nothing of the client imports a
module that Python has on Linux alone, nor reads /proc when it is imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentenv.cli.extras import SERVER

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/agentenv"
# What is in Python on Linux and not on macOS, and system calls that are.
LINUX_MODULES = {"spwd", "ossaudiodev"}
LINUX_CALLS = {
    *("pidfd_open", "setns", "unshare", "memfd_create", "sched_setaffinity", "splice", "eventfd"),
    *("sendfile", "posix_fallocate", "process_vm_readv", "pidfd_send_signal", "inotify_init", "epoll"),
}
# Commands that do their work on the host of a node, which is Linux with all packages.
OF_NODES = {"doctor", "node", "pull", "serve", "setup"}
CLIENT = sorted(
    [
        "agentenv",
        *(f"agentenv.client.{each.stem}" for each in (SOURCE / "client").glob("[a-z]*.py")),
        *(
            f"agentenv.cli.{each.stem}"
            for each in (SOURCE / "cli").glob("[a-z]*.py")
            if each.stem not in OF_NODES
        ),
        *(f"agentenv.dockerfile.{each.stem}" for each in (SOURCE / "dockerfile").glob("[a-z]*.py")),
    ]
)
LOAD = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

ABSENT = set(sys.argv[2].split(","))
sys.meta_path.insert(0, Absent())
for name in sys.argv[1].split(","):
    importlib.import_module(name)
import agentenv
assert agentenv.Sandbox and agentenv.AsyncSandbox
print(*(name for name in sys.modules if name.startswith("agentenv.")))
"""


def loaded(modules: list[str]) -> list[str]:
    """Which of our modules come with these, while no package of the extra can be imported."""
    # httpx has idna, and takes h11 for what E2B's client does not use.
    absent = (SERVER | LINUX_MODULES) - {"idna", "h11"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, ",".join(modules), ",".join(absent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_client_and_its_commands_load_without_the_packages_of_a_node() -> None:
    """All at once: which of them needs what it must not is in the error."""
    found = loaded(CLIENT)
    assert "agentenv.client.asynchronous" in found
    calls = {
        f"{name}: {node.attr}"
        for name in found
        for node in ast.walk(ast.parse(_source(name)))
        if isinstance(node, ast.Attribute) and node.attr in LINUX_CALLS
    }
    assert calls == set()


def _source(module: str) -> str:
    path = SOURCE.parent / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@pytest.mark.parametrize("command", ["serve", "setup", "doctor"])
def test_a_command_of_a_node_says_what_to_install(command: str) -> None:
    program = LOAD.partition("for name")[0] + "from agentenv.cli import main\nmain(sys.argv[3:])"
    done = subprocess.run(
        [sys.executable, "-c", program, "", "pydantic", command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 6
    assert done.stderr.startswith("aenv: this needs what a node needs"), done.stderr
    assert "pip install 'agentenv-server[server]'" in done.stderr


def test_a_client_that_knows_no_server_is_told_how_to_know_one(tmp_path: Path) -> None:
    program = LOAD.partition("for name")[0] + "from agentenv.cli import main\nmain(sys.argv[3:])"
    done = subprocess.run(
        [sys.executable, "-c", program, "", "pydantic", "list"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path), "XDG_CONFIG_HOME": str(tmp_path)},
    )
    assert done.returncode == 4
    assert "aenv auth login URL" in done.stderr, done.stderr


def test_a_module_that_no_extra_has_is_a_bug_and_shown_as_one() -> None:
    program = LOAD.partition("for name")[0] + "from agentenv.cli import main\nmain(sys.argv[3:])"
    done = subprocess.run(
        [sys.executable, "-c", program, "", "hashlib", "build", "nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" in done.stderr


def test_the_names_of_the_extra_are_those_that_the_source_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"dnspython": "dns"}
    extra = {_package(each, names) for each in project["optional-dependencies"]["server"]}
    assert extra | {"starlette"} == SERVER  # fastapi has that
    base = {_package(each, names) for each in project["dependencies"]}
    ours = {"agentenv"}
    guests = {"interpreter", "guest", "programs"}  # what runs in guests
    imported = {
        name.partition(".")[0]
        for path in SOURCE.rglob("*.py")
        if not guests & set(path.relative_to(SOURCE).parts)
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imports(node)
    }
    known = imported - ours - set(sys.stdlib_module_names) - {"opentelemetry"}
    assert known <= base | SERVER
    assert base <= known


def _package(requirement: str, names: dict[str, str]) -> str:
    found = re.match(r"[A-Za-z0-9-]+", requirement)
    assert found is not None
    return names.get(found[0], found[0].replace("-", "_"))


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []
