"""Doing something inside another network namespace, and opening a tap there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)


def inside(namespace: Path, call: Callable[[], T]) -> T:
    """The result of `call`, made on a thread that has entered the network namespace.

    The thread ends with the call, so that no other code ever runs in there. What the call starts
    (a process) or opens (a socket, a tun device) belongs to the namespace.

    Raises:
        OSError: there is no such namespace, or this process may not enter it.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def enter_and_call() -> None:
        try:
            _enter(namespace)
            results.append(call())
        except BaseException as error:  # carried to the calling thread
            failures.append(error)

    thread = threading.Thread(target=enter_and_call, name=f"in {namespace.name}")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def open_tap(name: str) -> int:
    """A descriptor of an existing tap of the present namespace, with headers for offloads.

    Opened here rather than by the machine's process, whose user may not open /dev/net/tun.

    Raises:
        OSError: ENODEV when there is no such tap; otherwise what the kernel said.
    """
    # Asked first: for root, TUNSETIFF would make a missing tap, one that vanishes with the descriptor.
    if name not in (interface for _, interface in socket.if_nameindex()):
        raise OSError(errno.ENODEV, "there is no such tap", name)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(tap, _TUNSETIFF, request)
    except BaseException:
        os.close(tap)
        raise
    return tap


def _enter(namespace: Path) -> None:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the namespace: {os.strerror(number)}", str(namespace))
    finally:
        os.close(descriptor)
