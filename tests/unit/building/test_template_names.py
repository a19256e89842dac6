"""References to templates: names, namespaces and tags."""

from __future__ import annotations

import pytest

from agentenv.errors import InvalidRequest
from agentenv.template.names import Reference, check_tags, parse, wanted_tags


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base", Reference("base")),
        ("space/name:v1.0", Reference("space/name", "v1.0")),
        (" Name:Tag ", Reference("name", "tag")),
    ],
)
def test_references(text: str, expected: Reference) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", ":tag", "name:", "a:b:c", "a/b/c", "/a", "a/", "a b", "ä", "a" * 129])
def test_what_cannot_be_one(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text)


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("name", [], ("default",)),
        ("name:v1", [], ("v1",)),
        ("name", ["a", "b", "a"], ("a", "b")),
        ("name:v1", ["Latest"], ("v1", "latest")),
    ],
)
def test_the_tags_of_a_build(name: str, more: list[str], expected: tuple[str, ...]) -> None:
    assert wanted_tags(parse(name), more) == expected


@pytest.mark.parametrize("tag", ["", ":a", "a:", "a/b", "a b"])
def test_tags_that_cannot_be(tag: str) -> None:
    with pytest.raises(InvalidRequest):
        check_tags(["fine", tag])
