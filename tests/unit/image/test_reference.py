"""The grammar of references to images in registries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InvalidRequest
from agentenv.image.reference import Reference, parse

DIGEST = "sha256:" + "0a" * 32

CASES = {
    "alpine": Reference("docker.io", "library/alpine", "latest"),
    "python:3.13-slim": Reference("docker.io", "library/python", "3.13-slim"),
    "owner/name": Reference("docker.io", "owner/name", "latest"),
    "docker.io/alpine": Reference("docker.io", "library/alpine", "latest"),
    "index.docker.io/owner/name:1": Reference("docker.io", "owner/name", "1"),
    "ghcr.io/a/b/c:v1": Reference("ghcr.io", "a/b/c", "v1"),
    "localhost/a": Reference("localhost", "a", "latest"),
    "localhost:5000/a:b": Reference("localhost:5000", "a", "b"),
    "host:5000/a": Reference("host:5000", "a", "latest"),
    "127.0.0.1:5000/a/b": Reference("127.0.0.1:5000", "a/b", "latest"),
    "[::1]:5000/a": Reference("[::1]:5000", "a", "latest"),
    f"alpine@{DIGEST}": Reference("docker.io", "library/alpine", None, DIGEST),
    f"alpine:3@{DIGEST}": Reference("docker.io", "library/alpine", "3", DIGEST),
    "a__b/c-d.e--f": Reference("docker.io", "a__b/c-d.e--f", "latest"),
}


@pytest.mark.parametrize("text", CASES)
def test_forms(text: str) -> None:
    assert parse(text) == CASES[text]
    assert parse(str(CASES[text])) == CASES[text]


def test_a_digest_is_asked_for_before_a_tag() -> None:
    assert parse(f"a:1@{DIGEST}").wanted == DIGEST
    assert parse("a:1").wanted == "1"


@pytest.mark.parametrize(
    "text",
    ["", "Alpine", "a:", "a@", "a@sha256:abc", f"a@sha512:{'a' * 128}", "a b", "a/", "/a", "a//b", "a:b:c",
     "ghcr.io/", "ghcr.io/A", "-x.io/a", "a..b/c d", "a:" + "t" * 129, "host.io/" + "a" * 255, "a/../b",
     "user:pw@host.io/a", "http://host.io/a", "a\n", "host.io:123456/a", "a___b"],
)  # fmt: skip
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an image's name"):
        parse(text)


@given(st.text(alphabet="aA0.:/@-_[]\n sha256", max_size=40))
def test_any_text_is_refused_or_understood_for_good(text: str) -> None:
    try:
        found = parse(text)
    except InvalidRequest:
        return
    assert parse(str(found)) == found
    assert ".." not in found.repository
    assert not set(str(found)) & set("\n ?#%\\")
