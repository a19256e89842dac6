"""Which QEMU will do."""

from __future__ import annotations

import pytest

from agentenv.errors import HostIncapable
from agentenv.vmm.qemu import version


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)\nCopyright", (10, 0, 2)),
        ("QEMU emulator version 8.2.2 (Debian 1:8.2.2+ds-0ubuntu1)", (8, 2, 2)),
        ("QEMU emulator version 9.1", (9, 1, 0)),
        ("busybox v1.35", None),
        ("", None),
    ],
)
def test_versions_are_read(shown: str, expected: version.Version | None) -> None:
    assert version.parse(shown) == expected


def test_an_old_one_is_refused_with_the_reason() -> None:
    version.require((8, 2, 0), "tcg")
    with pytest.raises(HostIncapable, match=r"7\.2\.17 is too old.*cmpxchg16b"):
        version.require((7, 2, 17), "tcg")
