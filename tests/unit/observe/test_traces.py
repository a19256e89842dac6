"""Traces, as a real receiver of OTLP on loopback gets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentenv.api.app import create_app
from agentenv.observe import traces
from agentenv.observe.observation import Observation
from support.sandbox_parts import prepared

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KEY = "e2b_0123456789abcdef"
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Receiver(ThreadingHTTPServer):
    """Takes spans."""

    def __init__(self) -> None:
        self.resources: list[dict[str, str]] = []
        self.spans: list[Any] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: each.value.string_value for each in group.resource.attributes}
            self.resources.append(named)
            self.spans += [span for scope in group.scope_spans for span in scope.spans]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.server.take(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


async def test_calls_operations_and_phases_are_one_tree(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server_port}")
    async with prepared(tmp_path) as node:
        observation = Observation(node.service)
        app = create_app(
            node.service,
            node.templates,
            node.settings,
            keys=node.keys(KEY),
            port=0,
            observation=observation,
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = {"X-API-KEY": KEY, "traceparent": CLIENT, "X-Request-Id": "r-1"}
        async with httpx.AsyncClient(transport=transport, base_url="http://a", headers=headers) as client:
            created = await client.post("/v2/sandboxes", json={"templateID": "base"})
            await client.get("/sandboxes/inone")
        await observation.stop()
    spans = {span.name: span for span in receiver.spans}
    call, operation, phase = spans["POST /v2/sandboxes"], spans["create"], spans["restore"]
    assert call.trace_id.hex() == operation.trace_id.hex() == phase.trace_id.hex() == CLIENT[3:35]
    assert call.parent_span_id.hex() == CLIENT[36:52]
    assert operation.parent_span_id == call.span_id
    assert phase.parent_span_id == operation.span_id
    assert attributes(call)["http.response.status_code"] == 201
    assert attributes(call)["agentenv.request_id"] == "r-1"
    assert attributes(operation)["agentenv.sandbox"] == created.json()["sandboxID"]
    assert operation.start_time_unix_nano <= phase.start_time_unix_nano
    assert phase.end_time_unix_nano <= operation.end_time_unix_nano
    assert attributes(spans["GET /sandboxes/{sandbox_id}"])["http.response.status_code"] == 404
    assert {each["service.name"] for each in receiver.resources} == {"agentenv"}


async def test_a_receiver_that_is_away_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with prepared(tmp_path) as node:
        observation = Observation(node.service)
        assert observation.traces is not None
        with observation.traces.call("GET", {}) as call:
            call.answered("/health", 503)
        await asyncio.wait_for(observation.stop(), 20)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_variables_of_the_specification_decide(environment: dict[str, str], wanted: bool) -> None:
    assert traces.wanted(environment) is wanted
