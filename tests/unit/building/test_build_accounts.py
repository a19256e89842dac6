"""The guest's programs that make users and directories, with an /etc and /home of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.building import programs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace")

PROGRAMS = Path(programs.__file__).parent


@pytest.fixture
def system(tmp_path: Path) -> Path:
    for name in ("etc", "home", "srv"):
        (tmp_path / name).mkdir()
    return tmp_path


def run(system: Path, name: str, *arguments: str) -> None:
    """Run a program where the given directories are /etc, /home and /srv."""
    mounts = "".join(f"mount --bind {system}/{each} /{each}; " for each in ("etc", "home", "srv"))
    command = f'umask 022; {mounts} exec "$@"'
    words = [sys.executable, "-I", "-S", str(PROGRAMS / f"{name}.py"), *arguments]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", command, "sh", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr.strip())


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_user_where_there_is_nothing(system: Path) -> None:
    run(system, "account", "user")
    root, user = lines(system / "etc/passwd")
    assert root.startswith("root:x:0:0:root:/root:/bin/")
    assert user.rpartition(":")[0] == "user:x:1000:1000::/home/user"
    assert lines(system / "etc/group") == ["root:x:0:", "user:x:1000:"]
    assert not (system / "etc/shadow").exists()
    home = (system / "home/user").stat()
    assert (home.st_uid, home.st_gid, home.st_mode & 0o777) == (1000, 1000, 0o755)
    before = (system / "etc/passwd").read_text()
    run(system, "account", "user")
    assert (system / "etc/passwd").read_text() == before


def test_a_user_beside_others(system: Path) -> None:
    (system / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh")
    (system / "etc/group").write_text("root:x:0:\nnode:x:1000:\nteam:x:1001:node\n")
    (system / "etc/shadow").write_text("root:*::0:::::\n")
    (system / "etc/shadow").chmod(0o640)
    (system / "etc/skel").mkdir()
    (system / "etc/skel/.profile").write_text("umask 022")
    run(system, "account", "team", "sudo")
    assert lines(system / "etc/passwd")[1:] == [
        "node:x:1000:1000::/home/node:/bin/sh",
        next(
            line for line in lines(system / "etc/passwd") if line.startswith("team:x:1002:1001::/home/team:")
        ),
    ]
    assert lines(system / "etc/shadow")[1].startswith("team:!:")
    assert (system / "etc/shadow").stat().st_mode & 0o777 == 0o640
    assert (system / "home/team/.profile").stat().st_uid == 1002
    assert not (system / "etc/sudoers.d").exists(), "there is no sudo"


def test_sudo_where_there_is_one(system: Path) -> None:
    (system / "etc/sudoers.d").mkdir()
    run(system, "account", "user", "sudo")
    run(system, "account", "user", "sudo")
    allowed = system / "etc/sudoers.d/90-user"
    assert lines(allowed) == ["user ALL=(ALL:ALL) NOPASSWD: ALL"]
    assert allowed.stat().st_mode & 0o777 == 0o440


@pytest.mark.parametrize("name", ["root", "1234"])
def test_root_and_numbers_are_left(system: Path, name: str) -> None:
    run(system, "account", name)
    assert os.listdir(system / "etc") == []


@pytest.mark.parametrize("name", ["; exit 1", "a b", "-x", "ä", "a:b", "x" * 33])
def test_names_that_cannot_be(system: Path, name: str) -> None:
    with pytest.raises(SystemExit, match="cannot be a user's name"):
        run(system, "account", name)
    assert os.listdir(system / "etc") == []


def test_login_shells_keep_a_path(system: Path) -> None:
    run(system, "profile", "/opt/it's/bin:/bin")
    assert os.listdir(system / "etc") == [], "there are no login shells"
    (system / "etc/profile").write_text(
        'PATH="/usr/bin:/bin"\nfor f in /etc/profile.d/*.sh; do . "$f"; done\n'
    )
    run(system, "profile", "/opt/it's/bin:/bin")
    script = f"mount --bind {system}/etc /etc; HOME=/nowhere PATH=/bin:/usr/bin exec sh -lc 'echo $PATH'"
    words = ["unshare", "--mount", "sh", "-ec", script]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "/opt/it's/bin:/bin\n"


def test_a_directory_and_those_above_it_belong_to_the_user(system: Path) -> None:
    (system / "etc/passwd").write_text("me:x:1234:1235::/home/me:/bin/sh\n")
    run(system, "workdir", "/srv/a/b", "me")
    for path in ("srv/a", "srv/a/b"):
        assert ((system / path).stat().st_uid, (system / path).stat().st_gid) == (1234, 1235)
    assert (system / "srv").stat().st_uid == 0
    run(system, "workdir", "/srv/a", "root")
    assert (system / "srv/a").stat().st_uid == 1234, "what is there stays as it is"


def test_a_directory_that_is_a_file(system: Path) -> None:
    (system / "srv/file").touch()
    with pytest.raises(SystemExit, match="/srv/file"):
        run(system, "workdir", "/srv/file", "root")
