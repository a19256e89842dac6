"""Accounts from files of any kind, and programs for images of any kind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.guest import launch, users
from support.core_agent import OWN_MACHINE, core_agent, run, shell


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(users, "PASSWD", str(tmp_path / "passwd"))
    monkeypatch.setattr(users, "GROUP", str(tmp_path / "group"))
    return tmp_path


def test_accounts(files: Path) -> None:
    (files / "passwd").write_text(
        "# comment\nroot:x:0:0:root:/root:/bin/bash\n\nbroken:x\nodd:x:a:b:::\n+nis\n"
        "user:x:1000:1000:,,,:/home/user:/bin/zsh\nbare:x:7:8:::\n"
    )
    (files / "group").write_text(
        "root:x:0:\nuser:x:1000:user\nsudo:x:27:other,user\nvideo:x:44:user\nshort:x\n"
    )
    user = users.find("user")
    assert (user.uid, user.gid, user.groups, user.home, user.shell) == (
        1000,
        1000,
        (1000, 27, 44),
        "/home/user",
        "/bin/zsh",
    )
    bare = users.find("bare")
    assert (bare.groups, bare.home, bare.shell) == ((8,), "/", "/bin/sh")
    assert users.find("1000").name == "user"
    for name in ("broken", "odd", "+nis", "nis", "", "none"):
        with pytest.raises(KeyError):
            users.find(name)
    assert (users.by_uid(1000), users.by_uid(4), users.by_gid(27), users.by_gid(5)) == (
        "user",
        "4",
        "sudo",
        "5",
    )
    assert (users.gid_of("video"), users.gid_of("none")) == (44, None)


def test_a_number_that_nobody_has_is_an_account_as_in_docker(files: Path) -> None:
    (files / "passwd").write_text("user:x:1000:1000::/home/user:/bin/sh\n")
    stranger = users.find("12345")
    assert (stranger.name, stranger.uid, stranger.gid, stranger.home) == ("12345", 12345, 0, "/")
    assert (stranger.shell, stranger.groups) == ("/bin/sh", (0,))
    for name in ("4294967295", "-1", "1.5", "\u0663"):
        with pytest.raises(KeyError):
            users.find(name)


def test_without_files_there_is_root_alone(files: Path) -> None:
    assert (users.find("root").uid, users.find("root").home) == (0, "/root")
    assert (users.by_uid(0), users.by_gid(0), users.by_uid(1)) == ("root", "root", "1")
    with pytest.raises(KeyError):
        users.find("user")


def test_a_changed_file_is_read_again(files: Path) -> None:
    (files / "passwd").write_text("a:x:1:1::/:\n")
    assert users.find("a").uid == 1
    (files / "passwd").write_text("a:x:12:1::/:\n")
    assert users.find("a").uid == 12


def test_shells_of_images_without_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path)
    assert launch.resolve(["/bin/bash", "-l"], path) == ("/bin/bash", ["/bin/bash", "-l"])
    monkeypatch.setattr(os.path, "exists", lambda name: name == "/bin/sh")
    assert launch.resolve(["/bin/bash", "-l"], path) == ("/bin/sh", ["/bin/sh", "-l"])
    bash = tmp_path / "bash"
    bash.touch(0o755)
    assert launch.resolve(["/bin/bash", "-l"], path) == (str(bash), ["bash", "-l"])
    bash.unlink()
    monkeypatch.setattr(os.path, "exists", lambda name: name == launch.BUSYBOX)
    assert launch.resolve(["/bin/bash", "-l", "-c", "x"], path) == (launch.BUSYBOX, ["sh", "-l", "-c", "x"])
    monkeypatch.setattr(os.path, "exists", lambda name: False)
    for name in ("/bin/bash", "/bin/other", "other"):
        with pytest.raises(FileNotFoundError):
            launch.resolve([name], path)


@pytest.fixture
def empty_image(tmp_path: Path) -> Iterator[str]:
    """An agent that sees no passwd, group or bash."""
    hide = f"touch {tmp_path}/none && " + "".join(
        f"mount --bind {tmp_path}/none {path} && " for path in ("/etc/passwd", "/etc/group")
    )
    prefix = (*OWN_MACHINE, "sh", "-c", hide + 'exec "$@"', "sh")
    with core_agent(prefix=prefix) as url:
        yield url


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for namespaces")
def test_an_image_without_accounts(empty_image: str) -> None:
    assert shell(empty_image, "id -u; echo $HOME $USER; pwd").stdout == b"0\n/root root\n/root\n"
    assert run(empty_image, "true", user="0").code == 0
