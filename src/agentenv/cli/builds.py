"""The build API as a client calls it: ask for a template, bring up files, start the build, look at it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal, cast
from urllib.parse import quote

from agentenv.cli.api import send
from agentenv.cli.meter import TransferMeter
from agentenv.dockerfile.bundle import Bundle
from agentenv.errors import AenvError, Conflict, HostFault, NotFound, NotImplementedYet
from agentenv.progress import Counted

UPLOAD_LIMIT_S = 3600.0

Status = Literal["waiting", "building", "ready", "error"]


@dataclass(frozen=True)
class Build:
    """A build of a template, by their ids."""

    template_id: str
    build_id: str


@dataclass(frozen=True)
class Line:
    """A line of a build's log. `step` is its place among the steps from 1, or "base" or "finalize"."""

    message: str
    level: str
    step: str | None


@dataclass(frozen=True)
class Seen:
    """How a build stands, with the lines of its log that came since it was last looked at."""

    status: Status
    lines: tuple[Line, ...]
    reason: str | None = None
    step: str | None = None


class BuildNode:
    """A node that builds templates, by its URL and key."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url, self._key = url.rstrip("/"), api_key

    def create(self, name: str, cpus: int | None, memory_mib: int | None) -> Build:
        """Ask for a template of that NAME or NAME:TAG, and a build of it, which waits."""
        asked = {"name": name, "cpuCount": cpus, "memoryMB": memory_mib}
        answer = self._call(
            "POST", "/v3/templates", {key: value for key, value in asked.items() if value is not None}
        )
        return Build(answer["templateID"], answer["buildID"])

    def upload(self, build: Build, bundle: Bundle, digest: str, *, quiet: bool = False) -> int:
        """Bring up the files of a COPY unless the node has them; returns how many bytes were sent."""
        link = self._call("GET", f"/templates/{quote(build.template_id, safe='')}/files/{digest}")
        if link.get("present") or not link.get("url"):
            return 0
        with tempfile.TemporaryFile() as packed:  # its length goes ahead of it
            bundle.pack(packed, digest)
            size = packed.tell()
            packed.seek(0)
            given = (link.get("headers") or {}).items()
            headers = {key: value for key, value in given if key.lower() != "content-length"}
            headers["Content-Length"] = str(size)
            with TransferMeter(quiet=quiet) as meter:
                meter.total(1, size)
                content = cast("IO[bytes]", Counted(packed, meter.add))
                answer = send("PUT", link["url"], headers=headers, body=content, limit_s=UPLOAD_LIMIT_S)
        if answer.status >= 300:
            raise answer.fault("uploading files")
        return size

    def start(self, build: Build, body: Mapping[str, Any]) -> None:
        """Let the build begin."""
        self._call("POST", _path("/v2/templates/{}/builds/{}", build.template_id, build.build_id), body)

    def look(self, build: Build, offset: int) -> Seen:
        """How it stands, with its log from the `offset`-th line on."""
        path = _path("/templates/{}/builds/{}/status", build.template_id, build.build_id)
        answer = self._call("GET", f"{path}?logsOffset={offset}")
        reason = answer.get("reason") or {}
        lines = tuple(
            Line(each.get("message", ""), each.get("level", "info"), each.get("step"))
            for each in answer.get("logEntries") or ()
        )
        return Seen(answer["status"], lines, reason.get("message"), reason.get("step"))

    def cancel(self, build: Build) -> bool:
        """Ask that the build end; False where the node cannot, or it has ended."""
        try:
            self._call("DELETE", _path("/templates/{}/builds/{}", build.template_id, build.build_id))
        except (Conflict, NotFound, NotImplementedYet, HostFault):  # HostFault: 405, it has no such call
            return False
        return True

    def delete(self, template_id: str) -> AenvError | None:
        """Delete a template that nobody asked for by name; what stands against it is returned."""
        try:
            self._call("DELETE", _path("/templates/{}", template_id))
        except AenvError as error:
            return error
        return None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"X-API-KEY": self._key}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        answer = send(method, self._url + path, headers=headers, body=data)
        if answer.status >= 300:
            raise answer.fault(f"{method} {path}")
        return answer.json()


def _path(form: str, *parts: str) -> str:
    return form.format(*(quote(part, safe="") for part in parts))
