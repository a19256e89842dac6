"""The node of tests that ask nothing special of it; others have one of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.sandbox_parts import MemoryNode, prepared


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[MemoryNode]:
    async with prepared(tmp_path) as node:
        yield node
