"""Which server a command asks, and with whose key: options, variables, profiles, the local node."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from agentenv import config, run_record
from agentenv.cli import profiles
from agentenv.cli.meant import node_address
from agentenv.cli.options import node_options
from agentenv.cli.profiles import Profile
from agentenv.errors import AenvError, Conflict, NotFound, Unauthorized

Ask = Callable[..., tuple[str, str]]

LOCAL = "http://127.0.0.1:8123"
TEAM = Profile("https://team.example.com", "team-key")


@click.command()
@node_options
def asking(url: str | None, api_key: str | None, home: Path | None) -> None:
    click.echo(json.dumps(node_address(url, api_key, home)))


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """URL and key that a command would take. A local node runs, and there are two profiles, none in use."""
    for name in ("E2B_API_URL", "E2B_API_KEY", "AENV_PROFILE", "AENV_API_KEY", "AENV_RUNTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    home = tmp_path / "home"
    runtime = tmp_path / "run"
    for each in (home, runtime):
        each.mkdir()
    monkeypatch.setenv("AENV_HOME", str(home))
    monkeypatch.setenv("AENV_RUNTIME", str(runtime))
    settings = config.load()
    run_record.write(settings, LOCAL)
    settings.api_key_file.write_text("local-key\n")
    known = profiles.Profiles().with_one("team", TEAM).with_one("other", Profile("http://other", "other-key"))
    profiles.save(profiles.Profiles(known.known))

    def run(*arguments: str, **variables: str) -> tuple[str, str]:
        done = CliRunner().invoke(asking, list(arguments), env=variables)
        if isinstance(done.exception, AenvError):
            raise done.exception
        assert done.exit_code == 0, done.output
        url, key = json.loads(done.stdout)
        return url, key

    return run


def test_the_local_node_where_nothing_is_said(ask: Ask) -> None:
    assert ask() == (LOCAL, "local-key")
    assert ask(E2B_API_KEY="mine") == (LOCAL, "mine")
    assert ask("--api-key", "typed", E2B_API_KEY="mine") == (LOCAL, "typed")


def test_what_is_typed_comes_before_what_is_set(ask: Ask) -> None:
    there = {"E2B_API_URL": "http://there", "E2B_API_KEY": "there-key"}
    assert ask(**there) == ("http://there", "there-key")
    assert ask("--profile", "team", **there) == (TEAM.url, TEAM.api_key)
    assert ask("--profile", "team", "--api-key", "typed", **there) == (TEAM.url, "typed")
    assert ask("--url", "http://elsewhere", "--profile", "team", **there) == ("http://elsewhere", "there-key")
    assert ask(AENV_PROFILE="team", **there) == (TEAM.url, TEAM.api_key)
    home = os.environ["AENV_HOME"]
    assert ask("--home", home, AENV_PROFILE="team", **there) == (LOCAL, "local-key")


def test_the_profile_in_use_comes_before_the_local_node_alone(ask: Ask) -> None:
    profiles.save(profiles.load().using("team"))
    assert ask() == (TEAM.url, TEAM.api_key)
    assert ask(E2B_API_KEY="of-another") == (TEAM.url, TEAM.api_key)
    assert ask(E2B_API_URL="http://there", E2B_API_KEY="k") == ("http://there", "k")
    assert ask("--home", os.environ["AENV_HOME"]) == (LOCAL, "local-key")
    with pytest.raises(NotFound, match="nobody"):
        ask("--profile", "nobody")


@pytest.mark.parametrize("named", ["", "team"])
def test_a_key_is_not_sent_to_another_server(ask: Ask, named: str) -> None:
    profiles.save(profiles.load().using("team"))
    with pytest.raises(Unauthorized, match="no API key of https://elsewhere is known") as refused:
        ask("--url", "https://elsewhere", **({"AENV_PROFILE": named} if named else {}))
    assert "aenv auth login https://elsewhere" in str(refused.value.remedy)
    with pytest.raises(Unauthorized):
        ask(E2B_API_URL="http://127.0.0.1:8124")


def test_a_url_that_is_known_has_its_key(ask: Ask) -> None:
    assert ask("--url", "https://team.example.com/") == ("https://team.example.com/", "team-key")
    assert ask(E2B_API_URL="http://localhost:8123") == ("http://localhost:8123", "local-key")


def test_no_node_and_no_server(ask: Ask, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(Conflict, match="no node runs on"):
        ask(AENV_RUNTIME=str(empty))
