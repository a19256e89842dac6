"""Services bound to the loopback address, made reachable when the host asks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from agentenv.guest import forward, loop
from support.core_agent import core_agent
from support.nethost import listen


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with core_agent() as url:
        yield url


def _forward(url: str, port: object) -> int:
    return httpx.post(f"{url}/forward", json={"port": port}).status_code


@pytest.fixture
def echo() -> Iterator[tuple[int, list[bytes]]]:
    """An echoing service on [::1] alone."""
    said: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        while data := connection.recv(65536):
            said.append(data)
            connection.sendall(data)
        connection.sendall(b"bye")

    with ExitStack() as stack:
        yield listen(stack, None, "::1", 0, answer), said


def test_relay(url: str, echo: tuple[int, list[bytes]]) -> None:
    port, said = echo
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert _forward(url, port) == 204
    assert _forward(url, port) == 204  # asking again is no fault
    data = bytes(range(256)) * 8000
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
            sender = threading.Thread(
                target=lambda wire=wire: (wire.sendall(data), wire.shutdown(socket.SHUT_WR))
            )
            sender.start()
            back = b""
            while more := wire.recv(65536):
                back += more
            sender.join()
        assert back == data + b"bye"
    assert b"".join(said) == data * 2


def test_no_part_waits_for_the_one_before_to_be_acknowledged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())

        async def make() -> None:
            endpoint = forward.Endpoint(connection)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            endpoint.close()

        loop.run(make())
    assert connection.fileno() == -1


def test_the_relay_goes_when_its_service_does(url: str) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        assert _forward(url, port) == 204
    with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
        assert wire.recv(1) == b""
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=20).close()
        except ConnectionRefusedError:
            break
        assert time.monotonic() < deadline
    assert _forward(url, port) == 404


@pytest.mark.parametrize(("port", "status"), [(1, 404), (0, 400), (65536, 400), ("x", 400), (None, 400)])
def test_nothing_to_forward(url: str, port: object, status: int) -> None:
    assert _forward(url, port) == status


def test_only_the_gateway_asks() -> None:
    with core_agent(gateway="169.254.0.22") as url:
        assert _forward(url, 80) == 403


def test_tables() -> None:
    def table(*rows: str) -> str:
        lines = [f"   {n}: {row} 00000000:0000 0A 00000000:00000000" for n, row in enumerate(rows)]
        return "\n".join(["  sl  local_address rem_address   st", *lines, ""])

    loopback_6 = "00000000000000000000000001000000:0BB8"
    assert forward.listener_in(table("0100007F:0BB8"), 3000) == "127.0.0.1"
    assert forward.listener_in(table("0200007F:0BB8"), 3000) == "127.0.0.2"
    assert forward.listener_in(table(loopback_6), 3000) == "::1"
    assert forward.listener_in(table("0100007F:0BB8", "00000000:0BB8"), 3000) == ""
    assert forward.listener_in(table("0" * 32 + ":0BB8"), 3000) == ""
    assert forward.listener_in(table("0100007F:0BB9", "1500FEA9:0BB8"), 3000) is None
    connected = table("0100007F:0BB8").replace(" 0A ", " 01 ")
    assert forward.listener_in(connected, 3000) is None
