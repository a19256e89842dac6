"""What a message may say of drives, and what is found of them where there are none. Mounting is tried in a
real guest."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.guest import drives
from agentenv.guest.connect import ConnectError
from agentenv.guest.drives import DriveFailed, Wanted


def drive(**given: Any) -> dict[str, Any]:
    return {"name": "data", "serial": "spare0", "path": "/mnt/data", **given}


def test_drives_that_others_may_lie_below_come_first() -> None:
    found = drives.wanted_of({"drives": [drive(path="/mnt/a/b/c"), drive(path="/srv", readOnly=False)]})
    assert [(each.path, each.read_only, each.part) for each in found] == [
        ("/srv", False, ""),
        ("/mnt/a/b/c", True, ""),
    ]
    assert drives.wanted_of({}) == []


@pytest.mark.parametrize(
    "message",
    [
        {"drives": {}},
        {"drives": ["data"]},
        {"drives": [drive(path="mnt")]},
        {"drives": [drive(serial="")]},
        {"drives": [drive(readOnly="yes")]},
    ],
)
def test_what_is_not_of_the_right_form_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ConnectError):
        drives.wanted_of(message)


def test_a_place_that_the_machine_has_not_is_told() -> None:
    with pytest.raises(DriveFailed, match="drive 'data': the machine has no place 'nowhere'"):
        drives.mount(Wanted(drive(serial="nowhere")))


def test_nothing_of_this_host_is_taken_for_a_drive() -> None:
    assert drives.written() == []


def test_places_are_read_as_the_kernel_writes_them() -> None:
    assert drives._plain(r"/mnt/a\040b\134c") == r"/mnt/a b\c"
    assert any(place == "/" for _, place, _ in drives._mounts())
