"""Image configurations, and who runs in a sandbox by default."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.errors import StoreCorrupt
from agentenv.image.accounts import Account, default_account, default_workdir, parse_passwd
from agentenv.image.config import ImageConfig

DOCUMENT: dict[str, Any] = {
    "architecture": "amd64",
    "config": {
        "Env": ["PATH=/opt/bin:/bin", "EMPTY=", "EQUAL=a=b", "BARE", "=odd", "EMPTY=now"],
        "WorkingDir": "/srv",
        "User": "app:app",
        "Entrypoint": ["/entry"],
        "Cmd": ["-v"],
        "ExposedPorts": {"8080/tcp": {}, "53/udp": {}},
        "Labels": {"a": "b"},
    },
}


def test_fields() -> None:
    config = ImageConfig.from_image(DOCUMENT)
    assert config.env == {"PATH": "/opt/bin:/bin", "EMPTY": "now", "EQUAL": "a=b", "BARE": ""}
    assert (config.workdir, config.user) == ("/srv", "app:app")
    assert (config.entrypoint, config.cmd) == (("/entry",), ("-v",))
    assert config.exposed_ports == ("53/udp", "8080/tcp")
    assert config.labels == {"a": "b"}


def test_nulls_and_absence_are_nothing() -> None:
    nothing = dict.fromkeys(("Env", "WorkingDir", "User", "Entrypoint", "Cmd", "ExposedPorts", "Labels"))
    assert ImageConfig.from_image({"config": nothing}) == ImageConfig()
    assert ImageConfig.from_image({"config": None}) == ImageConfig.from_image({}) == ImageConfig()


def test_a_string_is_a_shell_command() -> None:
    assert ImageConfig.from_image({"config": {"Cmd": "run me"}}).cmd == ("/bin/sh", "-c", "run me")


@pytest.mark.parametrize(
    "config", [{"Env": [1]}, {"Env": {"A": "b"}}, {"User": 5}, {"Labels": ["x"]}, {"Cmd": 1}, ["x"]]
)
def test_wrong_types(config: Any) -> None:
    with pytest.raises(StoreCorrupt):
        ImageConfig.from_image({"config": config})


def test_round_trip_through_json() -> None:
    config = ImageConfig.from_image(DOCUMENT)
    assert ImageConfig.from_document(json.loads(json.dumps(config.document()))) == config


PASSWD = """\
root:x:0:0:root:/root:/bin/bash
broken line
app:x:101:102:App:/var/app:/bin/sh
nohome:x:103:103:::/bin/sh
letters:x:abc:1::/x:/bin/sh
app:x:5:5:again:/elsewhere:/bin/sh
"""


def test_passwd() -> None:
    accounts = parse_passwd(PASSWD)
    assert set(accounts) == {"root", "app", "nohome"}
    assert accounts["app"] == Account("app", 101, "/var/app")
    assert accounts["nohome"].home == "/"


@pytest.mark.parametrize(
    ("image_user", "name"),
    [
        ("", "root"),
        ("app", "app"),
        ("app:adm", "app"),
        ("101", "app"),
        ("101:0", "app"),
        ("999", "999"),
        ("gone", "root"),
    ],
)
def test_default_account(image_user: str, name: str) -> None:
    assert default_account(parse_passwd(PASSWD), image_user).name == name


def test_the_account_named_user_comes_first() -> None:
    accounts = parse_passwd(PASSWD + "user:x:1000:1000::/home/user:/bin/bash\n")
    assert default_account(accounts, "app") == Account("user", 1000, "/home/user")


def test_an_image_without_accounts_has_root() -> None:
    assert default_account({}, "app") == Account("root", 0, "/root")


@pytest.mark.parametrize(("workdir", "answer"), [("", "/h"), ("/", "/h"), ("/srv", "/srv"), ("app", "/app")])
def test_default_workdir(workdir: str, answer: str) -> None:
    assert default_workdir(Account("u", 1, "/h"), workdir) == answer
