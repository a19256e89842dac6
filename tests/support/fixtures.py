"""Fixtures for tests against a real node; one node and one sandbox serve a whole run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from agentenv.config import Settings
from agentenv.records.ledger import Ledger
from agentenv.vmm.qemu.hypervisor import Qemu
from support import npm, small_guest
from support.home import linked_home, prepared_home, unmount_below
from support.running import RunningNode

LOGS = Path(__file__).parents[2] / "test-logs"


@pytest.fixture(scope="session")
def node_directory() -> Iterator[Path]:
    """A directory on the prepared home's filesystem, for data that costs links."""
    runs = prepared_home() / "test-nodes"
    runs.mkdir(exist_ok=True)
    for old in runs.iterdir():  # of runs that were broken off
        if not Path(f"/proc/{old.name}").exists():
            unmount_below(old)
            shutil.rmtree(old, ignore_errors=True)  # another worker may be at it
    directory = runs / str(os.getpid())
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def node_factory(node_directory: Path) -> Iterator[Callable[..., RunningNode]]:
    """Starts nodes by name, each with data of its own, and ends those that still run."""
    started: list[RunningNode] = []

    def factory(name: str, *, home: Path | None = None, **given: Any) -> RunningNode:
        LOGS.mkdir(exist_ok=True)
        # What is held ready comes and goes under the audit.
        quiet = {"pool_most": "0", "slots_least": "0", "slots_most": "0", "pressure": "off"}
        settings = {**quiet, **given}
        home = home or linked_home(node_directory / name)
        node = RunningNode(home, Path(f"/run/aenv-t-{os.getpid()}-{name}"), LOGS / f"{name}.log", **settings)
        started.append(node)
        return node

    yield factory
    with ThreadPoolExecutor(4) as closing:
        list(closing.map(RunningNode.close, started))


@pytest.fixture(scope="session")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    """The node that most tests share."""
    return node_factory("shared")


@pytest.fixture(scope="session")
def e2b_environment(node: RunningNode) -> Iterator[None]:
    """E2B's clients in this process use the shared node."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in node.client_environment.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def shared_sandbox(e2b_environment: None) -> Iterator[Sandbox]:
    sandbox = Sandbox.create("base", timeout=3600, request_timeout=120)
    yield sandbox
    sandbox.kill()


@pytest.fixture
def sandbox(shared_sandbox: Sandbox) -> Sandbox:
    """A sandbox that tests share: leave it as it was."""
    return shared_sandbox


@pytest.fixture
def sandbox_factory(e2b_environment: None) -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes of the template `base` and kills them at the end of the test."""
    made: list[Sandbox] = []

    def factory(**given: Any) -> Sandbox:
        made.append(Sandbox.create("base", **{"timeout": 300, "request_timeout": 120, **given}))
        return made[-1]

    yield factory
    for sandbox in made:
        sandbox.kill()


@pytest.fixture(scope="session")
def npm_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the newest `e2b` from npm."""
    return npm.install(tmp_path_factory.mktemp("npm"), "e2b")


@pytest.fixture
def qemu_and_ledger(settings: Settings, host_audit: None) -> tuple[Qemu, Ledger]:
    """A hypervisor without a node, on the data directory of the `settings` that a module has."""
    return small_guest.small_qemu(settings)


@pytest.fixture
def qemu(qemu_and_ledger: tuple[Qemu, Ledger]) -> Qemu:
    return qemu_and_ledger[0]


@pytest.fixture
def ledger(qemu_and_ledger: tuple[Qemu, Ledger]) -> Ledger:
    return qemu_and_ledger[1]
