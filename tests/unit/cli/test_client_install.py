"""What an installation without the extra `server` has to work with: the client, and most commands.

macOS is no machine that these tests run on. What they can see is that all of the client is imported by a
Python from which everything was taken that Linux alone has, and uses nothing of that later.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentenv.cli.extras import SERVER

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/agentenv"
# What is in Python on Linux and not on macOS, by its documentation ("Availability").
LINUX_MODULES = {"spwd", "ossaudiodev"}
LINUX_ONLY = {
    "os": {
        *("pidfd_open", "setns", "unshare", "memfd_create", "splice", "eventfd", "eventfd_read", "getrandom"),
        *("sched_setaffinity", "sched_getaffinity", "sched_setscheduler", "posix_fallocate", "posix_fadvise"),
        *("pipe2", "copy_file_range", "getxattr", "setxattr", "listxattr", "removexattr", "fdatasync"),
        *("waitid", "getresuid", "setresuid", "setresgid", "O_TMPFILE", "O_PATH", "O_DIRECT", "O_NOATIME"),
        *("P_PIDFD", "RTLD_DEEPBIND", "CLONE_NEWNS"),
    },
    "select": {"epoll", "EPOLLIN", "EPOLLOUT"},
    "signal": {
        *("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT"),
    },
    "socket": {
        *("AF_NETLINK", "AF_VSOCK", "AF_PACKET", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_PEERCRED"),
        *("SO_BINDTODEVICE", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "SO_DOMAIN", "SO_PROTOCOL"),
    },
    "fcntl": {"F_ADD_SEALS", "F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_OFD_SETLK", "F_NOTIFY"},
    "mmap": {"MAP_POPULATE", "MADV_HUGEPAGE"},
    "resource": {"prlimit"},
    "time": {"CLOCK_BOOTTIME", "CLOCK_TAI"},
}
# Commands that do their work on the host of a node, which is Linux with all packages.
OF_NODES = {"doctor", "node", "pull", "serve", "setup"}
# Of modules that the client shares with a node, which it does not call.
OF_LINUX_HOSTS: set[tuple[str, str]] = set()
CLIENT = sorted(
    [
        "agentenv",
        *(f"agentenv.client.{each.stem}" for each in (SOURCE / "client").glob("[a-z]*.py")),
        *(
            f"agentenv.cli.{each.stem}"
            for each in (SOURCE / "cli").glob("[a-z]*.py")
            if each.stem not in OF_NODES
        ),
        *(f"agentenv.cli.attached.{each.stem}" for each in (SOURCE / "cli/attached").glob("[a-z]*.py")),
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


# Python as it is on macOS, as far as that can be had here: its name, nothing that is Linux's alone, no /proc.
MACOS = """
import importlib, json, os, sys, sysconfig, types

sysconfig.get_config_vars()  # from a file that is named for the platform that it was built on
sys.platform = "darwin"
sys.modules["_scproxy"] = types.ModuleType("_scproxy")
sys.modules["_scproxy"]._get_proxy_settings = sys.modules["_scproxy"]._get_proxies = dict
for name, only in json.loads(sys.argv[3]).items():
    for each in only:
        if hasattr(module := importlib.import_module(name), each):
            delattr(module, each)

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/", "/dev/shm")):
        raise FileNotFoundError(f"there is no {arguments[0]} on macOS")

sys.addaudithook(refuse)
"""


def loaded(modules: list[str], host: str = "") -> list[str]:
    """Which of our modules come with these, while no package of the extra can be imported."""
    # httpx has idna, and takes h11 for what E2B's client does not use.
    absent = (SERVER | LINUX_MODULES) - {"idna", "h11"}
    only = json.dumps({name: sorted(each) for name, each in LINUX_ONLY.items()})
    done = subprocess.run(
        [sys.executable, "-c", host + LOAD, ",".join(modules), ",".join(absent), only],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_client_and_its_commands_load_without_the_packages_of_a_node() -> None:
    """All at once: which of them needs what it must not is in the error."""
    assert "agentenv.client.asynchronous" in loaded(CLIENT)


@pytest.fixture(scope="module")
def on_macos() -> list[str]:
    """Our modules that a Python has loaded which is, as far as it can be made so here, one of macOS."""
    return loaded(CLIENT, MACOS)


def test_the_client_and_its_commands_load_where_only_macos_is(on_macos: list[str]) -> None:
    assert {"agentenv.cli.start", "agentenv.cli.copying", "agentenv.cli.attached.parcel"} <= set(on_macos)


def test_nothing_that_linux_alone_has_is_used_by_the_client(on_macos: list[str]) -> None:
    """Nor a path of its own: what a command does later is not seen by loading it."""
    used = {
        f"{name}: {found}"
        for name in on_macos
        for node in ast.walk(ast.parse(_source(name)))
        if (found := _of_linux(node)) and (name, found) not in OF_LINUX_HOSTS
    }
    assert used == set()


def _of_linux(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}" if node.attr in LINUX_ONLY.get(node.value.id, ()) else None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if node.value.startswith(("/proc/", "/sys/")) else None
    return None


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
