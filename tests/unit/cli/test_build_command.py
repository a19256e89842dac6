"""`aenv build` against a stand-in of the build API."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agentenv.cli import cli
from agentenv.errors import AenvError
from support.build_node import KEY, BuildApi, build_api, digest_of
from support.interrupting import HEEDING

DOCKERFILE = """\
FROM python:3.12
ARG NAME=world
COPY a.txt /srv/
RUN echo hello $NAME
CMD ["python", "serve.py"]
"""
RUN = "export NAME=world\necho hello $NAME"


@pytest.fixture
def api() -> Iterator[BuildApi]:
    with build_api() as started:
        yield started


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("content")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return tmp_path


def build(api: BuildApi, *arguments: str) -> Result:
    environment = {"E2B_API_URL": api.url, "E2B_API_KEY": KEY}
    return CliRunner().invoke(cli, ["build", *arguments], env=environment)


def fault(result: Result) -> AenvError:
    assert isinstance(result.exception, AenvError), result.output
    return result.exception


def test_a_build(api: BuildApi, context: Path) -> None:
    done = build(api, str(context), "--name", "app:v1", "--cpu", "2", "--memory", "1024", "--ready", "true")
    assert done.exit_code == 0, done.output
    (build_id,) = api.builds
    assert done.stdout == f"app:v1 tpl1 {build_id}\n"
    built = api.of("app:v1")
    assert built.asked == {"name": "app:v1", "cpuCount": 2, "memoryMB": 1024}
    assert built.body is not None
    assert built.body["fromImage"] == "python:3.12"
    assert (built.body["startCmd"], built.body["readyCmd"]) == ("python serve.py", "true")
    assert built.body["force"] is False
    (copy,) = [step for step in built.body["steps"] if step["type"] == "COPY"]
    assert digest_of(api.files[copy["filesHash"]]) == copy["filesHash"]
    assert f"[4/4] line 4: RUN echo hello $NAME\n  RUN {RUN}\n" in done.stderr
    assert "hidden" not in done.stderr


def test_files_that_the_node_has_are_not_sent_again(api: BuildApi, context: Path) -> None:
    first = build(api, str(context), "--name", "app")
    assert "MiB sent" in first.stderr
    assert "MiB sent" not in build(api, str(context), "--name", "app", "--no-cache", "-v").stderr
    assert len(api.files) == 1
    forced = [*api.builds.values()][1].body
    assert forced is not None
    assert forced["force"] is True
    assert {step["force"] for step in forced["steps"]} == {True}


def test_a_quiet_build_says_what_was_made_or_went_wrong_alone(api: BuildApi, context: Path) -> None:
    (context / "Dockerfile").write_text("FROM a AS one\nRUN x\nFROM a\nCOPY a.txt /\nCOPY --from=one /x /x\n")
    done = build(api, str(context), "--name", "app", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("app tpl")
    (context / "Dockerfile").write_text(DOCKERFILE)
    api.failing[RUN] = "exit status 1"
    failed = build(api, str(context), "--name", "app", "-q")
    assert (fault(failed).message, failed.stderr) == ("line 4: exit status 1", "")


def test_a_step_that_fails_is_named_by_its_line(api: BuildApi, context: Path) -> None:
    api.failing[RUN] = "failed to run command 'echo': exit status 1"
    failed = build(api, str(context), "--name", "app")
    assert str(fault(failed)) == "line 4: failed to run command 'echo': exit status 1"
    assert fault(failed).exit_code == 1


def test_a_long_log_is_read_to_its_end(api: BuildApi, context: Path) -> None:
    (context / "Dockerfile").write_text("FROM a\n" + "RUN x\n" * 150)
    done = build(api, str(context), "--name", "app")
    assert done.stderr.count("  RUN x\n") == 150
    assert done.stderr.rstrip().endswith("finalize\n  done")


def test_what_is_wrong_is_found_before_anything_is_asked(api: BuildApi, context: Path) -> None:
    (context / "Dockerfile").write_text("FROM a\nRUN x\nCOPY nothing /x\n")
    refused = build(api, str(context), "--name", "app")
    assert fault(refused).message.startswith(f"{context}/Dockerfile:3: COPY: nothing: there is no such file")
    assert fault(refused).exit_code == 2
    assert not api.builds


STAGES = "FROM a AS one\nRUN make\nCMD x\nFROM b\nCOPY --from=one /out /out\n"


def test_stages(api: BuildApi, context: Path) -> None:
    (context / "Dockerfile").write_text(STAGES)
    done = build(api, str(context), "--name", "App/app:v2")
    assert done.exit_code == 0, done.output
    inner, outer = api.builds.values()
    assert inner.name.startswith("app-stage0-")
    assert inner.body is not None
    assert "startCmd" not in inner.body
    assert outer.body is not None
    assert outer.body["steps"][-1]["from"] == "tpl1"
    assert api.deleted == ["tpl1"]
    assert "== one\n" in done.stderr


def test_an_inner_stage_that_fails_ends_it_all(api: BuildApi, context: Path) -> None:
    (context / "Dockerfile").write_text(STAGES)
    api.failing["make"] = "no rule"
    assert str(fault(build(api, str(context), "--name", "app"))) == "line 2: no rule"
    assert len(api.builds) == 1
    assert api.deleted == ["tpl1"]


def test_detached(api: BuildApi, context: Path) -> None:
    api.endless = True
    done = build(api, str(context), "--name", "app", "--detach")
    assert done.exit_code == 0
    assert done.stdout.startswith("app tpl1 ")


def test_build_arguments_and_another_file(
    api: BuildApi, context: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dockerfile = tmp_path_factory.mktemp("other") / "Other.Dockerfile"
    dockerfile.write_text("FROM a\nARG ONE\nARG TWO=2\nARG THREE\nRUN x\n")
    os.environ["TWO"] = "from the environment"
    try:
        arguments = ["--build-arg", "ONE=1", "--build-arg", "TWO", "--build-arg", "THREE", "--dry-run"]
        done = build(api, str(context), "-f", str(dockerfile), *arguments)
    finally:
        del os.environ["TWO"]
    (asked,) = json.loads(done.stdout)
    assert asked["steps"][-1]["args"] == ["export ONE=1 TWO='from the environment'\nx"]
    assert not api.builds


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        ([], "needs a name", 2),
        (["--name", "x", "-f", "/nowhere"], "there is no /nowhere", 2),
        (["--name", "x", "--build-arg", "=1"], "there is no name", 2),
        (["--name", "x", "--target", "none"], "there is no stage none", 3),
        (["--name", "x", "--api-key", "wrong"], "unknown key", 7),
        (["--name", "x", "--url", "http://127.0.0.1:9"], "does not answer", 8),
    ],
)
def test_what_is_refused(api: BuildApi, context: Path, arguments: list[str], said: str, code: int) -> None:
    error = fault(build(api, str(context), *arguments))
    assert said in error.message
    assert error.exit_code == code


@pytest.mark.parametrize("knows_cancel", [True, False])
def test_an_interrupt_cancels(api: BuildApi, context: Path, knows_cancel: bool) -> None:
    api.endless, api.knows_cancel = True, knows_cancel
    with subprocess.Popen(
        [*HEEDING, sys.executable, "-m", "agentenv", "build", str(context), "--name", "app"],
        env={**os.environ, "E2B_API_URL": api.url, "E2B_API_KEY": KEY},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:  # it waits for the end now
                if "finalize" in line:
                    break
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            assert process.wait() == 130
        finally:
            process.kill()
    assert [built.cancelled for built in api.builds.values()] == [knows_cancel]
    assert ("cancelled" if knows_cancel else "the node goes on with build") in said


def test_the_overview_needs_no_parser() -> None:
    program = "import sys; from agentenv.cli import main; import click\n"
    program += "assert 'agentenv.cli.build' not in sys.modules and 'e2b_dockerfile_utils' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_building_needs_nothing_of_a_server() -> None:
    program = "import sys, agentenv.cli.building, agentenv.dockerfile.convert\n"
    program += (
        "assert not {'fastapi', 'uvicorn', 'numpy', 'sqlite3', 'asyncio'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


PRIVATE = "FROM python:3.12 AS tools\nFROM ghcr.io/owner/base\nCOPY --from=tools /a /a\n"


def registry_of(api: BuildApi, name: str) -> object:
    body = api.of(name).body
    assert body is not None
    return body.get("fromImageRegistry")


def test_credentials_go_with_the_one_registry(
    api: BuildApi, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENV_REGISTRY_PASSWORD", "from the environment")
    assert build(api, str(context), "--name", "app", "--registry-user", "me").exit_code == 0
    given = {"type": "registry", "username": "me", "password": "from the environment"}
    assert registry_of(api, "app") == given

    (context / "Dockerfile").write_text(PRIVATE)
    unclear = fault(build(api, str(context), "--name", "two", "--username", "me"))
    assert "docker.io, ghcr.io" in unclear.message
    wrong = build(api, str(context), "--name", "two", "--username", "me", "--registry", "quay.io")
    assert "docker.io, ghcr.io" in fault(wrong).message
    done = build(api, str(context), "--name", "two", "--username", "me", "--registry", "ghcr.io")
    assert done.exit_code == 0, done.output
    assert registry_of(api, "two") == given
    (inner,) = [built for built in api.builds.values() if "stage" in built.name]
    assert inner.body is not None
    assert "fromImageRegistry" not in inner.body
    assert "from the environment" not in done.output


def test_a_password_from_standard_input(api: BuildApi, context: Path) -> None:
    arguments = ["build", str(context), "--name", "app", "--username", "me", "--password-stdin"]
    environment = {"E2B_API_URL": api.url, "E2B_API_KEY": KEY}
    done = CliRunner().invoke(cli, arguments, env=environment, input="typed\n")
    assert done.exit_code == 0, done.output
    assert registry_of(api, "app") == {"type": "registry", "username": "me", "password": "typed"}
    without = build(api, str(context), "--name", "app", "--username", "me")
    assert "go together" in fault(without).message
    shown = build(api, str(context), "--name", "app", "--dry-run", "--username", "me", "--password-stdin")
    assert "fromImageRegistry" not in shown.output


def test_what_docker_login_left(
    api: BuildApi, context: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    auths: dict[str, object] = {"ghcr.io": {"auth": base64.b64encode(b"me:stored").decode()}}
    (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
    (context / "Dockerfile").write_text(PRIVATE)
    assert build(api, str(context), "--name", "not-asked").exit_code == 0
    assert registry_of(api, "not-asked") is None
    assert build(api, str(context), "--name", "app", "--docker-login").exit_code == 0
    assert registry_of(api, "app") == {"type": "registry", "username": "me", "password": "stored"}
    auths["ghcr.io"] = {"identitytoken": "t"}
    (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
    assert "identity token" in fault(build(api, str(context), "--name", "app", "--docker-login")).message


def test_process_1_can_be_chosen(api: BuildApi, context: Path) -> None:
    assert build(api, str(context), "--name", "app", "--init", "systemd").exit_code == 0
    body = api.of("app").body
    assert body is not None
    assert body["init"] == "systemd"


def test_a_definition_that_comes_with_the_program(
    api: BuildApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = build(api, "code-interpreter-v1", "--memory", "4096")
    assert done.exit_code == 0, done.output
    assert api.of("code-interpreter-v1").asked == {
        "name": "code-interpreter-v1",
        "cpuCount": 2,
        "memoryMB": 4096,
    }
    (tmp_path / "code-interpreter-v1").mkdir()  # a path of that name is meant instead
    assert "there is no code-interpreter-v1/Dockerfile" in str(fault(build(api, "code-interpreter-v1")))
