"""What an agent that is started again knows of the one before."""

from __future__ import annotations

from pathlib import Path

from agentenv.guest import remembered
from agentenv.guest.context import Context


def test_what_init_said_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "kept/context.json"
    first = Context()
    first.env, first.token, first.default_user = {"A": "1"}, "secret", "user"
    first.default_workdir, first.lifecycle = "/srv", "l1"
    remembered.keep(first, str(path))
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    first.token = None
    remembered.keep(first, str(path))
    second = Context()
    remembered.recall(second, str(path))
    assert (second.env, second.token, second.default_user) == ({"A": "1"}, None, "user")
    assert (second.default_workdir, second.lifecycle) == ("/srv", "l1")
    assert [each.name for each in path.parent.iterdir()] == ["context.json"]


def test_a_first_agent_knows_nothing(tmp_path: Path) -> None:
    context = Context()
    remembered.recall(context, str(tmp_path / "none"))
    assert (context.env, context.token, context.default_user) == ({}, None, "root")
