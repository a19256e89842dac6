"""The API against its own description: generated requests, valid and not, to parts in memory.

No answer is a failure of the server's, and each is as the description says. AENV_FUZZ_EXAMPLES, a number of
requests for each operation, makes it longer, and different each time.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.types import ASGIApp

from agentenv.api.app import create_app
from agentenv.observe.observation import Observation
from agentenv.sandbox.observing import Running
from support.app_on_thread import served
from support.building_parts import Workplace

KEY = "e2b_0123456789abcdef"
EXAMPLES = int(os.environ.get("AENV_FUZZ_EXAMPLES", "0"))
ENDLESS = ("/events",)
MEANT = (501, 503)  # what is not part of this version; no room
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


async def said(running: Running) -> Mapping[str, object]:
    return {}


@asynccontextmanager
async def app_in(home: Path) -> AsyncIterator[ASGIApp]:
    place = Workplace(home)
    node = place.node
    await place.start()
    await node.prepare()
    observation = Observation(node.service, ask=said)
    yield create_app(
        node.service,
        node.templates,
        node.settings,
        keys=node.keys(KEY),
        port=8000,
        builder=place.builder,
        observation=observation,
    )
    await place.builder.stop()
    await node.service.stop()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    with served(lambda: app_in(home)) as url:
        yield url


def test_every_answer_is_as_described(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=schemathesis.Config())
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    faults = [
        fault
        for operation in operations
        if operation.path not in ENDLESS
        for mode in modes_of(operation)
        if (fault := fault_of(operation, mode, url))
    ]
    assert len(operations) > 30
    assert not faults, "\n\n".join(faults)


def modes_of(operation: APIOperation[Any, Any, Any, Any]) -> list[GenerationMode]:
    """Requests that are right, and those that are not where there is something to be wrong."""
    more = [*operation.body, *operation.query, *operation.headers]
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if more else [])]


def fault_of(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, url: str) -> str | None:
    """What is wrong with an answer to generated requests, if anything."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES or 6,
        derandomize=not EXAMPLES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case[Any]) -> None:
        if mode is GenerationMode.POSITIVE and "sandbox_id" in case.path_parameters:
            case.path_parameters["sandbox_id"] = a_sandbox(url)
        answer = case.call_and_validate(headers={"X-API-KEY": KEY}, checks=CHECKS)
        assert answer.status_code < 500 or answer.status_code in MEANT, answer.text

    try:
        ask()
    except Unsatisfiable:
        pass  # there is nothing that could be wrong in such a request
    except (FailureGroup, Failure, AssertionError) as failure:
        return f"{operation.label}: {failure}"
    return None


def a_sandbox(url: str) -> str:
    """One that exists."""
    with httpx.Client(base_url=url, headers={"X-API-KEY": KEY}, trust_env=False) as client:
        there: list[dict[str, str]] = client.get("/v2/sandboxes").json()
        if there:
            return there[0]["sandboxID"]
        made: str = (
            client.post("/sandboxes", json={"templateID": "base"}).raise_for_status().json()["sandboxID"]
        )
        return made
