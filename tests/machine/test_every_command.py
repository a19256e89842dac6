"""Every command against a real node, in this process and as the program; what is JSON, against its schema."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from agentenv.cli.documents import LINES, SCHEMAS
from support.home import linked_home
from support.steps import COMMANDS, WAYS, Commands, Done, Step, Way, filled

pytestmark = pytest.mark.machine

# What cannot be a step here: what runs it instead, and its words there.
ELSEWHERE = {
    ("forward",): ("machine/test_forwarding.py", '"forward", name'),  # it goes on until it is interrupted
    ("serve",): ("support/running.py", '"serve", "--port"'),  # as well: each node of a test is one
}
STEPS = (
    Step("doctor"),
    Step("setup", told="unchanged"),
    Step("config show --set"),
    Step("node status", 3),
    Step("list", 4, told="no node runs"),
    Step("version"),
    Step("pull {tmp}/tree.tar"),
    Step("template create tiny --from {tmp}/tree.tar --disk 64"),
    Step("template list"),
    Step("node start --port 0"),
    Step("node status"),
    Step("env", keeps="env"),
    Step("version"),
    # Servers and keys.
    Step("auth login {url} --name here", given="{key}\n"),
    Step("auth list"),
    Step("auth show --profile here"),
    Step("auth use here"),
    Step("auth logout here"),
    Step("key create alice --sandboxes 0", keeps="alice"),
    Step("key list"),
    Step("key create bob --output json"),
    Step("key rotate alice --output json"),
    Step("key revoke alice bob", says="alice\nbob"),
    Step("list --url {url} --api-key {alice}", 7),
    # The life of a sandbox.
    Step("start base -d --name work --metadata run=every --timeout 600", keeps="sandbox"),
    Step("list --metadata run=every"),
    Step("ls --output ids", says="{sandbox}"),
    Step("show work"),
    Step("show nobody", 3, told='there is no sandbox "nobody"\n  try: `aenv list` shows them'),
    Step("exec work -- echo -- -n", says="-- -n"),
    Step("exec work -- echo hello from $(whoami)", says="hello from $(whoami)"),
    Step("exec work 'echo hello from $(whoami)'", says="hello from user"),
    Step("exec -u root -w /etc -e A=b work 'echo $A $(id -u) $PWD'", says="b 0 /etc"),
    Step("exec work -- cat", given="by a pipe", says="by a pipe"),
    Step("exec work 'exit 42'", 42),
    Step("upload work {tmp}/file there"),
    Step("cp {tmp}/file work:/tmp/"),
    Step("download work there {tmp}/{way}-back"),
    Step("exec work 'cat there /tmp/file'", says="content\ncontent"),
    Step("connect work --list"),  # attached to a terminal: test_shells.py
    Step("timeout work 900", says="{sandbox}"),
    Step("network set work --no-internet --allow 10.1.2.3", says="{sandbox}"),
    Step("network show work"),
    Step("network set work --deny nonsense", 2, told="nonsense"),
    Step("limits set work --rx 100000000", says="{sandbox}"),
    Step("limits show work"),
    Step("snapshot create work --name ready --output ids", keeps="snapshot"),
    Step("snapshot create work"),
    Step("exec work touch mark"),
    Step("pause work", says="{sandbox}"),
    Step("pause work", 4, told="already paused"),
    Step("resume nobody work", 3, says="{sandbox}", told="1 of 2 failed"),
    Step("resume work", says="{sandbox}"),
    Step("exec work ls", says="mark\nthere"),
    Step("snapshot list --sandbox work"),
    Step("snapshot show ready"),
    Step("snapshot tree work"),
    Step("rollback work ready", says="{sandbox}"),
    Step("exec work ls", says="there"),
    Step("fork work 2 --number SEED --metadata run=forked"),
    Step("exec work-1 'echo $SEED'", says="0"),
    Step("exec work-2 'echo $SEED'", says="1"),
    Step("logs work"),
    Step("metrics work"),
    Step("operations work"),
    Step("events --sandbox work --after 0-0 --count 2"),
    Step("delete --metadata run=forked --yes"),
    Step("delete", 2, told="--all"),
    Step("kill work", says="{sandbox}"),
    Step("kill {sandbox}", 3),
    # Templates.
    Step("build {tmp} --name built", told="echo made"),
    Step("build {tmp} --name built --build-arg", 2),
    Step("template show built"),
    Step("template watch built", told="ready"),
    Step("template tag built stable"),
    Step("template publish built", says="built"),
    Step("template export tiny -o {tmp}/{way}.tar"),
    Step("template export tiny -o {tmp}/{way}.tar", 2, told="is there already"),
    Step("template delete built nothing", 3, told="1 of 2 failed"),
    Step("snapshot delete ready", says="{snapshot}"),
    Step("node restart"),
    Step("fsck --repair", 4, told="aenv node stop"),
    Step("node stop", says="paused 0 sandboxes\nstopped {url}"),
    Step("template delete tiny"),
    Step("fsck"),
    Step("completion bash"),
)


@pytest.fixture
def environment(node_directory: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a user with a data directory of their own."""
    home = linked_home(node_directory / "every")
    others = {name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "E2B_"))}
    environment = {
        **others,
        "AENV_HOME": str(home),
        "AENV_RUNTIME": f"/run/aenv-t-{os.getpid()}-every",
        "AENV_POOL_MOST": "0",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    yield environment
    subprocess.run(
        [sys.executable, "-m", "agentenv", "node", "stop"], env=environment, check=True, capture_output=True
    )
    shutil.rmtree(home)


@pytest.fixture
def commands(
    host_audit: None,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> Commands:
    return Commands(environment, tmp_path, monkeypatch, capfdbinary)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_every_command(commands: Commands, way: Way, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content\n")
    (tmp_path / "Dockerfile").write_text("FROM template://base\nRUN echo made > made\n")
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin/busybox")
    subprocess.run(["tar", "-cf", tmp_path / "tree.tar", "-C", tree, "."], check=True)
    kept = {"tmp": str(tmp_path), "way": way}
    schemas: dict[str, Any] = {}
    printed: list[tuple[tuple[str, ...], str]] = []
    for step in STEPS:
        out = as_it_says(commands, step, way, kept).out
        if step.keeps:
            kept[step.keeps] = out.strip()
        if step.keeps == "env":
            exported = dict(re.findall(r"export (\w+)=(\S+)", out))
            kept |= {"url": exported["E2B_API_URL"], "key": exported["E2B_API_KEY"]}
            answer = httpx.get(f"{kept['url']}/openapi.json", trust_env=False)
            schemas = answer.json()["components"]
        if step.is_json:
            printed.append((step.path, out))
    for path, out in printed:
        check(path, out, schemas)


def as_it_says(commands: Commands, step: Step, way: Way, kept: dict[str, str]) -> Done:
    """How it ended, which is as it says."""
    # A node that is started would be the child of this process, which has to outlive it.
    starts = step.path in (("node", "start"), ("node", "restart"))
    done = commands.run(step, "program" if starts else way, kept)
    assert done.code == step.code, (step.line, done)
    assert step.told in done.error, (step.line, done)
    if step.says is not None:
        assert done.out.strip() == filled(step.says, kept), step.line
    return done


def check(path: tuple[str, ...], out: str, schemas: dict[str, Any]) -> None:
    """What a command printed is as its schema says."""
    schema = {**SCHEMAS[path], "components": schemas}
    lines = out.splitlines() if path in LINES else [out]
    assert lines, path
    for line in lines:
        jsonschema_rs.Draft202012Validator(schema).validate(json.loads(line))


def test_no_command_is_left_out() -> None:
    done = {step.path for step in STEPS if not step.code}
    assert COMMANDS.keys() - done == ELSEWHERE.keys()
    for file, words in ELSEWHERE.values():
        assert words in (Path(__file__).parents[1] / file).read_text()
    with_form = {
        path for path, command in COMMANDS.items() if "form" in {each.name for each in command.params}
    }
    assert with_form == SCHEMAS.keys()
    assert with_form <= done
