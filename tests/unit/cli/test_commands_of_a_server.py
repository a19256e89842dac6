"""Commands that ask a server, against the API with parts in memory behind it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import click.testing
import pytest
from click.shell_completion import BashComplete

from agentenv.api.models import ListedSandbox, SandboxDetail, SnapshotAnswer, SnapshotDetail
from agentenv.cli import ALIASES, COMMANDS, cli
from support.served_commands import KEY, Aenv, started


def test_the_life_of_a_sandbox(aenv: Aenv) -> None:
    sandbox = started(aenv, "--name", "mine", "--metadata", "run=7")
    (row,) = json.loads(aenv("list"))
    assert ListedSandbox.model_validate(row).sandboxID == sandbox
    shown = json.loads(aenv("show", "mine"))
    assert SandboxDetail.model_validate(shown).state == "running"
    assert "envdAccessToken" not in shown
    assert aenv("pause", "mine").strip() == sandbox
    assert aenv("list", "--state", "paused", "--output", "ids").strip() == sandbox
    assert json.loads(aenv("list", "--state", "running")) == []
    assert aenv("resume", sandbox[:8]).strip() == sandbox
    assert aenv("timeout", sandbox, "1000").strip() == sandbox
    table = aenv("list", "--metadata", "run=7", "--output", "table").splitlines()
    assert table[0].split()[:4] == ["ID", "NAME", "TEMPLATE", "STATE"]
    assert table[1].split()[:4] == [sandbox, "mine", "base", "running"]
    assert aenv("delete", "mine").strip() == sandbox
    assert json.loads(aenv("list")) == []


def test_the_beginning_of_an_id_that_several_have(aenv: Aenv) -> None:
    one, two = started(aenv), started(aenv)
    said = aenv("pause", "i")
    assert said.code == 4
    assert said.error is not None
    assert one in said.error.message
    assert two in said.error.message
    said = aenv("pause", "nobody")
    assert said.code == 3
    assert said.error is not None
    assert "aenv list" in str(said.error.remedy)


def test_many_are_deleted_by_what_they_are(aenv: Aenv) -> None:
    kept = started(aenv, "--metadata", "run=8")
    gone = {started(aenv, "--metadata", "run=7") for _ in range(3)}
    assert aenv("delete", "--metadata", "run=7", given="n\n").code == 1
    assert len(json.loads(aenv("list"))) == 4
    assert set(aenv("delete", "--metadata", "run=7", "--yes").split()) == gone
    assert aenv("list", "--output", "ids").split() == [kept]
    assert aenv("delete").code == 2
    assert aenv("delete", kept, "--all").code == 2
    assert aenv("delete", "--all", given="y\n").split()[-1] == kept
    assert aenv("delete", "--all").code == 0


def test_snapshots_and_what_is_made_of_them(aenv: Aenv) -> None:
    sandbox = started(aenv)
    made = json.loads(aenv("snapshot", "create", sandbox, "--name", "ready"))
    first = SnapshotAnswer.model_validate(made).snapshotID
    second = json.loads(aenv("snapshot", "create", sandbox))["snapshotID"]
    assert {each["snapshotID"] for each in json.loads(aenv("snapshot", "list"))} == {second, first}
    assert aenv("snapshot", "list", "--name", "ready", "--output", "ids").strip() == first
    found = SnapshotDetail.model_validate(json.loads(aenv("snapshot", "show", "ready")))
    assert (found.snapshotID, found.children) == (first, [second])
    assert json.loads(aenv("snapshot", "show", first[:9]))["snapshotID"] == first
    tree = aenv("snapshot", "tree", sandbox, "--output", "table").splitlines()
    assert tree[0].startswith(sandbox)
    assert tree[1:] == [f"└─ {first} ready:default", f"   └─ {second} *"]
    assert aenv("rollback", sandbox, "ready").strip() == sandbox
    assert started(aenv) != started(aenv)
    children = aenv(
        "fork", sandbox, "3", "--number", "SEED", "--metadata", "run=7", "--output", "ids"
    ).split()
    assert len(set(children)) == 3
    assert set(aenv("list", "--metadata", "run=7", "--output", "ids").split()) == set(children)
    assert aenv("snapshot", "delete", second, "ready").split() == [second, first]
    assert json.loads(aenv("snapshot", "list")) == []
    assert aenv("snapshot", "show", "ready").code == 3


def test_children_of_one_with_a_name_have_their_own(aenv: Aenv) -> None:
    named = started(aenv, "--name", "mine")
    children = aenv("fork", "mine", "2", "--metadata", "run=7", "--output", "ids").split()
    found = [json.loads(aenv("show", f"mine-{index}")) for index in (1, 2)]
    assert {each["sandboxID"] for each in found} == set(children)
    assert found[1]["metadata"] == {"name": "mine-2", "run": "7"}
    assert json.loads(aenv("show", "mine"))["sandboxID"] == named


def test_what_a_sandbox_does_is_looked_at(aenv: Aenv) -> None:
    sandbox = started(aenv, "--name", "mine")
    lines = [json.loads(line) for line in aenv("logs", "mine").splitlines()]
    assert "Sandbox created" in [line["message"] for line in lines]
    assert "Sandbox created" in aenv("logs", "mine", "--output", "table", "--level", "info")
    assert aenv("logs", "mine", "--search", "no such words") == ""
    (operation, *_) = json.loads(aenv("operations", "mine"))
    assert operation["operation"] == "create"
    assert "create" in aenv("operations", "mine", "--output", "table")
    events = aenv("events", "--sandbox", sandbox, "--after", "0-0", "--count", "2")
    lost, created = [json.loads(line) for line in events.splitlines()]
    assert lost == {}
    assert (created["kind"], created["sandboxID"]) == ("created", sandbox)


def test_rules_and_limits(aenv: Aenv, tmp_path: Path) -> None:
    sandbox = started(aenv, "--name", "mine")
    aenv("network", "set", "mine", "--no-internet", "--allow", "pypi.org", "--dns", "9.9.9.9")
    shown = json.loads(aenv("network", "show", "mine"))
    assert shown["allowInternetAccess"] is False
    assert (shown["allowOut"], shown["dnsServers"]) == (["pypi.org"], ["9.9.9.9"])
    file = tmp_path / "rules.json"
    file.write_text('{"denyOut": ["8.8.8.8"]}')
    assert aenv("network", "set", "mine", "--file", str(file)).strip() == sandbox
    assert json.loads(aenv("network", "show", "mine"))["denyOut"] == ["8.8.8.8"]
    file.write_text("{")
    assert aenv("network", "set", "mine", "--file", str(file)).code == 2
    assert aenv("network", "set", "mine").code == 2
    said = aenv("network", "set", "mine", "--deny", "nonsense")
    assert said.code == 2
    assert said.error is not None
    assert "nonsense" in said.error.message
    aenv("limits", "set", "mine", "--rx", "1000000", "--iops", "100")
    limits = json.loads(aenv("limits", "show", "mine"))
    assert (limits["network"], limits["disk"]) == ({"rxBytesPerSecond": 1000000}, {"iops": 100})


def test_templates_of_a_server(aenv: Aenv) -> None:
    (row,) = json.loads(aenv("template", "list", "--output", "json"))
    assert (row["names"], row["buildStatus"]) == (["base"], "ready")
    assert aenv("template", "list", "--names").split() == ["base"]
    assert "base" in aenv("template", "list")
    assert aenv("template", "tag", "base", "stable").strip() == row["buildID"]
    found = json.loads(aenv("template", "show", "base"))
    assert found["builds"][0]["tags"] == ["default", "stable"]
    aenv("template", "tag", "base", "stable", "--remove")
    assert json.loads(aenv("template", "show", "base"))["builds"][0]["tags"] == ["default"]
    assert aenv("template", "publish", "base", "--undo").strip() == "base"
    assert json.loads(aenv("template", "show", "base"))["public"] is False
    assert aenv("template", "watch", "base").code == 0
    assert aenv("template", "show", "nothing").code == 3
    sandbox = started(aenv)
    assert aenv("template", "delete", "base").code == 4
    aenv("delete", sandbox)


def test_keys_of_a_server(aenv: Aenv, url: str, bare: Aenv, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = aenv("key", "create", "alice", "--project", "blue", "--sandboxes", "1", "--rate", "50").strip()
    listed = aenv("key", "list")
    assert "alice" in listed
    assert secret not in listed
    sandbox = started(aenv)
    monkeypatch.setenv("E2B_API_KEY", secret)
    assert json.loads(bare("list")) == []
    assert bare("pause", sandbox).code == 3
    assert bare("key", "list").code == 7
    started(bare)
    assert bare("start", "base", "-d").code == 5
    monkeypatch.setenv("E2B_API_KEY", KEY)
    assert bare("key", "rotate", "alice").strip() != secret
    assert bare("key", "revoke", "alice").strip() == "alice"
    monkeypatch.setenv("E2B_API_KEY", secret)
    assert bare("list").code == 7


def test_servers_by_name(bare: Aenv, url: str, tmp_path: Path) -> None:
    assert bare("list").error is not None  # no node runs here, and no server is known
    assert bare("auth", "login", url, "--name", "wrong", given="e2b_other\n").code == 7
    assert bare("auth", "login", "nowhere", given=f"{KEY}\n").code == 2
    assert bare("auth", "login", url, given="\n").code == 2
    assert bare("auth", "login", url, "--name", "team", given=f"{KEY}\n").code == 0
    file = tmp_path / "config/aenv/profiles.toml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(bare("list")) == []
    assert bare("auth", "login", "http://127.0.0.1:9", "--name", "off", "--no-check", given="k\n").code == 0
    gone = bare("list")
    assert gone.code == 8
    assert json.loads(bare("list", "--profile", "team")) == []
    listed = {row["name"]: row for row in json.loads(bare("auth", "list"))}
    assert (listed["team"]["used"], listed["off"]["used"]) == (False, True)
    assert KEY not in json.dumps(listed)
    bare("auth", "use", "team")
    assert json.loads(bare("auth", "show")) == {"url": url, "key": f"{KEY[:8]}…"}
    assert json.loads(bare("list")) == []
    assert bare("list", "--profile", "unknown").code == 3
    bare("auth", "logout", "team")
    assert bare("list", "--profile", "team").code == 3
    file.write_text("use = 'x'\n[profiles.x]\nurl = 1")
    assert bare("list").code == 2


def test_settings_are_shown_with_where_they_come_from(
    bare: Aenv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "data"
    home.mkdir()
    (home / "aenv.toml").write_text("vcpus = 2\n")
    monkeypatch.setenv("AENV_HOME", str(home))
    monkeypatch.setenv("AENV_API_KEY", "e2b_secret")
    shown = bare("config", "show", "--set")
    rows = {row["name"]: row for row in json.loads(shown)}
    assert rows["vcpus"] == {"name": "vcpus", "value": "2", "from": str(home / "aenv.toml")}
    assert rows["home"]["from"] == "AENV_HOME"
    assert "e2b_secret" not in shown
    assert {row["from"] for row in json.loads(bare("config", "show"))} > {"default"}


def test_every_command_has_help_with_a_first_line() -> None:
    for name in [*COMMANDS, *ALIASES]:
        done = click.testing.CliRunner().invoke(cli, [name, "--help"])
        assert done.exit_code == 0, name
        assert "Usage: cli" in done.stdout
        assert len(done.stdout.splitlines()) > 4, name


def test_what_there_is_is_offered(aenv: Aenv, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = started(aenv, "--name", "mine")
    aenv("snapshot", "create", sandbox, "--name", "ready")

    def offered(*words: str) -> list[str]:
        return [
            each.value for each in BashComplete(cli, {}, "aenv", "").get_completions([*words[:-1]], words[-1])
        ]

    assert offered("pause", "m") == ["mine"]
    assert offered("exec", sandbox[:4]) == [sandbox]
    assert offered("pause", "other", "m") == ["mine"]
    assert offered("snapshot", "show", "r") == ["ready:default"]
    assert offered("start", "b") == ["base"]
    assert offered("pause", "--url", "http://127.0.0.1:9", "m") == []
    assert offered("p") == ["pause", "pull"]
    assert offered("list", "--state", "p") == ["paused"]
    monkeypatch.setenv("E2B_API_KEY", "wrong")
    assert offered("pause", "m") == []


def test_templates_of_a_directory_are_told_as_a_server_does(
    aenv: Aenv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = aenv("template", "list")
    for name in ("E2B_API_URL", "E2B_API_KEY"):
        monkeypatch.delenv(name)
    assert json.loads(aenv("template", "list", "--home", str(tmp_path / "home"))) == json.loads(answered)


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    program = tmp_path / "aenv"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m agentenv "$@"\n')
    program.chmod(0o755)
    here = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*words: str) -> str:
        done = subprocess.run(words, env=here, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = tmp_path / "script"
    script.write_text(run(str(program), "completion", shell))
    if shell == "bash":
        typed = (
            "COMP_WORDS=(aenv sn); COMP_CWORD=1; _aenv_completion aenv; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        assert run("bash", "--norc", "-c", f"source {script}; {typed}").split() == ["snapshot"]
    elif shell == "fish":
        here["HOME"] = str(tmp_path)
        shown = run("fish", "--no-config", "-c", f"source {script}; complete -C 'aenv sn'")
        assert shown.startswith("snapshot\tTake")
    else:
        typed = "compdef() { :; }; compadd() { print -r -- $* }; _describe() { print -r -- ${(P)3} }"
        typed += f"; source {script}; words=(aenv sn) CURRENT=2; _aenv_completion"
        assert "snapshot:Take" in run("zsh", "--no-rcs", "-c", typed)


def test_what_a_node_says_can_be_done_is_told_apart(aenv: Aenv) -> None:
    error = aenv("start", "nothing", "-d").error
    assert error is not None
    assert (error.message, error.remedy) == (
        'template "nothing" not found',
        "`aenv template list` shows them",
    )
    wrong = aenv("list", "--api-key", "e2b_wrong").error
    assert wrong is not None and wrong.remedy is not None
    assert "aenv auth show" in wrong.remedy
