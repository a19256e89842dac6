"""Traces by OpenTelemetry, where its own variables ask for them: a span for each call of the control plane,
below it one for each operation on a sandbox, and below that one for each of its phases.

Spans of operations are made when these are over, of the times that they noted anyway, so nothing is slower
on their way. The packages are an extra (`otel`), imported only here and only then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentenv.context import REQUEST_ID
from agentenv.sandbox.observing import Observer
from agentenv.sandbox.phases import Phases

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FAULT = 500


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the variables of OpenTelemetry's specification ask for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(name) for name in _ENDPOINTS)


def configured() -> Traces | None:
    """Traces, if they are wanted and the packages are there."""
    if not wanted(os.environ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("no traces, although OTEL_* asks for them: %s (pip install agentenv-server[otel])", error)
        return None
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if named else {"service.name": "agentenv"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


class Call:
    """A call of the control plane under way."""

    def __init__(self, span: Span, method: str) -> None:
        self._span = span
        self._method = method

    def answered(self, route: str, status: int) -> None:
        """Note what came of it."""
        from opentelemetry.trace import StatusCode

        self._span.update_name(f"{self._method} {route}")
        self._span.set_attribute("http.route", route)
        self._span.set_attribute("http.response.status_code", status)
        if status >= _FAULT:
            self._span.set_status(StatusCode.ERROR)


class Traces(Observer):
    """Makes spans and has them sent in the background."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("agentenv")

    @contextmanager
    def call(self, method: str, headers: Mapping[str, str]) -> Iterator[Call]:
        """The span of a call, which what it does is below; it is below its client's, if that said so."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        attributes = {"http.request.method": method, "agentenv.request_id": REQUEST_ID.get()}
        with self._tracer.start_as_current_span(
            method, context=extract(headers), kind=SpanKind.SERVER, attributes=attributes
        ) as span:
            yield Call(span, method)

    def finished(self, phases: Phases) -> None:
        from opentelemetry.trace import set_span_in_context

        begun = time.time() - phases.total_s
        attributes = {"agentenv.sandbox": phases.sandbox_id}
        whole = self._tracer.start_span(phases.operation, attributes=attributes, start_time=_ns(begun))
        below = set_span_in_context(whole)
        for phase in phases.ended:
            at = begun + phase.begun_s
            span = self._tracer.start_span(phase.name, context=below, start_time=_ns(at))
            span.end(_ns(at + phase.duration_s))
        whole.end(_ns(begun + phases.total_s))

    async def stop(self) -> None:
        """Send what is left."""
        await asyncio.to_thread(self._provider.shutdown)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
