"""The definition of `base`: what it adds to a tree, and that its shells start without running programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.template import base


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree as packages leave it, as far as it matters here."""
    for name in ("etc/sudoers.d", "etc/skel", "etc/profile.d", "root", "home", "usr/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    for name in ("etc/shadow", "etc/group", "etc/gshadow"):
        (tmp_path / name).touch(mode=0o640)
    (tmp_path / "etc/skel/.bash_logout").write_text("# bye\n")
    (tmp_path / "etc/profile.d/01-locale-fix.sh").write_text("eval $(locale-check C.UTF-8)\n")
    base.prepare(tmp_path)
    return tmp_path


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")


@as_root
def test_the_user(root: Path) -> None:
    assert (root / "etc/passwd").read_text().splitlines()[-1] == "user:x:1000:1000::/home/user:/bin/bash"
    assert (root / "etc/shadow").read_text().startswith("user:*:")
    home = root / "home/user"
    assert sorted(os.listdir(home)) == [".bash_logout", ".bashrc", ".profile"]
    for path in (home, *home.iterdir()):
        assert (path.stat().st_uid, path.stat().st_gid) == (1000, 1000)


@as_root
def test_sudo_without_a_password(root: Path) -> None:
    rule = root / "etc/sudoers.d/user"
    assert rule.stat().st_mode & 0o777 == 0o440
    assert rule.stat().st_uid == 0
    if visudo := shutil.which("visudo", path="/usr/sbin:/usr/bin"):
        subprocess.run([visudo, "-cf", str(rule)], check=True, capture_output=True)
    assert rule.read_text() == "user ALL=(ALL:ALL) NOPASSWD:ALL\n"


@as_root
def test_python_is_python3(root: Path) -> None:
    assert os.readlink(root / "usr/bin/python") == "python3"


@as_root
@pytest.mark.parametrize("shell", ["bash", "dash"])
@pytest.mark.parametrize("given", ["/opt/mine", None])
def test_login_shells_start_without_programs(root: Path, shell: str, given: str | None) -> None:
    """With an empty directory for a path, any program that they ran would be an error."""
    home = root / "home/user"
    (home / ".local/bin").mkdir(parents=True)
    program = shutil.which(shell)
    assert program
    begin = "unset PS1 PATH" if given is None else "unset PS1"
    script = f"{begin}; . {root}/etc/profile; . {home}/.profile; echo $PATH"
    done = subprocess.run(
        [program, "-ec", script],
        env={"HOME": str(home), "PATH": given or "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    own = given or "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert done.stdout == f"{home}/.local/bin:{own}\n"
    assert not (root / "etc/profile.d/01-locale-fix.sh").exists()


@as_root
def test_interactive_shells_too(root: Path) -> None:
    done = subprocess.run(
        [
            "/bin/bash",
            "--rcfile",
            str(root / "home/user/.bashrc"),
            "-ic",
            "alias ls; echo $HISTSIZE",
        ],
        env={"HOME": str(root / "home/user"), "PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout == "alias ls='ls --color=auto'\n1000\n"
    assert "not found" not in done.stderr


def test_what_is_expected_is_installed() -> None:
    wanted = {"bash", "coreutils", "procps", "iproute2", "python3", "curl", "git", "sudo"}
    assert wanted | {"ncurses-bin", "ca-certificates"} <= set(base.PACKAGES)


@pytest.mark.parametrize(
    ("release", "source"),
    [
        ("ID=debian\nVERSION_CODENAME=trixie\n", "debootstrap:trixie"),
        ('ID=ubuntu\nVERSION_CODENAME="noble"\n', "debootstrap:noble"),
        ("ID=fedora\n", "debootstrap:bookworm"),
        ("VERSION_CODENAME=sid\n", "debootstrap:bookworm"),
        ("", "debootstrap:bookworm"),
    ],
)
def test_the_source_is_the_hosts_own_suite(release: str, source: str) -> None:
    assert base.default_source(release) == source
