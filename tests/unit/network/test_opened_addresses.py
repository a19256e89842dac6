"""Proxies that guests are given, and what is opened for them."""

from __future__ import annotations

import logging
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from agentenv.config import Settings
from agentenv.errors import InvalidRequest
from agentenv.network.opened import guest_proxies, opened
from agentenv.sandbox.agent import Identity
from agentenv.sandbox.surroundings import Surroundings

NAMES = {"proxy.corp": "10.1.2.3", "mirror.corp": "10.1.2.4", "here": "127.0.0.1"}


def look_up(host: str) -> list[IPv4Address]:
    return [IPv4Address(NAMES.get(host, host))] if host != "unknown" else []


def of(environment: dict[str, str], **given: object) -> list[tuple[str, int]]:
    found = opened(Settings(**given), environment, look_up)  # type: ignore[arg-type]
    return [(str(each.address), each.port) for each in found]


def test_proxies_come_in_both_spellings_and_leave_out_the_guest_itself() -> None:
    environment = {"HTTP_PROXY": "http://proxy.corp:3128", "no_proxy": "intern.corp, localhost", "A": "b"}
    got = guest_proxies(Settings(), environment)
    assert got["http_proxy"] == got["HTTP_PROXY"] == "http://proxy.corp:3128"
    assert got["no_proxy"] == got["NO_PROXY"] == "intern.corp,localhost,127.0.0.1,::1,169.254.0.0/16"
    assert set(got) == {"http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"}


@pytest.mark.parametrize("environment", [{}, {"NO_PROXY": "a"}, {"http_proxy": ""}])
def test_without_a_proxy_there_is_nothing(environment: dict[str, str]) -> None:
    assert guest_proxies(Settings(), environment) == {}
    assert of(environment) == []


def test_it_can_be_switched_off() -> None:
    environment = {"http_proxy": "http://proxy.corp:3128"}
    assert guest_proxies(Settings(guest_proxy=False), environment) == {}
    assert of(environment, guest_proxy=False) == []


def test_proxies_and_mirrors_are_opened() -> None:
    environment = {"http_proxy": "http://user:secret@proxy.corp:3128", "HTTPS_PROXY": "https://proxy.corp"}
    found = of(environment, open_addresses=["mirror.corp:8081", "10.9.9.9:80"])
    assert found == [("10.1.2.3", 443), ("10.1.2.3", 3128), ("10.1.2.4", 8081), ("10.9.9.9", 80)]
    assert of({"all_proxy": "socks5://proxy.corp"}) == [("10.1.2.3", 1080)]
    assert of({"http_proxy": "proxy.corp:81"}) == [("10.1.2.3", 81)]


def test_what_guests_cannot_reach_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert of({"http_proxy": "http://here:3128"}, open_addresses=["unknown:80"]) == []
    assert "here:3128" in caplog.text
    assert "unknown is not known" in caplog.text


@pytest.mark.parametrize("text", ["10.1.2.3", "10.1.2.3:", ":80", "10.1.2.3:0", "10.1.2.3:x"])
def test_an_open_address_needs_a_port(text: str) -> None:
    with pytest.raises(InvalidRequest, match="open_addresses"):
        of({}, open_addresses=[text])


def test_a_proxy_that_is_none_is_refused_without_telling_its_password() -> None:
    with pytest.raises(InvalidRequest, match="proxy") as caught:
        of({"http_proxy": "http://user:secret@proxy.corp:99999"})
    assert "secret" not in str(caught.value)


def test_a_guest_s_own_variables_win(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n")
    settings = Settings(guest_env={"A": "node", "B": "node"}, ca_file=file)
    around = Surroundings.of(settings, {"http_proxy": "http://proxy.corp:1"})
    told = around.around(Identity(env={"A": "own"}))
    assert told.env is not None
    assert (told.env["A"], told.env["B"], told.env["HTTP_PROXY"]) == ("own", "node", "http://proxy.corp:1")
    assert told.ca_bundle == file.read_text()
    assert around.around(Identity()) == Identity()  # it knows all by itself


def test_certificates_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Surroundings.of(Settings(ca_file=file), {})
    file.write_text("nothing")
    with pytest.raises(InvalidRequest, match="no certificate"):
        Surroundings.of(Settings(ca_file=file), {})
