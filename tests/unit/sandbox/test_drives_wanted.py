"""Which drives can be asked for, and how they are spelled."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agentenv.api import requests
from agentenv.api.models import ColdBody, CreateBodyV1
from agentenv.config import Settings
from agentenv.errors import InvalidRequest, NotImplementedYet
from agentenv.sandbox.drives import NewDrive, new_drive, require_room
from agentenv.snapshot.records import Attached

SETTINGS = Settings()


def wanted(*drives: dict[str, Any]) -> tuple[NewDrive, ...]:
    body = CreateBodyV1.model_validate({"templateID": "base", "attachedDrives": list(drives)})
    return requests.new_sandbox(body, SETTINGS).drives


def test_a_drive_is_read_only_and_below_mnt_unless_it_says_otherwise() -> None:
    assert wanted({"id": "data", "image": "debian:12"}) == (NewDrive("data", "debian:12", "/mnt/data"),)
    assert wanted(
        {
            "driveID": "w",
            "source": {"image": "debian:12"},
            "readOnly": False,
            "mountPath": "/srv//w/",
            "subPath": "a/./b/",
            "diskSizeMB": 4096,
        }
    ) == (NewDrive("w", "debian:12", "/srv/w", False, "a/b", 4096),)
    assert new_drive("d", "i", part=".").part is None


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"id": ""}, "id"),
        ({"id": "a/b"}, "id"),
        ({"id": ".."}, "id"),
        ({"id": "a" * 65}, "id"),
        ({"image": ""}, "image"),
        ({"mountPath": "srv"}, "absolute"),
        ({"mountPath": ""}, "absolute"),
        ({"mountPath": "//srv"}, "absolute"),
        ({"mountPath": "/srv/../etc"}, r"\.\."),
        ({"mountPath": "/srv/a\nb"}, "printable"),
        ({"mountPath": "/"}, "system"),
        ({"mountPath": "/./"}, "system"),
        ({"mountPath": "/proc"}, "system"),
        ({"mountPath": "/sys/x"}, "system"),
        ({"mountPath": "/dev/"}, "system"),
        ({"mountPath": "/run/user"}, "system"),
        ({"mountPath": "/.agentenv/bin"}, "system"),
        ({"mountPath": "/etc"}, "system"),
        ({"subPath": ""}, "subPath"),
        ({"subPath": "/a"}, "subPath"),
        ({"subPath": "a/../b"}, r"\.\."),
        ({"diskSizeMB": 2048}, "read-only"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], word: str) -> None:
    drive = {"id": "data", "image": "debian:12", **given}
    with pytest.raises(InvalidRequest, match=rf"drive '.*{word}"):
        wanted(drive)


@pytest.mark.parametrize(
    "given", [{}, {"id": "x"}, {"image": "y"}, {"id": "x", "image": "y", "diskSizeMB": 0}]
)
def test_what_is_incomplete_is_refused_by_the_model(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        wanted(given)


def test_drives_that_cannot_be_together() -> None:
    one, two = new_drive("one", "i"), new_drive("two", "i")
    there = Attached("old", "i", "/mnt/two", (), 1)
    require_room([one, two])
    require_room([one], [there])
    for drives, present in (
        ([one, new_drive("one", "i", path="/srv")], ()),
        ([one, new_drive("x", "i", path="/mnt/one/")], ()),
        ([two], (there,)),
        ([new_drive("old", "i")], (there,)),
        ([new_drive(str(number), "i") for number in range(5)], ()),
        ([new_drive(str(number), "i") for number in range(4)], (there,)),
    ):
        with pytest.raises(InvalidRequest):
            require_room(drives, present)


def test_a_cold_create_is_of_an_image_and_of_a_size() -> None:
    body = ColdBody(image="python:3.12", cpuCount=2, memoryMB=1024, allowInternetAccess=True)
    request = requests.new_sandbox(body, SETTINGS)
    assert (request.image, request.shape.vcpus, request.shape.memory_mib) == ("python:3.12", 2, 1024)
    assert (request.shape.disk_mib, request.network.internet, request.secure) == (None, True, False)
    assert request.timeout_s == SETTINGS.timeout_v1_s
    with pytest.raises(NotImplementedYet, match="extraBootArgs"):
        requests.new_sandbox(ColdBody(image="a", extraBootArgs="quiet"), SETTINGS)
    for size in ({"cpuCount": 0}, {"memoryMB": 64}, {"diskSizeMB": 0}, {"cpuCount": 1000}):
        with pytest.raises(ValidationError):
            ColdBody.model_validate({"image": "a", **size})
