"""The two commands as far as they can be tried without a fresh machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").iterdir())


def bash(lines: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Lines of bash after `common.sh` was read, as the scripts read it."""
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; . {ROOT}/scripts/common.sh\n{lines}"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_parse(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(script, os.X_OK) == (script.suffix != ".sh")


def test_scripts_are_sound() -> None:
    """By shellcheck, which knows what a shell makes of quotes, patterns and failures."""
    done = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS, ROOT / ".ci/run"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    aenv = str(Path(sys.executable).parent / "aenv")  # a program that is not there would be complained of
    copies = [tmp_path / unit.name for unit in (ROOT / "packaging").glob("*.service")]
    assert len(copies) == 2
    for copy in copies:
        text = (ROOT / "packaging" / copy.name).read_text()
        copy.write_text(text.replace("/opt/agentenv/current/bin/aenv", aenv))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *copies], capture_output=True, text=True, check=False
    )
    told = [line for line in done.stderr.splitlines() if "agentenv" in line]
    assert (done.returncode, told) == (0, [])


def test_the_unit_has_no_view_of_the_filesystem_of_its_own() -> None:
    """A sandbox's network namespace is a mount, and the next life of the node must find it."""
    unit = (ROOT / "packaging/agentenv.service").read_text()
    given = {line.partition("=")[0] for line in unit.splitlines() if line and line[0] not in "#["}
    assert {"KillMode", "Delegate", "CapabilityBoundingSet"} <= given
    apart = re.compile(
        r"Protect(System|Home|Proc|Kernel\w+|ControlGroups|Hostname)|Private\w+|\w+Paths|Mount\w+|Root\w+"
        r"|(Bind|Temporary)\w+|DynamicUser|\w+Directory"
    )
    assert [each for each in given if apart.fullmatch(each)] == []


def test_the_page_on_installation_counts_the_capabilities_of_the_unit() -> None:
    unit = (ROOT / "packaging/agentenv.service").read_text()
    names = " ".join(re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)).split()
    assert f"it has {len(set(names))} capabilities" in (ROOT / "docs/guides/installation.md").read_text()


def test_the_readme_names_both_commands_on_its_first_screen() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
    assert "scripts/quickstart" in first
    assert "scripts/test" in first


def test_the_packages_to_install_by_hand_are_those_that_quickstart_installs() -> None:
    installed = set(bash('echo "${system_packages[@]}"').stdout.split()) | {"qemu-system-x86"}
    text = (ROOT / "docs/guides/operations.md").read_text()
    by_hand = re.search(r"apt-get install ((?:[^#\n]*\\\n)*[^#\n]*)", text)
    assert by_hand is not None
    assert set(by_hand[1].replace("\\\n", " ").split()) == installed


def test_too_little_space_is_told_with_a_remedy(tmp_path: Path) -> None:
    done = bash(f"need_space {tmp_path}/not/yet/there 999999999 'a great deal'")
    assert done.returncode == 1
    assert f"{tmp_path}/not/yet/there has " in done.stderr
    assert "a great deal takes about 999999999 MiB" in done.stderr
    assert "AENV_HOME" in done.stderr


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    """A configuration of apt of our own, with nothing fetched yet: its sources go into `sources.list`."""
    (tmp_path / "parts").mkdir()
    lists = tmp_path / "lists"
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{tmp_path}/sources.list"; Dir::Etc::SourceParts "{tmp_path}/parts";'
        f' Dir::State::Lists "{lists}";'
    )
    return tmp_path


def archive(apt: Path, suite: str) -> str:
    done = bash(f"archive {suite}", APT_CONFIG=str(apt / "apt.conf"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_mirror_is_known_before_anything_was_fetched(apt: Path) -> None:
    (apt / "sources.list").write_text(
        "deb http://other.test/debian bookworm-updates main\n"
        "deb http://mirror.test/debian bookworm main contrib\n"
        "# deb http://mirror.test/debian bookworm-backports main\n"
    )
    assert archive(apt, "bookworm") == "http://mirror.test/debian\n"
    assert archive(apt, "bookworm-backports") == ""


def test_mirror_lists_of_cloud_images_are_taken_as_they_are(apt: Path) -> None:
    (apt / "parts/debian.sources").write_text(
        "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\nSuites: bookworm bookworm-backports\n"
        "Components: main\n"
    )
    assert archive(apt, "bookworm-backports") == "mirror+file:/etc/apt/mirrors/debian.list\n"


def test_an_output_is_shown_only_of_what_failed() -> None:
    assert bash("quietly echo well").stderr == ""
    done = bash("quietly sh -c 'echo because; exit 3'")
    assert (done.returncode, done.stderr) == (3, "because\n")
