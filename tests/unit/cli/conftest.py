"""Commands that ask a server, against the API with parts in memory behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import click.testing
import pytest
from starlette.types import ASGIApp

from agentenv.api.app import create_app
from agentenv.cli import cli
from agentenv.errors import AenvError
from agentenv.observe.observation import Observation
from agentenv.sandbox.observing import Running
from support.app_on_thread import served
from support.building_parts import Workplace
from support.served_commands import KEY, Aenv, Said


async def figures(running: Running) -> Mapping[str, object]:
    return {"mem_used": 1 << 20, "mem_total": 2 << 20, "disk_used": 3 << 20, "disk_total": 4 << 20}


@asynccontextmanager
async def app_in(home: Path) -> AsyncIterator[ASGIApp]:
    place = Workplace(home)
    await place.start()
    await place.node.prepare()
    node = place.node
    keys = node.keys(KEY)
    node.service._core.quota_of = keys.quota_of
    observation = Observation(node.service, ask=figures)
    yield create_app(
        node.service,
        node.templates,
        node.settings,
        keys=keys,
        port=8000,
        builder=place.builder,
        observation=observation,
    )
    observation.events.close()
    await place.builder.stop()
    await node.service.stop()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    home = tmp_path / "home"
    home.mkdir()
    with served(lambda: app_in(home)) as url:
        yield url


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Aenv:
    """Commands of a user who has said nothing of servers yet."""
    for name in ("E2B_API_URL", "E2B_API_KEY", "AENV_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "nothing"))

    def run(*arguments: str, given: str | None = None) -> Said:
        done = click.testing.CliRunner().invoke(cli, list(arguments), input=given)
        said = Said(done.stdout)
        said.told = done.stderr
        said.error = done.exception if isinstance(done.exception, AenvError) else None
        said.code = said.error.exit_code if said.error is not None else done.exit_code
        if done.exception is not None and not isinstance(done.exception, AenvError | SystemExit):
            raise done.exception
        return said

    return run


@pytest.fixture
def aenv(bare: Aenv, url: str, monkeypatch: pytest.MonkeyPatch) -> Aenv:
    monkeypatch.setenv("E2B_API_URL", url)
    monkeypatch.setenv("E2B_API_KEY", KEY)
    return bare
