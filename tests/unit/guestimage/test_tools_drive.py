"""The tools drive: what is in it runs without anything of the host, and its filesystem is sound."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.guestimage import busybox, drive, tools
from agentenv.guestimage.mounted import MOUNT_POINT


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    box = busybox.installed()
    if box is None:
        pytest.skip("needs a static busybox")
    directory = tmp_path_factory.mktemp("tools")
    tools.fill(directory, box)
    yield directory
    shutil.rmtree(directory)


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(str(tree / "bin/agentenv"), "--argv0", str(tree / "bin/python3")),
        *("--library-path", str(tree / "lib"), str(tree / "bin/python3")),
    ]
    return subprocess.run([*command, "-I", "-S", *arguments], capture_output=True, text=True, check=False)


def test_the_interpreter_uses_only_the_drive(tree: Path) -> None:
    text = (
        "import sys, os, agentenv.guest.main\n"
        "maps = {l.split()[-1] for l in open('/proc/self/maps') if '/' in l}\n"
        "print(sys.version_info[:2]); print('\\n'.join(sys.path + sorted(maps)))"
    )
    done = python(tree, "-c", text)
    assert done.returncode == 0, done.stderr
    version, *paths = done.stdout.splitlines()
    assert version == str(sys.version_info[:2])
    # the C library looks for tables of languages in the image, which are data
    tables = ("/locale/", "/gconv/gconv-modules.cache")
    strangers = [
        path for path in paths if not path.startswith(str(tree)) and not any(name in path for name in tables)
    ]
    assert strangers == []


def test_the_agent_starts_as_its_command_says(tree: Path) -> None:
    version = tools.interpreter().version
    program = tools.command(version)[-2]
    assert program.startswith(f"{MOUNT_POINT}/")
    done = python(tree, str(tree / program.removeprefix(f"{MOUNT_POINT}/")), "--no-such-option")
    assert done.returncode == 1
    assert "usage" in done.stderr


def test_there_are_no_sources_and_no_paths_of_this_host(tree: Path) -> None:
    assert list(tree.rglob("*.py")) == []
    version = f"python{tools.interpreter().version}"
    for compiled in (tree / "lib" / version / "agentenv").rglob("*.pyc"):
        assert str(Path(tools.__file__).parents[2]).encode() not in compiled.read_bytes()


def test_compiling_twice_gives_the_same(tree: Path, tmp_path: Path) -> None:
    source = tools.agent_sources()[-1]
    for name in ("one", "two"):
        tools.compile_to(source, tmp_path / name / source.name, f"agentenv/{source.name}")
    compiled = source.with_suffix(".pyc").name
    assert (tmp_path / "one" / compiled).read_bytes() == (tmp_path / "two" / compiled).read_bytes()


def test_the_filesystem_is_sound_and_roots(tree: Path, tmp_path: Path) -> None:
    image = tmp_path / "tools"
    drive.make(tree, image)
    subprocess.run(["e2fsck", "-f", "-n", image], check=True, capture_output=True)
    shown = subprocess.run(
        ["debugfs", "-R", "stat /bin/python3", image], capture_output=True, text=True, check=True
    ).stdout
    assert "User:     0   Group:     0" in shown
    assert "Mode:  0755" in shown


def test_the_same_tree_gives_the_same_filesystem(tmp_path: Path) -> None:
    images = []
    for name in ("one", "two"):
        small = tmp_path / name
        (small / "bin").mkdir(parents=True)
        (small / "bin/file").write_bytes(b"content")
        image = tmp_path / f"{name}.image"
        drive.make(small, image)
        images.append(image.read_bytes())
        subprocess.run(["e2fsck", "-f", "-n", image], check=True, capture_output=True)
    assert images[0] == images[1]
