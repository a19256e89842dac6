"""`aenv build` on a real node: a Dockerfile with most of what there is, and what sandboxes of it are like."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

DOCKERFILE = """\
# syntax=docker/dockerfile:1
ARG BASE=template://base
FROM ${BASE} AS tools
USER root
RUN mkdir -p /out/bin && printf '#!/bin/sh\\necho tool\\n' >/out/bin/tool \\
    && chmod 755 /out/bin/tool \\
    && ln -s tool /out/bin/link

FROM ${BASE}
USER root
ARG VERSION=0
ENV APP=/srv/app PATH=/opt/bin:$PATH LITERAL='$HOME'
WORKDIR $APP
COPY --from=tools /out/bin/* /opt/bin/
COPY --chown=user:user --chmod=640 data/*.txt ./
COPY data/deep deep
COPY <<EOF <<'RAW' /etc/app/
version ${VERSION}
EOF
raw ${VERSION}
RAW
ADD archive.tar.gz /srv/
RUN <<EOF
set -e
tool >built
echo "$VERSION $LITERAL" >>built
EOF
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN ! (false | true) && echo ${BASH_VERSION:+bash} >>built
USER user
WORKDIR sub
CMD ["python3", "-m", "http.server", "8123"]
HEALTHCHECK CMD curl -sf http://127.0.0.1:8123/
"""


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("dockerfile")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    for name in ("data/a.txt", "data/b.txt", "data/deep/c", "data/deep/left.out"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "data/deep/link").symlink_to("../a.txt")
    (tmp_path / ".dockerignore").write_text("**/*.out\n")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("unpacked/file")
        member.uid, member.gid, member.mode, member.size = 1000, 0, 0o600, 2
        tar.addfile(member, io.BytesIO(b"ok"))
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return tmp_path


def build(node: RunningNode, context: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentenv", "build", str(context), "--name", "dockerfile-app", *arguments],
        env={**node.environment, **node.client_environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture
def sandbox_of(node: RunningNode) -> Iterator[Callable[[str], Sandbox]]:
    made: list[Sandbox] = []

    def make(template: str) -> Sandbox:
        made.append(node.sandbox(template))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.kill()


def test_a_dockerfile_becomes_a_template(
    node: RunningNode, context: Path, sandbox_of: Callable[[str], Sandbox]
) -> None:
    built = build(node, context, "--build-arg", "VERSION=7")
    assert built.returncode == 0, built.stderr
    sandbox = sandbox_of("dockerfile-app")

    def said(command: str) -> str:
        return sandbox.commands.run(command).stdout

    assert said("pwd; whoami") == "/srv/app/sub\nuser\n"
    assert said("cat ../built") == "tool\n7 $HOME\nbash\n"
    assert said("tool; link; echo $APP $LITERAL") == "tool\ntool\n/srv/app $HOME\n"
    assert said("cd ..; stat -c '%n %U:%G %a' a.txt b.txt deep/c") == (
        "a.txt user:user 640\nb.txt user:user 640\ndeep/c root:root 644\n"
    )
    assert said("ls ../deep; readlink ../deep/link") == "c\nlink\n../a.txt\n"
    assert said("cat /etc/app/EOF /etc/app/RAW") == "version 7\nraw ${VERSION}\n"
    assert said("stat -c '%u:%g %a' /srv/unpacked") == "0:0 755\n"
    assert "Directory listing" in said("curl -s http://127.0.0.1:8123/")
    assert said("echo ${VERSION-unset}") == "unset\n"
    owner = sandbox.commands.run("stat -c '%u:%g %a' /srv/unpacked/file", user="root").stdout
    assert owner == "1000:0 600\n"

    again = build(node, context, "--build-arg", "VERSION=7")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("CACHED all of it") == 2  # both stages
    assert "MiB sent" not in again.stderr
    with node.client() as client:
        listed = client.get("/v2/templates").raise_for_status().json()
    assert [name for each in listed for name in each["names"] if "stage" in name] == []


def test_a_step_that_fails_is_named_by_its_line(node: RunningNode, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM template://base\n\nRUN echo before; exit 3\nRUN echo never\n")
    failed = build(node, tmp_path)
    assert failed.returncode == 1
    assert "before" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("aenv: line 3: failed to run command")
    assert "never" not in failed.stderr
