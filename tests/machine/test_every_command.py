"""Every command against a real node, in this process and as the program; what is JSON, against its schema."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from agentenv.cli import ALIASES, cli, main
from agentenv.cli.documents import LINES, SCHEMAS
from support.commands import leaves
from support.home import linked_home

pytestmark = pytest.mark.machine

Run = Callable[["Step", list[str]], str]
WAYS = ["in-process", "program"]
COMMANDS = dict(leaves(cli))
# What cannot be a step here: what it needs, and where it is run as well.
ELSEWHERE = {
    ("connect",): "test_shells.py",  # a terminal
    ("forward",): "test_forwarding.py",  # it goes on until it is interrupted
    ("serve",): "test_node_life.py",  # as well: each node of a test is one
}


@dataclass(frozen=True)
class Step:
    """A command line and how it ends. {words} are what steps before `kept`, and the directory {tmp}."""

    line: str
    code: int = 0
    given: str = ""
    says: str | None = None
    """All that it prints."""
    told: str = ""
    """Part of what is on stderr."""
    keeps: str = ""
    """A name for what it prints."""

    @property
    def path(self) -> tuple[str, ...]:
        words = self.line.split()
        words[0] = ALIASES.get(words[0], words[0])
        return next(tuple(words[:count]) for count in (2, 1) if tuple(words[:count]) in COMMANDS)

    @property
    def is_json(self) -> bool:
        """Whether it prints JSON: what makes a key prints that alone unless it is asked for more."""
        if self.code or self.path not in SCHEMAS or "--output ids" in self.line:
            return False
        return self.path[0] != "key" or self.path[1] == "list" or "--output json" in self.line


STEPS = (
    Step("doctor"),
    Step("setup", told="unchanged"),
    Step("config show --set"),
    Step("node status", 3),
    Step("env", 4, told="aenv node start"),
    Step("list", 4, told="no node runs"),
    Step("list --url http://127.0.0.1:9 --api-key k", 8, told="does not answer"),
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
    Step("auth login {url} --name wrong", 7, given="e2b_wrong\n", told="X-API-KEY"),
    Step("auth list"),
    Step("auth show --profile here"),
    Step("auth use here"),
    Step("auth logout here"),
    Step("auth logout here", 3),
    Step("key create alice --sandboxes 0", keeps="alice"),
    Step("key list"),
    Step("start base -d --url {url} --api-key {alice}", 5, told="this API key may have 0 sandboxes"),
    Step("key create bob --output json"),
    Step("key rotate alice --output json"),
    Step("key revoke alice bob", says="alice\nbob"),
    Step("list --url {url} --api-key {alice}", 7),
    # The life of a sandbox.
    Step("start base -d --name work --metadata run=every --timeout 600", keeps="sandbox"),
    Step("start nothing -d", 3, told="nothing"),
    Step("list --metadata run=every"),
    Step("ls --output ids", says="{sandbox}"),
    Step("show work"),
    Step("show nobody", 3, told='there is no sandbox "nobody"\n  try: `aenv list` shows them'),
    Step("exec work -- echo hello from $(whoami)", says="hello from $(whoami)"),
    Step("exec work 'echo hello from $(whoami)'", says="hello from user"),
    Step("exec -u root -w /etc -e A=b work 'echo $A $(id -u) $PWD'", says="b 0 /etc"),
    Step("exec work -- cat", given="by a pipe", says="by a pipe"),
    Step("exec work 'exit 42'", 42),
    Step("exec --timeout 1 work sleep 100", 9, told="1 s"),
    Step("upload work {tmp}/file there"),
    Step("cp {tmp}/file work:/tmp/"),
    Step("download work there {tmp}/{way}-back"),
    Step("exec work 'cat there /tmp/file'", says="content\ncontent"),
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


@pytest.fixture(params=WAYS)
def run(
    request: pytest.FixtureRequest,
    host_audit: None,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> Run:
    """Runs a command in one of the two ways; it must end as the step says."""

    def program(words: list[str], given: bytes) -> tuple[int, bytes, bytes]:
        command = [sys.executable, "-m", "agentenv", *words]
        done = subprocess.run(command, env=environment, input=given, capture_output=True, timeout=200)
        return done.returncode, done.stdout, done.stderr

    def in_process(words: list[str], given: bytes) -> tuple[int, bytes, bytes]:
        (tmp_path / "given").write_bytes(given)
        with (tmp_path / "given").open() as stdin, monkeypatch.context() as patch, at_0(stdin.fileno()):
            patch.setattr(sys, "stdin", stdin)
            for name in os.environ.keys() - environment.keys():
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main(words)
            sys.stdout.flush()
        out, error = capfdbinary.readouterr()
        return int(ended.value.code or 0), out, error

    def run(step: Step, words: list[str]) -> str:
        # A node that is started would be the child of this process, which has to outlive it.
        starts = step.path in (("node", "start"), ("node", "restart"))
        way = program if request.param == "program" or starts else in_process
        code, out, error = way(words, step.given.encode())
        assert code == step.code, (step.line, code, out[-2000:], error[-2000:])
        assert step.told.encode() in error, (step.line, error)
        assert b"Traceback" not in error
        return out.decode()

    return run


@contextmanager
def at_0(descriptor: int) -> Iterator[None]:
    """Have it as standard input, for what reads no object but the descriptor."""
    before = os.dup(0)
    os.dup2(descriptor, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


@pytest.mark.timeout(600)
def test_every_command(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content\n")
    (tmp_path / "Dockerfile").write_text("FROM template://base\nRUN echo made > made\n")
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin/busybox")
    subprocess.run(["tar", "-cf", tmp_path / "tree.tar", "-C", tree, "."], check=True)
    kept = {"tmp": str(tmp_path), "way": "it"}
    schemas: dict[str, Any] = {}
    printed: list[tuple[tuple[str, ...], str]] = []
    for step in STEPS:
        out = run(Step(**{**step.__dict__, "given": filled(step.given, kept)}), words(step, kept))
        if step.says is not None:
            assert out.strip() == filled(step.says, kept), step.line
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


def words(step: Step, kept: dict[str, str]) -> list[str]:
    """As a shell splits them; $ is the guest's."""
    found = re.findall(r"'[^']*'|\S+", step.line)
    return [filled(word.strip("'"), kept) for word in found]


def filled(text: str, kept: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: kept[found[1]], text)


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
    for path, file in ELSEWHERE.items():
        source = Path(__file__).with_name(file).read_text()
        assert f'"{path[0]}"' in source or "node" in source
    with_form = {
        path for path, command in COMMANDS.items() if "form" in {each.name for each in command.params}
    }
    assert with_form == SCHEMAS.keys()
    assert with_form <= done
