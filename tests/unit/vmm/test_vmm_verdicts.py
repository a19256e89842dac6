"""What an end, a system error or a QEMU version means; all pure."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from agentenv.errors import AenvError, CapacityExceeded, HostFault, HostIncapable, StoreFull
from agentenv.vmm.qemu import faults, version
from agentenv.vmm.qemu.command import Accelerator
from agentenv.vmm.qemu.machine import verdict


@pytest.mark.parametrize(
    ("ended_here", "status", "cause", "words", "console", "reason", "detail"),
    [
        (True, -9, "", "", "", "ended", "by the node"),
        (True, 0, "guest-reset", "", "Kernel panic - x", "ended", "by the node"),
        (False, 0, "guest-shutdown", "", "login:", "shutdown", "the guest shut down"),
        (False, None, "guest-reset", "", "", "shutdown", "the guest rebooted"),
        (False, 0, "guest-reset", "", "a\r\nKernel panic - not syncing: x\r\nb", "crashed", "not syncing: x"),
        (False, 0, "guest-panic", "", "", "crashed", "guest-panic"),
        (False, 0, "host-signal", "", "", "crashed", "host-signal"),
        (False, -11, "", "", "one\r\ntwo\r\n", "crashed", "signal 11; last on the console: two"),
        (False, 1, "", "qemu: oops", "", "crashed", "status 1; its last words: qemu: oops"),
        (False, None, "", "", "", "crashed", "QEMU ended"),
    ],
)
def test_how_a_machine_ended(
    ended_here: bool, status: int | None, cause: str, words: str, console: str, reason: str, detail: str
) -> None:
    result = verdict(ended_here=ended_here, status=status, cause=cause, last_words=words, console=console)
    assert (result.reason, result.status) == (reason, status)
    assert detail in result.detail


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EMFILE, CapacityExceeded),
        (errno.ENOMEM, CapacityExceeded),
        (errno.EPERM, HostIncapable),
        (errno.ENODEV, HostFault),
    ],
)
def test_system_errors_are_typed_and_name_the_place(number: int, kind: type[AenvError]) -> None:
    error = faults.of_system(OSError(number, "as the kernel says", "/some/path"), "making a thing")
    assert type(error) is kind
    assert str(error).startswith("making a thing: as the kernel says (/some/path)")


@pytest.mark.parametrize(
    ("status", "words", "kind", "said"),
    [
        (1, "could not extend: No space left on device", StoreFull, "ended with 1"),
        (1, "cannot set up guest memory: Cannot allocate memory", CapacityExceeded, "ended with 1"),
        (-9, "", CapacityExceeded, "killed by signal 9"),
        (1, "failed to initialize kvm: Permission denied", HostIncapable, "AENV_ACCELERATOR=tcg"),
        (127, "setpriv: failed to execute /x: No such file", HostIncapable, "util-linux"),
        (1, "-machine what: unsupported", HostFault, "unsupported"),
        (None, "", HostFault, "it said nothing"),
    ],
)
def test_a_qemu_that_does_not_start_is_understood(
    status: int | None, words: str, kind: type[AenvError], said: str
) -> None:
    error = faults.of_early_end(status, words)
    assert type(error) is kind
    assert said in str(error)
    assert error.remedy


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright", (10, 0, 2)),
        ("QEMU emulator version 8.2", (8, 2, 0)),
        ("a wrapper\nQEMU emulator version 9.1.50", (9, 1, 50)),
        ("qemu-img version 8.2.0", None),
        ("", None),
    ],
)
def test_versions_are_read(output: str, found: version.Version | None) -> None:
    assert version.parse(output) == found


@pytest.mark.parametrize(("accelerator", "why"), [("tcg", "crash at random"), ("kvm", "/dev/kvm")])
def test_an_old_version_is_refused_with_the_reason(accelerator: Accelerator, why: str) -> None:
    with pytest.raises(HostIncapable, match=why) as caught:
        version.require((7, 2, 22), accelerator)
    assert "bookworm-backports" in str(caught.value)
    version.require((8, 2, 0), accelerator)
    version.require((10, 0, 2), accelerator)


def test_a_missing_program_is_refused() -> None:
    with pytest.raises(HostIncapable, match="AENV_QEMU"):
        version.locate("/nowhere/qemu")
    assert Path(version.locate("sh")).is_absolute()
