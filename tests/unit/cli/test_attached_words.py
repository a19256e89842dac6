"""What the commands of attached sandboxes make of their arguments."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentenv.amounts import progress
from agentenv.cli.assignments import pairs, variables
from agentenv.cli.attached.creation import request
from agentenv.cli.attached.forwarding import Pair, parse_pair
from agentenv.cli.attached.shells import Shells
from agentenv.cli.copying import Place, parse_place
from agentenv.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("80", Pair("127.0.0.1", 80, 80)),
        ("8080:80", Pair("127.0.0.1", 8080, 80)),
        ("0:80", Pair("127.0.0.1", 0, 80)),
        ("0.0.0.0:8080:80", Pair("0.0.0.0", 8080, 80)),
        ("localhost:0:80", Pair("localhost", 0, 80)),
        ("[::1]:8080:80", Pair("::1", 8080, 80)),
    ],
)
def test_pairs_of_ports(text: str, pair: Pair) -> None:
    assert parse_pair(text) == pair


@pytest.mark.parametrize(
    "text", ["", "x", "80:", ":", "1:2:3:4", "70000:80", "80:0", "::1:80:80", "host:80", "-1:80"]
)
def test_what_is_no_pair(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_pair(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("abc:/x", Place("abc", "/x")),
        ("abc:x:y", Place("abc", "x:y")),
        ("abc:", Place("abc", ".")),
        ("./abc:x", Place(None, "./abc:x")),
        ("/a:b", Place(None, "/a:b")),
        ("abc", Place(None, "abc")),
        ("-", Place(None, "-")),
        (":x", Place(None, ":x")),
    ],
)
def test_places(text: str, place: Place) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(
    ("text", "drive"),
    [
        ("data", {"image": "data", "readOnly": True}),
        ("data:7", {"image": "data:7", "readOnly": True}),
        ("data:7:rw", {"image": "data:7", "readOnly": False}),
        ("data:7:/srv/data", {"image": "data:7", "mountPath": "/srv/data", "readOnly": True}),
        ("host:5000/data:7:/srv:rw", {"image": "host:5000/data:7", "mountPath": "/srv", "readOnly": False}),
        ("data:/srv:ro", {"image": "data", "mountPath": "/srv", "readOnly": True}),
    ],
)
def test_drives(text: str, drive: dict[str, Any]) -> None:
    body = request(template="base", drives=[text])[1]
    assert body["attachedDrives"] == [{"id": "drive0", **drive}]


def test_bodies_of_new_sandboxes() -> None:
    assert request(template="base") == ("/v2/sandboxes", {"templateID": "base", "timeout": 300})
    assert request(template="base", secure=False)[0] == "/sandboxes"
    path, body = request(
        image="python:3.13",
        name="n",
        metadata={"a": "b"},
        env={"X": "1"},
        cpu=2,
        memory=512,
        disk=4096,
        timeout=9,
    )
    assert path == "/sandboxes-cold"
    assert body == {
        "image": "python:3.13",
        "secure": True,
        "timeout": 9,
        "metadata": {"a": "b", "name": "n"},
        "envVars": {"X": "1"},
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 4096,
    }


@pytest.mark.parametrize(
    ("asked", "network"),
    [
        ({"allow": ["pypi.org"]}, {"allowOut": ["pypi.org"], "denyOut": ["0.0.0.0/0"]}),
        ({"deny": ["8.8.8.8"]}, {"denyOut": ["8.8.8.8"]}),
        (
            {"allow": ["1.1.1.1"], "deny": ["1.1.1.0/24"]},
            {"allowOut": ["1.1.1.1"], "denyOut": ["1.1.1.0/24"]},
        ),
        ({"private": True}, {"allowPublicTraffic": False}),
        (
            {"network": {"maskRequestHost": "x"}, "deny": ["8.8.8.8"]},
            {"maskRequestHost": "x", "denyOut": ["8.8.8.8"]},
        ),
    ],
)
def test_networks(asked: dict[str, Any], network: dict[str, Any]) -> None:
    given = dict(asked)
    if "network" in given:
        given["network"] = io.StringIO(json.dumps(given["network"]))
    assert request(template="base", **given)[1]["network"] == network


def test_variables_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "a=b")
    monkeypatch.delenv("NOT_HERE", raising=False)
    assert variables(["X=1", "HERE", "EMPTY=", "NOT_HERE"]) == {"X": "1", "HERE": "a=b", "EMPTY": ""}
    assert pairs(["a=b=c"], "x") == {"a": "b=c"}
    with pytest.raises(InvalidRequest):
        variables(["=x"])
    with pytest.raises(InvalidRequest):
        pairs(["a"], "x")


def test_how_far_a_transfer_is() -> None:
    assert progress(50 << 20, 100 << 20, 5) == " 50 %  50.0 MiB of 100.0 MiB  10.0 MiB/s  0:05 left"
    assert progress(2048, -1, 1) == "2.0 KiB  2.0 KiB/s"
    assert progress(0, 0, 1) == "0 B  0 B/s"


def test_shells_that_were_left(tmp_path: Path) -> None:
    shells = Shells(tmp_path / "state")
    assert shells.left("one") == []
    first, second, other = shells.hold("one", "a"), shells.hold("one", "b"), shells.hold("two", "c")
    assert first and second and other
    assert shells.hold("one", "a") is None  # another terminal has it
    first.let_go(forget=False)
    second.let_go(forget=True)
    assert shells.left("one") == ["a"]
    assert shells.left("two") == ["c"]
    again = shells.hold("one", "a")
    assert again is not None
    again.let_go(forget=True)
    assert shells.left("one") == []
    other.let_go(forget=False)
    os.utime(tmp_path / "state/two.c", (0, 0))
    assert shells.left("two") == []  # forgotten after a month


def test_where_nothing_can_be_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shells = Shells(tmp_path / "file/state")
    held = shells.hold("one", "a")
    assert held is not None
    held.let_go(forget=True)
    assert shells.left("one") == []
