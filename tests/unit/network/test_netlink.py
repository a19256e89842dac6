"""Requests to the kernel that need no privilege, and the reading of its answers."""

from __future__ import annotations

import errno
import os
import socket
import struct

import pytest

from agentenv.network import netlink
from agentenv.network.netlink import Rtnetlink


def test_the_loopback_interface_is_found() -> None:
    with Rtnetlink() as kernel:
        link = kernel.link("lo")
        assert link is not None
        assert (link.name, link.index) == ("lo", socket.if_nametoindex("lo"))
        assert link in kernel.links()
        assert kernel.link("no-such-link") is None


def test_the_links_are_those_that_the_system_tells() -> None:
    with Rtnetlink() as kernel:
        assert {(link.index, link.name) for link in kernel.links()} >= {(socket.if_nametoindex("lo"), "lo")}


def test_addresses_and_routes_are_read() -> None:
    with Rtnetlink() as kernel:
        assert "127.0.0.1" in [str(address) for _, address, _ in kernel.addresses()]
        for route in kernel.routes():
            assert route.destination.version == 4


def test_traffic_is_counted() -> None:
    with Rtnetlink() as kernel, socket.create_server(("127.0.0.1", 0)) as server:
        received, sent = kernel.traffic()["lo"]
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as other:
            client.sendall(b"x" * 10_000)
            assert len(other.recv(10_000, socket.MSG_WAITALL)) == 10_000
        after = kernel.traffic()["lo"]
    assert after[0] >= received + 10_000
    assert after[1] >= sent + 10_000


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel looks at the rights first")
def test_the_first_failure_is_raised_with_the_kernels_words() -> None:
    with Rtnetlink() as kernel:
        with pytest.raises(OSError) as caught:
            kernel.apply(netlink.delete_link("no-such-a"), netlink.set_up(0x7FFFFFF0))
        assert caught.value.errno == errno.ENODEV
        assert kernel.link("lo") is not None  # all answers were read


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel looks at the rights first")
def test_extended_messages_are_quoted() -> None:
    broken = netlink.Request(netlink.RTM_NEWROUTE, 0x400, struct.pack("=BBBBBBBBI", 2, 99, *[0] * 7))
    with Rtnetlink() as kernel, pytest.raises(OSError, match=r"Invalid.*: \w+"):
        kernel.apply(broken)
