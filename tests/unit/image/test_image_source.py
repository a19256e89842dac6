"""The grammar of SOURCE, and telling kinds of files apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InvalidRequest, NotFound
from agentenv.image.reference import Reference
from agentenv.image.source import (
    Bootstrap,
    Located,
    Remote,
    Source,
    compression_of,
    is_archive,
    parse,
    starts_archive,
)

DIGEST = "sha256:" + "0a" * 32
PRESENT = {"/i/layout", "/i/odd:name", "/i/layout:v1", "rootfs.tar", "oci"}


def exists(path: str) -> bool:
    return path in PRESENT


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("debootstrap:bookworm", Bootstrap("bookworm")),
        ("/i/layout", Located(Path("/i/layout"), None)),
        ("/i/layout:v2", Located(Path("/i/layout"), None, "v2")),
        ("/i/layout:v1", Located(Path("/i/layout:v1"), None)),
        ("/i/layout:example.org/app:v3", Located(Path("/i/layout"), None, "example.org/app:v3")),
        (f"/i/layout@{DIGEST}", Located(Path("/i/layout"), None, None, DIGEST)),
        (f"/i/layout:v2@{DIGEST}", Located(Path("/i/layout"), None, "v2", DIGEST)),
        ("/i/odd:name", Located(Path("/i/odd:name"), None)),
        ("/i/odd:name:tag", Located(Path("/i/odd:name"), None, "tag")),
        ("oci:/i/layout:v2", Located(Path("/i/layout"), "oci", "v2")),
        ("archive:rootfs.tar", Located(Path("rootfs.tar"), "archive")),
        ("rootfs:rootfs.tar", Located(Path("rootfs.tar"), "rootfs")),
        ("oci", Located(Path("oci"), None)),
        ("docker:alpine", Remote(Reference("docker.io", "library/alpine", "latest"))),
        ("docker://ghcr.io/a/b:c", Remote(Reference("ghcr.io", "a/b", "c"))),
        ("docker:rootfs.tar", Remote(Reference("docker.io", "library/rootfs.tar", "latest"))),
        ("python:3.12", Remote(Reference("docker.io", "library/python", "3.12"), assumed=True)),
        ("localhost:5000/a", Remote(Reference("localhost:5000", "a", "latest"), assumed=True)),
    ],
)
def test_forms(source: str, meant: Source) -> None:
    assert parse(source, exists) == meant


@pytest.mark.parametrize(
    "source", ["debootstrap:", "debootstrap:../x", "debootstrap:a b", "", "oci:", "docker:", "docker://A"]
)
def test_forms_that_cannot_be(source: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(source, exists)


@pytest.mark.parametrize(
    "source", ["/nowhere", "./image", "image.tar", "image.tar.gz:v1", "oci:/nowhere", "oci:x"]
)
def test_what_can_only_be_a_path_and_is_none(source: str) -> None:
    with pytest.raises(NotFound, match="no such file"):
        parse(source, exists)


@given(st.text(max_size=60))
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        assert isinstance(parse(text, exists), Source)
    except (InvalidRequest, NotFound):
        pass


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("manifest.json", True),
        ("./index.json", True),
        ("blobs/", True),
        ("blobs/sha256/" + "ab" * 32, True),
        ("ab" * 32 + "/", True),
        ("ab" * 32 + ".json", True),
        ("./", False),
        ("bin", False),
        ("etc/manifest.json", False),
        ("blobsfeld", False),
    ],
)
def test_first_member(name: str, answer: bool) -> None:
    assert starts_archive(name) is answer


def test_archive_by_its_names() -> None:
    assert is_archive(["a/layer.tar", "manifest.json"])
    assert is_archive(["./oci-layout", "./index.json", "./blobs/x"])
    assert not is_archive(["oci-layout", "bin/sh"])
    assert not is_archive(["etc/manifest.json", "bin/sh"])


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"\x28\xb5\x2f\xfd\x00", "zstd"),
        (b"\x50\x2a\x4d\x18", "zstd"),
        (b"\xfd7zXZ\x00\x00", "xz"),
        (b"BZh9", "bzip2"),
        (b"./\x00\x00", "plain"),
        (b"", "plain"),
    ],
)
def test_compression(head: bytes, name: str) -> None:
    assert compression_of(head) == name
