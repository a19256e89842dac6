"""Proxies and mirrors that guests may reach although the ranges that they are in are denied."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from ipaddress import AddressValueError, IPv4Address
from typing import NamedTuple
from urllib.parse import urlsplit

from agentenv.config import Settings
from agentenv.errors import InvalidRequest

log = logging.getLogger(__name__)

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
NO_PROXY = "no_proxy"
# What a guest asks of itself, or of what the host attaches to it, goes through no proxy.
OWN = ("localhost", "127.0.0.1", "::1", "169.254.0.0/16")
_DEFAULT_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}


class Opened(NamedTuple):
    """An address and a TCP port."""

    address: IPv4Address
    port: int


def guest_proxies(settings: Settings, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The proxy variables that guests get of a node's, in both spellings: programs differ in which they
    know."""
    if not settings.guest_proxy:
        return {}
    names = (*PROXY_VARIABLES, NO_PROXY)
    given = {name: environment.get(name) or environment.get(name.upper(), "") for name in names}
    found = {name: value for name, value in given.items() if value}
    if not found.keys() - {NO_PROXY}:
        return {}
    except_for = [part.strip() for part in found.get(NO_PROXY, "").split(",") if part.strip()]
    found[NO_PROXY] = ",".join(dict.fromkeys([*except_for, *OWN]))
    return {spelled: value for name, value in found.items() for spelled in (name, name.upper())}


def opened(
    settings: Settings,
    environment: Mapping[str, str] = os.environ,
    look_up: Callable[[str], Iterable[IPv4Address]] | None = None,
) -> list[Opened]:
    """What is open to guests by the settings. Names are looked up now; what cannot be reached from guests
    is left out, and said in the log.

    Raises:
        InvalidRequest: an open address has no port, or is none.
    """
    look_up = look_up or _looked_up
    proxies = guest_proxies(settings, environment)
    wanted = [*map(_of_setting, settings.open_addresses)]
    wanted += [_of_url(proxies[name]) for name in PROXY_VARIABLES if name in proxies]
    return sorted({each for host, port in wanted for each in _reachable(host, port, look_up)})


def _reachable(host: str, port: int, look_up: Callable[[str], Iterable[IPv4Address]]) -> Iterable[Opened]:
    addresses = list(look_up(host))
    if not addresses:
        log.warning("%s is not known to the host, so guests cannot reach it either", host)
    for address in addresses:
        if address.is_loopback:
            log.warning(
                "guests cannot reach %s:%d, a loopback address of the host: let it listen on another one",
                host,
                port,
            )
        else:
            yield Opened(address, port)


def _looked_up(host: str) -> list[IPv4Address]:
    try:
        return [IPv4Address(host)]
    except AddressValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [IPv4Address(str(each[4][0])) for each in found]


def _of_setting(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"open_addresses: {text!r} is not ADDRESS:PORT", remedy="such as 10.1.2.3:3128")
    return host, int(port)


def _of_url(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 80)
        if not parts.hostname:
            raise ValueError("it names no host")
    except ValueError as error:
        raise InvalidRequest(
            f"the proxy of the node's environment cannot be used: {error}",
            remedy="give http://HOST:PORT, or switch off guest_proxy",
        ) from None  # the URL may hold a password
    return parts.hostname, port
