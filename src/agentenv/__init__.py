"""AgentENV in Python: microVM sandboxes for agentic reinforcement learning.

`agentenv.Sandbox` and `agentenv.AsyncSandbox` are the client (see `agentenv.client`). They are loaded when
they are first used, so that the node and the command line do not pay for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.client.asynchronous import AsyncSandbox
    from agentenv.client.sync import Sandbox
    from agentenv.limits import DiskLimits, Limits, NetworkLimits

__version__ = "0.1.0"
__all__ = ["AsyncSandbox", "DiskLimits", "Limits", "NetworkLimits", "Sandbox", "__version__"]

_LAZY = {
    "AsyncSandbox": "agentenv.client.asynchronous",
    "DiskLimits": "agentenv.limits",
    "Limits": "agentenv.limits",
    "NetworkLimits": "agentenv.limits",
    "Sandbox": "agentenv.client.sync",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
