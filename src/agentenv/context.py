"""What work is done for: known to all that is called, and to operations that outlive the call."""

from __future__ import annotations

from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The request of the control plane, empty outside of any."""

SANDBOX_ID: ContextVar[str] = ContextVar("sandbox_id", default="")
"""The sandbox of an operation, empty outside of any."""
