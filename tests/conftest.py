"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

import audit
from agentenv import config

pytest_plugins = ["support.fixtures"]

# No test fails for being slow: machines are shared.
hypothesis.settings.register_profile(
    "shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared")

# Time for the kernel, and for a node's work in the background, to let go of what a test used.
_SETTLE_LIMIT_S = 15.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the long ones out, unless `scripts/test --soak` asks for them."""
    if os.environ.get("AENV_TEST_SOAK"):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="long; scripts/test --soak runs it"))


@pytest.fixture
def audit_scope() -> audit.Scope:
    """Whose things `host_audit` looks at: the nodes that tests start. Override it for other ones."""
    nodes = config.load().home / "test-nodes" / str(os.getpid())
    return audit.Scope((nodes,), (f"/run/aenv-t-{os.getpid()}-*",))


@pytest.fixture
def host_audit(audit_scope: audit.Scope) -> Iterator[None]:
    """After the test, the host has the machines, links, files and records that it had before.

    What a test uses must be released before this ends: let other fixtures depend on it, or name it
    first.
    """
    before = audit.snapshot(audit_scope)
    yield
    remaining = audit.settle(before, audit_scope, _SETTLE_LIMIT_S)
    if remaining:
        pytest.fail(
            "the host is not as it was (+ is new, - is gone):\n" + "\n".join(remaining), pytrace=False
        )
