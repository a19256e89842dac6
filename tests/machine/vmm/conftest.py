"""Settings of a hypervisor without a node, for small machines, and the audit of what they leave."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import audit
from agentenv.config import Settings
from agentenv.vmm.machine import Nic
from support import small_guest


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """A data directory below one that machines' users cannot traverse."""
    tmp_path.chmod(0o700)
    made = Settings(home=tmp_path / "home", runtime=Path(f"/run/aenv-t-vmm-{os.getpid()}"))
    yield made
    small_guest.close_databases()
    asyncio.run(small_guest.reap(made))  # what a failed test left, after the audit has told of it
    shutil.rmtree(made.runtime_dir, ignore_errors=True)


@pytest.fixture
def audit_scope(settings: Settings) -> audit.Scope:
    return audit.Scope.of(settings)


@pytest.fixture
def nic(host_audit: None) -> Iterator[Nic]:
    with small_guest.tap_namespace(f"vmmtest{os.getpid()}") as made:
        yield made
