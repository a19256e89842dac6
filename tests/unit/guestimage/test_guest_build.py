"""Building what a guest boots with, from a kernel made here: once, again, and after changes."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.errors import HostIncapable, InvalidRequest
from agentenv.guestimage import build, busybox, manifest, stdlib, tools
from agentenv.guestimage.steps import Report
from agentenv.records.database import Database

needs_busybox = pytest.mark.skipif(busybox.installed() is None, reason="needs a static busybox")


def kernel_image(release: str) -> bytes:
    """What looks like a bzImage from outside, and unpacks itself."""
    head = bytearray(4096)
    head[0x202:0x206] = b"HdrS"
    head[0x20E:0x210] = (0x200).to_bytes(2, "little")
    head[0x400 : 0x400 + len(release)] = release.encode()
    return bytes(head)


def agent(directory: Path, text: str = "print('agent')\n") -> list[Path]:
    """The sources of an agent that needs little."""
    (directory / "guest").mkdir(parents=True, exist_ok=True)
    files = [directory / "__init__.py", directory / "guest/__init__.py", directory / "guest/__main__.py"]
    for path, content in zip(files, ("", "", text), strict=True):
        path.write_text(content)
    return files


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    sources = agent(tmp_path / "agent")
    monkeypatch.setattr(tools, "agent_sources", lambda: sources)
    monkeypatch.setattr(stdlib, "ALWAYS", ())  # a drive that is soon made and never booted
    image = tmp_path / "vmlinuz"
    image.write_bytes(kernel_image("6.0.0-made-here"))
    return Settings(home=tmp_path / "home", kernel=image)


def built(settings: Settings) -> tuple[tuple[str, ...], list[Report]]:
    reports: list[Report] = []
    return build.build(settings, reports.append).made, reports


@needs_busybox
def test_everything_is_made_and_found(settings: Settings) -> None:
    made, reports = built(settings)
    assert made == ("busybox", "kernel", "initramfs", "tools")
    assert [(r.step, r.state) for r in reports if r.state != "begun"] == [(name, "done") for name in made]
    files = build.load(settings)
    assert files.kernel.read_bytes() == kernel_image("6.0.0-made-here")
    assert gzip.decompress(files.initramfs.read_bytes().rstrip(b"\0") + b"\0" * 8)[:6] == b"070701"
    assert files.tools.stat().st_mode & 0o777 == 0o644
    assert build.stale(settings) == []
    assert not list(settings.guest_dir.glob(".build-*"))


@needs_busybox
def test_a_second_time_changes_nothing(settings: Settings) -> None:
    built(settings)
    before = {path: path.lstat().st_mtime_ns for path in settings.guest_dir.rglob("*")}
    made, reports = built(settings)
    assert made == ()
    assert {report.state for report in reports} == {"unchanged"}
    after = {path: path.lstat().st_mtime_ns for path in settings.guest_dir.rglob("*")}
    assert {path: when for path, when in after.items() if path.name != ".lock"} == {
        path: when for path, when in before.items() if path.name != ".lock"
    }


@needs_busybox
def test_a_changed_agent_makes_the_tools_drive_stale(settings: Settings, tmp_path: Path) -> None:
    built(settings)
    old = build.load(settings)
    agent(tmp_path / "agent", "print('another')\n")
    assert build.stale(settings) == ["tools"]
    assert built(settings)[0] == ("tools",)
    assert build.stale(settings) == []
    assert build.load(settings).tools != old.tools
    assert old.tools.is_file()  # a running node still boots with it


@needs_busybox
def test_only_the_newest_few_are_kept(settings: Settings, tmp_path: Path) -> None:
    for number in range(5):
        agent(tmp_path / "agent", f"print({number})\n")
        built(settings)
    assert len(list(settings.guest_dir.glob("tools-*"))) == 3
    assert build.load(settings).tools.is_file()


@needs_busybox
def test_what_a_snapshot_was_made_with_is_kept_and_found(settings: Settings, tmp_path: Path) -> None:
    def change(text: str) -> None:
        agent(tmp_path / "agent", text)
        built(settings)

    built(settings)
    first = build.load(settings)
    fingerprint = {
        name: manifest.digest_file(getattr(first, name)) for name in ("kernel", "initramfs", "tools")
    }
    database = Database(settings.database)
    with database.transaction() as cursor:
        cursor.execute(
            "INSERT INTO snapshots VALUES ('s1', 'pause', NULL, NULL, 'b', 1, NULL, NULL, ?)",
            (json.dumps({"fingerprint": {"vcpus": "1", **fingerprint}}),),
        )
        cursor.execute("INSERT INTO snapshots VALUES ('s2', 'pause', NULL, NULL, 'b', 1, NULL, NULL, '{}')")
    for number in range(6):
        change(f"print({number})\n")
    assert first.tools.exists()
    assert build.load(settings).tools != first.tools
    assert build.load(settings, fingerprint) == first
    assert build.load(settings, {**fingerprint, "tools": "0" * 64}) == build.load(settings)
    with database.transaction() as cursor:
        cursor.execute("DELETE FROM snapshots")
    database.close()
    change("print('again')\n")
    assert not first.tools.exists()
    assert build.load(settings, fingerprint) == build.load(settings)
    settings.database.write_bytes(b"no database")
    count = len(list(settings.guest_dir.glob("tools-*")))
    change("print('and again')\n")
    assert len(list(settings.guest_dir.glob("tools-*"))) == count + 1


@needs_busybox
def test_another_kernel_makes_another_initramfs(settings: Settings) -> None:
    built(settings)
    assert settings.kernel is not None
    settings.kernel.write_bytes(kernel_image("6.0.1-made-here-too"))
    assert build.stale(settings) == ["kernel"]
    assert "kernel" in built(settings)[0]
    made = manifest.read(settings.guest_dir)
    assert made is not None
    assert made.release == "6.0.1-made-here-too"


@needs_busybox
def test_without_a_path_the_kernel_in_force_stays(settings: Settings) -> None:
    built(settings)
    later = Settings(home=settings.home)
    assert build.stale(later) == []
    assert built(later)[0] == ()


@needs_busybox
def test_a_lost_file_is_told_and_made_again(settings: Settings) -> None:
    built(settings)
    lost = build.load(settings).initramfs
    lost.unlink()
    with pytest.raises(HostIncapable, match="is gone") as caught:
        build.load(settings)
    assert caught.value.remedy == "run aenv setup"
    built(settings)
    assert build.load(settings).initramfs == lost


@needs_busybox
def test_a_failure_leaves_what_was(settings: Settings, tmp_path: Path) -> None:
    built(settings)
    before = manifest.read(settings.guest_dir)
    agent(tmp_path / "agent", "this is no Python\n")
    with pytest.raises(SyntaxError):
        built(settings)
    assert manifest.read(settings.guest_dir) == before
    assert not list(settings.guest_dir.glob(".build-*"))


def test_nothing_was_made_yet(tmp_path: Path) -> None:
    for call in (build.load, build.stale):
        with pytest.raises(HostIncapable, match="no guest files") as caught:
            call(Settings(home=tmp_path))
        assert caught.value.remedy == "run aenv setup"


@needs_busybox
def test_a_kernel_that_is_none(tmp_path: Path) -> None:
    bad = tmp_path / "text"
    bad.write_text("no kernel")
    with pytest.raises(InvalidRequest, match="is no Linux kernel image"):
        build.build(Settings(home=tmp_path / "home", kernel=bad))


@needs_busybox
def test_two_homes_can_share_their_files_by_links(settings: Settings, tmp_path: Path) -> None:
    built(settings)
    copy = tmp_path / "copy"
    shutil.copytree(settings.guest_dir, copy / "guest", copy_function=os.link, symlinks=True)
    other = Settings(home=copy, kernel=settings.kernel)
    assert build.stale(other) == []
    assert build.load(other).tools.samefile(build.load(settings).tools)
