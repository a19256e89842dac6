"""Many sandboxes one after the other: nothing is left of any."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from e2b import Sandbox

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

CYCLES = 100 if os.environ.get("AENV_TEST_SOAK") else 5


@pytest.mark.timeout(300 if CYCLES == 5 else 3600)
def test_created_used_and_killed_in_a_row(sandbox_factory: Callable[..., Sandbox]) -> None:
    seen = set()
    for number in range(CYCLES):
        sandbox = sandbox_factory()
        assert sandbox.commands.run(f"echo {number}").stdout == f"{number}\n"
        assert sandbox.kill() is True
        seen.add(sandbox.sandbox_id)
    assert len(seen) == CYCLES
