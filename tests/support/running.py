"""A real node in a process of its own, as `aenv serve` runs it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from e2b import Sandbox

START_LIMIT_S = 120.0


class RunningNode:
    """Started at once; `stop` and `kill` end it, `start` starts it again on the same data.

    `program` is what the interpreter is given in the place of `aenv`.
    """

    def __init__(
        self,
        home: Path,
        runtime: Path,
        log: Path,
        *,
        program: Sequence[str] = ("-m", "agentenv"),
        **settings: str,
    ) -> None:
        self.home, self.runtime, self.log = home, runtime, log
        self._program = program
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """The environment that points `aenv` at this node's directories."""
        given = {f"AENV_{name.upper()}": value for name, value in self._settings.items()}
        return {**os.environ, "AENV_HOME": str(self.home), "AENV_RUNTIME": str(self.runtime), **given}

    @property
    def client_environment(self) -> dict[str, str]:
        """The environment that points E2B's clients at this node."""
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.key}

    @property
    def key(self) -> str:
        return (self.home / "api-key").read_text().strip()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> httpx.Client:
        """Plain HTTP with the key."""
        return httpx.Client(
            base_url=self.url,
            headers={"X-API-KEY": self.key},
            timeout=120,
            trust_env=False,
            verify=False,  # there is no TLS, and reading certificates takes 50 ms
        )

    def sandbox(self, template: str, **more: Any) -> Sandbox:
        """A new sandbox of this node, through E2B's client; the caller kills it. `more` is what else its
        `create` takes."""
        return Sandbox.create(
            template,
            timeout=300,
            request_timeout=120,
            api_url=self.url,
            sandbox_url=self.url,
            api_key=self.key,
            **more,
        )

    def build(self, name: str, made_of: dict[str, Any], **asked: Any) -> None:
        """Build a template with E2B's calls, which succeeds."""
        with self.client() as client:
            opened = client.post("/v3/templates", json={"name": name, **asked}).raise_for_status().json()
            build = f"templates/{opened['templateID']}/builds/{opened['buildID']}"
            client.post(f"/v2/{build}", json=made_of).raise_for_status()
            while (seen := client.get(f"/{build}/status").json())["status"] in ("waiting", "building"):
                time.sleep(0.2)  # the interface has no way of waiting
        assert seen["status"] == "ready", seen

    def start(self) -> None:
        """Start and return when it serves; a failure shows the log's end."""
        ready, theirs = os.pipe()
        port = self.url.rpartition(":")[2] or "0"  # the same port again after a restart
        with self.log.open("ab") as log, os.fdopen(ready, "rb") as pipe:
            self._process = subprocess.Popen(
                [sys.executable, *self._program, "serve", "--port", port, "--ready-fd", str(theirs)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(theirs,),
            )
            os.close(theirs)
            answered = select.select([pipe], [], [], START_LIMIT_S)[0]
            url = pipe.readline().decode().strip() if answered else ""
        if not url:
            self.kill()
            raise AssertionError(f"the node did not serve:\n{self.log.read_text()[-3000:]}")
        self.url = url

    def stop(self) -> None:
        """SIGTERM: the node ends, its sandboxes go on."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up."""
        self._end(signal.SIGKILL)

    def died(self) -> int:
        """Wait until it has ended by itself; returns its status, less than 0 for a signal's number."""
        assert self._process is not None
        status = self._process.wait(60)
        self._process = None
        return status

    def close(self) -> None:
        """Pause all sandboxes and end the node, as `aenv node stop` does."""
        if self._process is None:
            return
        subprocess.run(
            [sys.executable, "-m", "agentenv", "node", "stop"],
            env=self.environment,
            check=True,
            timeout=120,
            capture_output=True,
        )
        self._process.wait(60)
        self._process = None

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            self._process = None
