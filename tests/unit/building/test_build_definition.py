"""What is refused before anything is made."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.building.definition import STEPS_MAX, Step, define
from agentenv.errors import InvalidRequest
from agentenv.image.credentials import Credentials


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step("ONBUILD", ("x",)), "no instruction"),
        (Step("RUN", ()), "a command"),
        (Step("RUN", (" ",)), "a command"),
        (Step("RUN", ("a", "b", "c")), "a command"),
        (Step("COPY", ("a",), "0" * 64), "a source, a destination"),
        (Step("COPY", ("a", ""), "0" * 64), "no destination"),
        (Step("COPY", ("a", "b")), "filesHash"),
        (Step("COPY", ("a", "b"), "../" + "0" * 61), "filesHash"),
        (Step("COPY", ("a", "b", "", "9"), "0" * 64), "octal"),
        (Step("ENV", ("A",)), "names and values"),
        (Step("ENV", ()), "names and values"),
        (Step("ENV", ("A=B", "1")), "variable"),
        (Step("ENV", ("A", "\0")), "variable"),
        (Step("WORKDIR", ()), "one argument"),
        (Step("USER", ("",)), "one argument"),
    ],
)
def test_steps_that_cannot_be(step: Step, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"step 2: .*{words}"):
        define(template="base", steps=[Step("RUN", ("true",)), step])


def test_too_many_steps() -> None:
    with pytest.raises(InvalidRequest, match="too many"):
        define(template="base", steps=[Step("RUN", ("true",))] * (STEPS_MAX + 1))


@pytest.mark.parametrize(
    ("given", "image", "template"),
    [
        ({"image": "ubuntu:22.04"}, "ubuntu:22.04", None),
        ({"template": "mine:v1"}, None, "mine:v1"),
        ({}, None, "base"),
        ({"image": "e2bdev/base"}, None, "base"),
        ({"image": "docker.io/e2bdev/base:latest"}, None, "base"),
        ({"image": "e2bdev/code-interpreter"}, None, "code-interpreter-v1"),
        ({"image": "e2bdev/base:1.2"}, "e2bdev/base:1.2", None),
        ({"image": "template://mine:v1"}, None, "mine:v1"),
    ],
)
def test_the_base(given: dict[str, Any], image: str | None, template: str | None) -> None:
    made = define(**given)
    assert (made.image, made.template) == (image, template)


def test_two_bases() -> None:
    with pytest.raises(InvalidRequest, match="both"):
        define(image="a", template="b")


def test_credentials_do_not_show() -> None:
    made = define(image="a", credentials=Credentials("name", "secret word"))
    assert "secret word" not in repr(made)
