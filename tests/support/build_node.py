"""A stand-in for a node's build API, as E2B's clients use it: it runs nothing and keeps what it was asked."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.serving import serving

KEY = "e2b_00"
PAGE = 100  # entries of a log in one answer, at most


@dataclass
class Built:
    """A build that was asked for, and how it goes: `status` after the log was given out."""

    name: str
    asked: dict[str, Any]
    body: dict[str, Any] | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    status: str = "ready"
    reason: dict[str, Any] | None = None
    cancelled: bool = False


@dataclass
class BuildApi:
    """What the stand-in knows. `failing` has, for a RUN's text, the message that it fails with; `endless`
    builds do not end."""

    url: str = ""
    failing: dict[str, str] = field(default_factory=dict)
    endless: bool = False
    knows_cancel: bool = True
    files: dict[str, bytes] = field(default_factory=dict)
    builds: dict[str, Built] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)

    def of(self, name: str) -> Built:
        """The build of that name."""
        return next(built for built in self.builds.values() if built.name == name)

    def start(self, build_id: str, body: dict[str, Any]) -> None:
        """Make up the log of a build, a line per step and two for a RUN."""
        built = self.builds[build_id]
        built.body = body
        built.log.append(_entry("pulled", "base"))
        for number, step in enumerate(body["steps"], 1):
            built.log.append(_entry(f"{step['type']} {step['args'][0]}", str(number)))
            if step["type"] == "RUN":
                built.log.append(_entry("hidden", str(number), "debug"))
            message = self.failing.get(step["args"][0])
            if message is not None:
                built.status, built.reason = "error", {"message": message, "step": str(number)}
                break
        else:
            built.log.append(_entry("done", "finalize"))
        if self.endless:
            built.status = "building"
        self.started.set()


def _entry(message: str, step: str, level: str = "info") -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00Z", "message": message, "level": level, "step": step}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: BuildApi

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        match [unquote(part) for part in path.path.split("/")[1:]]:
            case ["templates", _, "files", digest]:
                # the link is unlike the API's own address in path, and has a header of its own
                url = f"{self.api.url}/upload/{digest}?token=t"
                self._answer(
                    201, {"present": digest in self.api.files, "url": url, "headers": {"X-Signed": "s"}}
                )
            case ["templates", template_id, "builds", build_id, "status"]:
                built = self.api.builds[build_id]
                offset = int(parse_qs(path.query)["logsOffset"][0])
                page = built.log[offset : offset + PAGE]
                answer = {"templateID": template_id, "buildID": build_id, "status": built.status}
                reason = {"reason": built.reason} if built.reason else {}
                self._answer(200, {**answer, **reason, "logs": [], "logEntries": page})
            case _:
                self._missing()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("X-API-KEY") != KEY:
            self._answer(401, {"code": 401, "message": "unknown key"})
            return
        match [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]:
            case ["v3", "templates"]:
                build_id = str(uuid.uuid4())
                self.api.builds[build_id] = Built(body["name"], body)
                template_id = f"tpl{len(self.api.builds)}"
                self._answer(202, {"templateID": template_id, "buildID": build_id, "names": [body["name"]]})
            case ["v2", "templates", _, "builds", build_id]:
                self.api.start(build_id, body)
                self._answer(202, None)
            case _:
                self._missing()

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path)
        assert path.query == "token=t"
        assert self.headers["X-Signed"] == "s"
        self.api.files[path.path.rpartition("/")[2]] = data
        self._answer(200, None)

    def do_DELETE(self) -> None:
        match [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]:
            case ["templates", _, "builds", build_id] if self.api.knows_cancel:
                self.api.builds[build_id].cancelled = True
                self._answer(204, None)
            case ["templates", template_id]:
                self.api.deleted.append(template_id)
                self._answer(204, None)
            case _:
                self._answer(405, {"code": 405, "message": "no such method"})

    def _missing(self) -> None:
        self._answer(404, {"code": 404, "message": f"no such route: {self.path}"})

    def _answer(self, status: int, body: object) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def build_api() -> Iterator[BuildApi]:
    """The stand-in on loopback, for the time of the block."""
    api = BuildApi()
    handler = type("Handler", (_Handler,), {"api": api})
    with serving(handler) as port:
        api.url = f"http://127.0.0.1:{port}"
        yield api


def digest_of(data: bytes) -> str:
    """The SHA-256 of what a gzip stream holds, as hexadecimal digits."""
    return hashlib.sha256(gzip.decompress(data)).hexdigest()
