"""The environment variables that a sandbox was created with, as its agent tells them.

Kernels start before there is a sandbox: their template's snapshot has them running. So the variables are
asked for when code runs, once per sandbox.
"""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from pathlib import Path

log = logging.getLogger(__name__)

AGENT_URL = "http://127.0.0.1:49983/envs"
# Holds the sandbox's id, so that it differs in every sandbox and fork that a snapshot becomes.
IDENTITY = Path("/run/e2b/.E2B_SANDBOX_ID")
LIMIT_S = 5.0


class Environment:
    """Asks the agent, and remembers for as long as this is the same sandbox."""

    def __init__(self, url: str = AGENT_URL, identity: Path = IDENTITY) -> None:
        self._url, self._identity = url, identity
        self._known: tuple[str, str | None, dict[str, str]] | None = None

    async def variables(self, token: str | None) -> dict[str, str]:
        """The variables; empty where no agent answers. `token` is the sandbox's access token."""
        identity = self._read_identity()
        if self._known is None or self._known[:2] != (identity, token):
            found = await asyncio.to_thread(self._ask, token)
            if found is None:
                return {}
            self._known = identity, token, found
        return dict(self._known[2])

    def _read_identity(self) -> str:
        try:
            return self._identity.read_text()
        except OSError:
            return ""

    def _ask(self, token: str | None) -> dict[str, str] | None:
        asked = urllib.request.Request(self._url, headers={"X-Access-Token": token} if token else {})
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                asked, timeout=LIMIT_S
            ) as answer:
                told = json.load(answer)
        except (OSError, ValueError) as error:
            log.warning("the agent does not tell the environment: %s", error)
            return None
        return {str(name): str(value) for name, value in told.items()}
