"""What is said when packages cannot be installed, and that nothing stays."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from pathlib import Path

import pytest

from agentenv.errors import AenvError, HostFault, HostIncapable, InvalidRequest, StoreFull
from agentenv.image import bootstrap
from agentenv.image.aptsource import AptSource
from agentenv.image.bootstrap import Host, explain, failure_of
from agentenv.image.programs import Outcome, in_thread, run

NOTHING = Host((), ())

NO_SUITE = """\
Err:3 http://m.example/debian bookwurm Release
  404  Not Found [IP: 192.0.2.1 80]
E: The repository 'http://m.example/debian bookwurm Release' does not have a Release file.
E: apt-get update failed
"""
OFFLINE = """\
Err:1 http://m.example/debian bookworm InRelease
  Temporary failure resolving 'm.example'
E: Unable to fetch some archives
"""


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (NO_SUITE, "suite"),
        (OFFLINE, "transient"),
        ("E: Failed to fetch http://x  Connection timed out [IP: 1]", "transient"),
        ("E: Failed to fetch http://x/y.deb  503  Service Unavailable", "transient"),
        ("E: Failed to fetch x  Hash Sum mismatch", "transient"),
        ("dpkg: error: No space left on device", "space"),
        ("E: You don't have enough free space in /var/cache/apt/archives/.", "space"),
        ("E: Unable to locate package nonsuch", "package"),
        ("Segmentation fault", "other"),
    ],
)
def test_kinds(output: str, kind: str) -> None:
    assert failure_of(output) == kind


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        (Outcome(1, NO_SUITE), InvalidRequest, "no suite"),
        (Outcome(1, OFFLINE), HostFault, "cannot be reached"),
        (Outcome(1, "x: No space left on device"), StoreFull, "space"),
        (Outcome(1, "E: Unable to locate package p"), InvalidRequest, "locate package p"),
        (Outcome(2, "odd\nlast words"), HostFault, "last words"),
        (Outcome(None, ""), HostIncapable, "mmdebstrap"),
        (
            Outcome(127, "failed to execute mmdebstrap: No such file or directory"),
            HostIncapable,
            "apt-get",
        ),
    ],
)
def test_explanations(outcome: Outcome, error: type[AenvError], words: str) -> None:
    found = explain(failure_of(outcome.stderr), "bookworm", outcome, NOTHING)
    assert type(found) is error
    assert words in str(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="mmdebstrap's root mode")
async def test_a_mirror_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = AptSource("http://127.0.0.1:9/debian", ("bookworm", "bookworm-security"), ("main",))
    host = Host((mirror,), ('Acquire::Retries "0";',))

    async def read() -> Host:
        return host

    monkeypatch.setattr(bootstrap.Host, "read", read)
    monkeypatch.setattr(bootstrap, "RETRY_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(bootstrap, "ATTEMPTS", 2)
    told: list[str] = []
    with pytest.raises(HostFault, match="apt-get update"):
        await bootstrap.bootstrap("bookworm", tmp_path / "tree", bootstrap.MINIMAL, tmp_path, told.append)
    assert "the mirror did not answer as it should; trying again" in told


def test_a_finished_tree_is_thinned_out(tmp_path: Path) -> None:
    kept = ["usr/share/doc/a/copyright", "usr/share/locale/locale.alias", "usr/bin/a", "etc/resolv.conf"]
    gone = ["usr/share/doc/a/changelog.gz", "usr/share/man/man1/a.1", "usr/share/locale/de/a.mo",
            "etc/apt/apt.conf.d/99mmdebstrap", "var/log/dpkg.log"]  # fmt: skip
    for name in kept + gone:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("of the host")
    (tmp_path / "usr/share/doc/b").symlink_to("a")
    bootstrap._prepare(tmp_path, bootstrap.MINIMAL)
    assert all((tmp_path / name).exists() for name in kept)
    assert not any((tmp_path / name).exists() for name in gone)
    assert not (tmp_path / "usr/share/man/man1").exists()
    assert (tmp_path / "etc/resolv.conf").read_text() == ""
    assert (tmp_path / "etc/hostname").read_text() == "localhost\n"


async def test_a_cancelled_program_is_gone_with_its_children(tmp_path: Path) -> None:
    started = asyncio.Event()
    pids: list[int] = []

    def on_line(line: str) -> None:
        pids.append(int(line))
        started.set()

    task = asyncio.create_task(run(["sh", "-c", "sleep 1000 & echo $!; wait"], on_line=on_line))
    await started.wait()
    child = os.pidfd_open(pids[0])
    try:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # readable once it has ended; the kill is done, the dying may take a busy kernel a moment
        assert select.select([child], [], [], 30)[0]
    finally:
        os.close(child)


async def test_a_cancelled_call_waits_for_its_thread() -> None:
    begun, stopped, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        stopped.wait()
        ended.set()

    task = asyncio.create_task(in_thread(work, stopped.set))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_output_is_kept_to_the_last_lines() -> None:
    outcome = await run(["sh", "-c", "seq 1000 >&2; printf tail; exit 3"])
    assert outcome.status == 3
    assert outcome.stderr.startswith("802\n")
    assert outcome.stderr.endswith("1000\ntail")


async def test_a_program_that_is_not_there() -> None:
    assert (await run(["no-such-program-here"])).status is None
