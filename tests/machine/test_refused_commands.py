"""What a real node, or this host, refuses to each command: how that ends, and what is told of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2b import Sandbox

from agentenv.cli import INTERRUPTED, main
from support.interrupting import HEEDING, heeding
from support.running import RunningNode
from support.steps import COMMANDS, WAYS, Commands, Step, Way, filled

pytestmark = pytest.mark.machine

GUIDE = Path(__file__).parents[2] / "docs/guides/command-line.md"
# The data directory of nobody, where no node runs.
NOWHERE = {"AENV_HOME": "{tmp}/home", "AENV_RUNTIME": "{tmp}/run", "E2B_API_URL": "", "E2B_API_KEY": ""}
BARE = {"PATH": "{tmp}/home"}  # a host without any program
WRONG = {"AENV_PORT": "high"}
# Their code sums up what they print, which says what is wrong and what can be done.
ANSWERING = {("doctor",), ("node", "status")}

REFUSED = (
    Step("auth list", 2, told="cannot be understood", within={"XDG_CONFIG_HOME": "{tmp}/broken"}),
    Step("auth login {url}", 7, given="e2b_wrong\n", told="X-API-KEY"),
    Step("auth login http://127.0.0.1:9", 8, given="k\n", told="does not answer"),
    Step("auth logout nobody", 3, told="nobody"),
    Step("auth show", 4, told="no node runs", within=NOWHERE),
    Step("auth use nobody", 3, told="nobody"),
    Step("build {tmp}/nothing --name x", 3, told="{tmp}/nothing"),
    Step("build {tmp} --name x", 2, told="Dockerfile:2"),
    Step("completion tcsh", 2, told="tcsh"),
    Step("config show", 2, told="settings: port", within=WRONG),
    Step("connect nobody", 3, told='there is no sandbox "nobody"'),
    Step("cp {tmp}/file nobody:/tmp", 3, told="nobody"),
    Step("cp nobody:/tmp {tmp}", 3, told="nobody"),
    Step("delete --all", 1, given="n\n", told="not confirmed"),
    Step("delete nobody", 3, told="nobody"),
    Step("doctor", 6, within=BARE),
    Step("download nobody /tmp {tmp}", 3, told="nobody"),
    Step("env", 4, told="no node runs", within=NOWHERE),
    Step("events --sandbox nobody", 3, told="nobody"),
    Step("exec nobody true", 3, told="nobody"),
    Step("exec --timeout 0.5 {sandbox} sleep 60", 9, told="longer than 0.5 s"),
    Step("fork nobody", 3, told="nobody"),
    Step("forward nobody 80", 3, told="nobody"),
    Step("fsck", 3, told="is no data directory", within=NOWHERE),
    Step("key create alice --rate 0", 2, told="--rate"),
    Step("key list", 7, within={"E2B_API_KEY": "e2b_wrong"}),
    Step("key revoke nobody", 3, told="nobody"),
    Step("key rotate nobody", 3, told="nobody"),
    Step("limits set nobody --rx 1", 3, told="nobody"),
    Step("limits show nobody", 3, told="nobody"),
    Step("list --metadata nonsense", 2, told="KEY=VALUE"),
    Step("logs nobody", 3, told="nobody"),
    Step("metrics nobody", 3, told="nobody"),
    Step("network set nobody --deny 10.0.0.0/8", 3, told="nobody"),
    Step("network show nobody", 3, told="nobody"),
    Step("node restart", 2, told="settings: port", within=WRONG),
    Step("node start --host 192.0.2.1", 1, told="the node ended at its start", within=NOWHERE),
    Step("node status", 3, within=NOWHERE),
    Step("node stop", 2, told="settings: port", within=WRONG),
    Step("operations nobody", 3, told="nobody"),
    Step("pause nobody", 3, told="nobody"),
    Step("pull {tmp}/nothing", 3, told="{tmp}/nothing"),
    Step("resume nobody", 3, told="nobody"),
    Step("rollback nobody ready", 3, told="nobody"),
    Step("serve", 2, told="settings: port", within=WRONG),
    Step("setup", 6, within={**BARE, **NOWHERE}),
    Step("show nobody", 3, told="nobody"),
    Step("snapshot create nobody", 3, told="nobody"),
    Step("snapshot delete nothing", 3, told="nothing"),
    Step("snapshot list --sandbox nobody", 3, told="nobody"),
    Step("snapshot show nothing", 3, told="nothing"),
    Step("snapshot tree nobody", 3, told="nobody"),
    Step("start base -d", 5, told="0 sandboxes", within={"E2B_API_KEY": "{poor}"}),
    Step("start nothing -d", 3, told="nothing"),
    Step("template create x --from {tmp}/nothing", 3, told="{tmp}/nothing"),
    Step("template create 'Bad Name' --from debootstrap:bookworm", 2, told="cannot be a template's name"),
    Step("template create x --from debootstrap:no-such-suite", 2, told="no-such-suite"),
    Step("template delete nothing", 3, told="nothing"),
    Step("template export nothing -o {tmp}/out", 3, told="nothing"),
    Step("template list --profile nobody", 3, told="nobody"),
    Step("template publish nothing", 3, told="nothing"),
    Step("template show nothing", 3, told="nothing"),
    Step("template tag nothing v1", 3, told="nothing"),
    Step("template watch nothing", 3, told="nothing"),
    Step("timeout nobody 60", 3, told="nobody"),
    Step("upload nobody {tmp}/Dockerfile there", 3, told="nobody"),
    Step("version nonsense", 2, told="nonsense"),
)


@pytest.fixture
def environment(node: RunningNode, tmp_path: Path) -> dict[str, str]:
    """Of a user of the node that tests share."""
    others = {name: value for name, value in node.environment.items() if not name.startswith("E2B_")}
    return {**others, **node.client_environment, "XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def poor(node: RunningNode) -> Iterator[str]:
    """A key that may have nothing."""
    with node.client() as client:
        asked = {"name": "poor", "quota": {"sandboxes": 0}}
        made = client.post("/api-keys", json=asked).raise_for_status().json()
        yield made["key"]
        client.delete(f"/api-keys/{made['id']}").raise_for_status()


@pytest.fixture
def kept(node: RunningNode, shared_sandbox: Sandbox, poor: str, tmp_path: Path) -> dict[str, str]:
    """What steps are filled in with, and the files that they name."""
    (tmp_path / "home").mkdir()
    (tmp_path / "broken/aenv").mkdir(parents=True)
    (tmp_path / "broken/aenv/profiles.toml").write_text("no = = toml")
    (tmp_path / "Dockerfile").write_text("FROM template://base\nNONSENSE\n")
    words = {"url": node.url, "sandbox": shared_sandbox.sandbox_id, "poor": poor}
    return {"tmp": str(tmp_path), **words}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_refused(
    way: Way,
    shared_sandbox: Sandbox,
    host_audit: None,
    environment: dict[str, str],
    kept: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    commands = Commands(environment, tmp_path, monkeypatch, capfdbinary)
    ended = [(step, commands.run(step, way, kept)) for step in REFUSED]
    otherwise = [
        (step.line, done)
        for step, done in ended
        if done.code != step.code or not tells(step, done.error, filled(step.told, kept))
    ]
    assert otherwise == []


def tells(step: Step, error: str, cause: str) -> bool:
    """Whether it says what is wrong and, unless it was called wrongly, what can be done."""
    if step.path in ANSWERING:
        return not error
    words = r"^(aenv|Error): .*" if step.code == 2 else r"^aenv: (.|\n)*\n  (try|look at): .+$"
    return cause in error and bool(re.search(words, error, re.MULTILINE))


@pytest.mark.usefixtures("host_audit")
def test_one_that_is_interrupted(sandbox: Sandbox, environment: dict[str, str]) -> None:
    words = [*HEEDING, sys.executable, "-m", "agentenv", "logs", "-f", sandbox.sandbox_id]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline()
        command.send_signal(signal.SIGINT)
        _, told = command.communicate(timeout=60)
    assert (command.returncode, told) == (INTERRUPTED, "aenv: interrupted\n")


@pytest.mark.usefixtures("host_audit")
def test_one_that_is_interrupted_in_process(
    sandbox: Sandbox,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    reading, writing = os.pipe()

    here = threading.get_ident()

    def interrupt() -> None:
        assert os.read(reading, 1)  # it follows, and goes on
        signal.pthread_kill(here, signal.SIGINT)

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with os.fdopen(writing, "w", buffering=1) as out, ThreadPoolExecutor(1) as pool, heeding():
        monkeypatch.setattr(sys, "stdout", out)
        interrupted = pool.submit(interrupt)
        with pytest.raises(SystemExit) as ended:
            main(["logs", "-f", sandbox.sandbox_id])
        interrupted.result()
    os.close(reading)
    assert ended.value.code == INTERRUPTED
    assert capfd.readouterr().err == "aenv: interrupted\n"


def test_each_command_and_each_code() -> None:
    assert {step.path for step in REFUSED} == COMMANDS.keys()
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", GUIDE.read_text(), re.MULTILINE)}
    assert {step.code for step in REFUSED} | {0, INTERRUPTED} == told
