"""A real registry on loopback (Debian's docker-registry), and a server before it that makes trouble.

Images are pushed over the registry's own protocol, so a test decides about every byte.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from support.archives import Layout

PROGRAM = "docker-registry"
USER, PASSWORD = "someone", "s3cret-Pass"
# as `htpasswd -nbB` writes it, with the least rounds
HTPASSWD = "someone:$2b$04$abcdefghijklmnopqrstuuHLbglnOOgd5a7UI4bLviJxHmYqSC39G\n"
_START_LIMIT_S = 20.0


class Registry:
    """A docker-registry process with data of its own, on a free port; with `users`, it wants basic auth."""

    def __init__(self, directory: Path, *, users: bool = False) -> None:
        directory.mkdir(parents=True)
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.users = users
        if shutil.which(PROGRAM) is None:
            raise RuntimeError(f"there is no {PROGRAM}: run scripts/test, which installs it")
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [PROGRAM, "serve", str(self._configuration(directory))],
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )
        self.pid = self._process.pid
        self._await_answer(directory)

    def _configuration(self, directory: Path) -> Path:
        settings: dict[str, Any] = {
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(directory / "data")}},
            "http": {"addr": self.host},
        }
        if self.users:
            (directory / "htpasswd").write_text(HTPASSWD)
            settings["auth"] = {"htpasswd": {"realm": "here", "path": str(directory / "htpasswd")}}
        path = directory / "config.yml"
        path.write_text(json.dumps(settings))  # JSON is YAML
        return path

    def _await_answer(self, directory: Path) -> None:
        end = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except ConnectionRefusedError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.02)
        raise RuntimeError(f"{PROGRAM} did not start: {(directory / 'log').read_text()}")

    def push(self, layout: Layout, entry: dict[str, Any], repository: str, tag: str | None = "latest") -> str:
        """Push the manifest or index of a layout with all below it; returns the image's name."""
        with httpx.Client(
            base_url=f"http://{self.host}/v2/{repository}/",
            auth=(USER, PASSWORD) if self.users else None,
            trust_env=False,
        ) as client:
            self._push(client, layout, entry, tag or entry["digest"])
        return f"{self.host}/{repository}" + (f":{tag}" if tag else f"@{entry['digest']}")

    def _push(self, client: httpx.Client, layout: Layout, entry: dict[str, Any], name: str) -> None:
        document = json.loads(layout.read(entry))
        for child in document.get("manifests", ()):
            self._push(client, layout, child, child["digest"])
        for blob in [*([document["config"]] if "config" in document else []), *document.get("layers", ())]:
            begun = client.post("blobs/uploads/").raise_for_status()
            where = httpx.URL(begun.headers["location"]).copy_add_param("digest", blob["digest"])
            client.put(where, content=layout.read(blob)).raise_for_status()
        headers = {"Content-Type": entry["mediaType"]}
        client.put(f"manifests/{name}", content=layout.read(entry), headers=headers).raise_for_status()

    def close(self) -> None:
        """End it; its data stay."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()


def free_port() -> int:
    """A TCP port of loopback that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Asked:
    """A request that came: `nth` counts those of the same method and path, from 1."""

    method: str
    path: str
    headers: dict[str, str]
    nth: int
    body: bytes = b""

    @property
    def is_blob(self) -> bool:
        return "/blobs/" in self.path

    @property
    def is_manifest(self) -> bool:
        return "/manifests/" in self.path


@dataclass
class Answer:
    """What a rule answers with, instead of the registry."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Spoil:
    """What a rule does to the registry's answer: its bytes changed, and the connection cut after so many."""

    change: Callable[[bytes], bytes] = bytes
    cut: int | None = None
    drop_headers: tuple[str, ...] = ()


Rule = Callable[[Asked], Answer | Spoil | None]


class Front:
    """A server before a registry. The first rule that answers decides; else the registry does."""

    def __init__(
        self, registry: Registry | None = None, *rules: Rule, tls: ssl.SSLContext | None = None
    ) -> None:
        self.rules = list(rules)
        self.asked: list[Asked] = []
        self._registry = registry
        self._lock = threading.Lock()
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                front.serve(self)

            do_POST = do_HEAD = do_GET

            def log_message(self, format: str, *values: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def count(self, part: str) -> int:
        """Requests whose path has `part`."""
        return sum(part in each.path for each in self.asked)

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): ", ".join(handler.headers.get_all(name, [])) for name in handler.headers}
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        with self._lock:
            nth = 1 + sum((each.method, each.path) == (handler.command, handler.path) for each in self.asked)
            asked = Asked(handler.command, handler.path, headers, nth, body)
            self.asked.append(asked)
        decided = next((answer for rule in self.rules if (answer := rule(asked)) is not None), None)
        if isinstance(decided, Answer):
            self._send(handler, decided.status, decided.headers, decided.body, None)
        else:
            self._pass_on(handler, asked, decided or Spoil())

    def _pass_on(self, handler: BaseHTTPRequestHandler, asked: Asked, spoil: Spoil) -> None:
        assert self._registry is not None
        kept = ("accept", "range", "authorization")
        connection = http.client.HTTPConnection("127.0.0.1", self._registry.port, timeout=30)
        try:
            headers = {name: value for name, value in asked.headers.items() if name in kept}
            if not self._registry.users:
                headers.pop("authorization", None)
            connection.request(asked.method, asked.path, headers=headers)
            answer = connection.getresponse()
            data = spoil.change(answer.read())
            passed = {name: value for name, value in answer.getheaders() if name.lower() != "content-length"}
            for name in spoil.drop_headers:
                passed.pop(name, None)
            self._send(handler, answer.status, passed, data, spoil.cut)
        finally:
            connection.close()

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes,
        cut: int | None,
    ) -> None:
        try:
            handler.send_response_only(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body[:cut] if cut is not None else body)
            handler.wfile.flush()
        except ConnectionError:
            pass
        if cut is not None:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Tokens:
    """A rule: pulling needs a bearer token, got at /token, for `users` if there are any, else for anybody."""

    TOKEN = "a-token.of-the_server"

    def __init__(self, users: dict[str, str] | None = None, *, lifetime: int | None = None) -> None:
        self.users = users
        self.lifetime = lifetime  # requests that a token is good for
        self.given: list[dict[str, list[str]]] = []
        self._left = 0

    def __call__(self, asked: Asked) -> Answer | None:
        path = urlsplit(asked.path)
        if path.path == "/token":
            return self._token(asked, parse_qs(path.query or asked.body.decode()))
        if asked.headers.get("authorization") == f"Bearer {self.TOKEN}" and self._left > 0:
            self._left -= self.lifetime is not None
            return None
        realm = f"http://{asked.headers['host']}/token"
        wanted = f'Bearer realm="{realm}",service="tests",scope="repository:{_repository(path.path)}:pull"'
        return Answer(401, {"WWW-Authenticate": wanted, "Content-Type": "application/json"}, b"{}")

    def _token(self, asked: Asked, query: dict[str, list[str]]) -> Answer:
        self.given.append(query)
        if self.users is not None and not self._known(asked, query):
            return Answer(401, {"Content-Type": "application/json"}, b'{"details": "incorrect password"}')
        self._left = self.lifetime or 1
        return Answer(200, {"Content-Type": "application/json"}, json.dumps({"token": self.TOKEN}).encode())

    def _known(self, asked: Asked, query: dict[str, list[str]]) -> bool:
        assert self.users is not None
        if query.get("grant_type") == ["refresh_token"]:
            return query["refresh_token"][0] in self.users.values()
        return any(
            asked.headers.get("authorization") == basic(name, password)
            for name, password in self.users.items()
        )


def basic(name: str, password: str) -> str:
    """The value of an Authorization header."""
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def _repository(path: str) -> str:
    return path.removeprefix("/v2/").rpartition("/")[0].rpartition("/")[0]


def docker_config(directory: Path, document: dict[str, Any]) -> Path:
    """A directory as `docker login` makes it."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def credential_helper(directory: Path, name: str, script: str) -> None:
    """A program `docker-credential-NAME` in a directory that must be on the path."""
    directory.mkdir(exist_ok=True)
    path = directory / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(path, 0o755)


@contextmanager
def fronts(registry: Registry) -> Iterator[Callable[..., Front]]:
    """Starts servers before a registry, all of which are closed at the end."""
    made: list[Front] = []

    def start(*rules: Rule) -> Front:
        made.append(Front(registry, *rules))
        return made[-1]

    yield start
    for each in made:
        each.close()
