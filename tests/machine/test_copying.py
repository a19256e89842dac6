"""Files between here and real sandboxes, by the program."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from e2b import Sandbox

from support.aenv_command import AenvCommand
from support.running import RunningNode

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("host_audit")]

LARGE = 24 * 1024 * 1024


@pytest.fixture
def aenv(node: RunningNode, tmp_path: Path) -> AenvCommand:
    return AenvCommand(node, tmp_path)


@pytest.fixture
def sandbox(sandbox_factory: Callable[..., Sandbox]) -> str:
    return sandbox_factory(network={"allow_public_traffic": False}).sandbox_id


def test_a_tree_there_and_back(aenv: AenvCommand, sandbox: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/run").write_text("#!/bin/sh\necho ran\n")
    (tree / "sub/run").chmod(0o750)
    os.utime(tree / "sub/run", ns=(1, 1_234_567_890_123_456_789))
    os.link(tree / "sub/run", tree / "hard")
    (tree / "link").symlink_to("sub/run")
    (tree / "dead").symlink_to("/no/where")
    aenv("upload", sandbox, str(tree), "project")
    listed = aenv.text(
        "exec", sandbox, "stat -c '%n %a %h %.9Y %U' project/sub/run; readlink project/*; project/link"
    )
    assert listed.split("\n") == [
        "project/sub/run 750 2 1234567890.123456789 user",
        "/no/where",
        "sub/run",
        "ran",
        "",
    ]
    aenv("download", sandbox, "project/.", str(tmp_path / "back"))
    assert sorted(os.listdir(tmp_path / "back")) == ["dead", "hard", "link", "sub"]
    found = (tmp_path / "back/sub/run").stat()
    assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode), found.st_nlink) == (
        1_234_567_890_123_456_789,
        0o750,
        2,
    )

    assert aenv("cp", "-", f"{sandbox}:streamed", given=b"by a pipe").stdout == b""
    assert aenv("cp", f"{sandbox}:streamed", "-").stdout == b"by a pipe"
    refused = aenv("cp", str(tree / "hard"), f"{sandbox}:/etc/", status=1).stderr
    assert b"Permission denied" in refused
    aenv("cp", "-u", "root", str(tree / "hard"), f"{sandbox}:/etc/")
    assert b"No such file" in aenv("download", sandbox, "nothing", status=1).stderr
    assert b"no such file" in aenv("upload", sandbox, str(tmp_path / "nothing"), status=3).stderr


def test_large_files(
    aenv: AenvCommand, sandbox: str, sandbox_factory: Callable[..., Sandbox], tmp_path: Path
) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(LARGE))
    aenv("limits", "set", sandbox, "--rx", str(LARGE // 8))  # or it is there before it can be killed
    part = "ls -l .large.*.aenv-part | awk '{print $5}'"
    with aenv.begin("cp", "-q", str(large), f"{sandbox}:large") as command:
        while int(aenv.text("exec", sandbox, part + "; echo 0").split()[0]) < LARGE // 8:
            assert command.poll() is None
        command.send_signal(signal.SIGKILL)
        command.wait()
    aenv("limits", "set", sandbox)
    assert aenv.text("exec", sandbox, "ls large; true") == ""
    aenv("cp", str(large), f"{sandbox}:large")
    assert aenv.text("exec", sandbox, "ls -A | grep large") == "large\n"
    other = sandbox_factory().sandbox_id
    aenv("cp", f"{sandbox}:large", f"{other}:/tmp/copied")
    aenv("download", other, "/tmp/copied", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
