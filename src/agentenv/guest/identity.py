"""What makes a machine this sandbox and no other: clock, randomness, names, and the files that tell.

Each function changes the running system; each can be called again with other values.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

from agentenv.guest.lean import socket

MARKER_FOLDER = "/run/e2b"
_RNDADDENTROPY = 0x40085203  # _IOW('R', 0x03, int[2]), linux/random.h
_RNDRESEEDCRNG = 0x5207  # _IO('R', 0x07)
_BUNDLES = (  # Debian, Alpine; Fedora; others
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
_STORE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT")
_CA_FILE = "/usr/local/share/ca-certificates/agentenv.crt"
_HOSTS_MARK = "# agentenv"


def set_clock(nanoseconds: int) -> None:
    """Sets the wall clock to that time since the epoch."""
    time.clock_settime_ns(time.CLOCK_REALTIME, nanoseconds)


def add_entropy(seed: bytes) -> None:
    """Credits `seed` to the kernel's pool and reseeds its generator at once.

    Siblings restored from one snapshot share the generator's state; until this call they would draw
    the same numbers.
    """
    fd = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
    try:
        for start in range(0, len(seed), 512):
            part = seed[start : start + 512]
            fcntl.ioctl(fd, _RNDADDENTROPY, struct.pack("ii", len(part) * 8, len(part)) + part)
        fcntl.ioctl(fd, _RNDRESEEDCRNG)
    finally:
        os.close(fd)


def set_hostname(name: str) -> None:
    """The kernel's host name."""
    socket.sethostname(name)


def write_hostname(name: str) -> None:
    """The host name in /etc/hostname and /etc/hosts (without which sudo waits for a resolver)."""
    write_file("/etc/hostname", f"{name}\n")
    try:
        with open("/etc/hosts", encoding="utf-8", errors="surrogateescape") as file:
            old = file.read()
    except FileNotFoundError:
        old = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    write_file("/etc/hosts", hosts_with(old, name))


def hosts_with(text: str, name: str) -> str:
    """The content of a hosts file in which `name` is the one name of ours, at 127.0.1.1."""
    kept = [line for line in text.splitlines() if not line.endswith(_HOSTS_MARK)]
    return "\n".join([*kept, f"127.0.1.1\t{name}\t{_HOSTS_MARK}", ""])


def set_machine_id(identifier: str) -> None:
    """/etc/machine-id, and D-Bus's own copy where that is a file."""
    write_file("/etc/machine-id", f"{identifier}\n", mode=0o444)
    if os.path.isfile("/var/lib/dbus/machine-id") and not os.path.islink("/var/lib/dbus/machine-id"):
        write_file("/var/lib/dbus/machine-id", f"{identifier}\n", mode=0o444)


def write_markers(values: dict[str, str]) -> None:
    """The files .E2B_SANDBOX and so on in /run/e2b, which programs look for: name → content."""
    for name, value in values.items():
        write_file(f"{MARKER_FOLDER}/.{name}", value)


def trust_variables() -> dict[str, str]:
    """For programs that look into no store of the system unless they are told to."""
    store = next((path for path in _BUNDLES if os.path.isfile(path)), None)
    own = {"NODE_EXTRA_CA_CERTS": _CA_FILE}
    return own if store is None else {**own, **dict.fromkeys(_STORE_VARIABLES, store)}


def trust(bundle: str) -> None:
    """Adds PEM certificates to the trust stores that the image has."""
    text = bundle.strip() + "\n"
    write_file(_CA_FILE, text)
    for path in _BUNDLES:
        if not os.path.isfile(path):
            continue
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            old = file.read()
        if text not in old:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text if old.endswith("\n") or not old else "\n" + text)


def write_file(path: str, content: str, mode: int = 0o644) -> None:
    """Writes a short file in place, its folders made where they are missing.

    It is not emptied first: ext4 writes what replaces an emptied file to the disk when it is closed, which
    is most of what this would cost, and a reader might see nothing in it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, mode)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, flags, mode)
    try:
        before = os.fstat(fd)
        data = content.encode(errors="surrogateescape")
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, "no space for the whole file", path)
        if before.st_size > len(data):
            os.ftruncate(fd, len(data))
        if before.st_mode & 0o7777 != mode:
            os.fchmod(fd, mode)
    finally:
        os.close(fd)


def parse_time(text: str) -> int:
    """Nanoseconds since the epoch of an RFC 3339 time; ValueError when it is not one.

    By hand: a `datetime` ends at microseconds and costs an import.
    """
    day, _, rest = text.strip().upper().replace(" ", "T").partition("T")
    offset = 0
    if rest.endswith("Z"):
        rest = rest[:-1]
    else:
        sign = max(rest.rfind("+"), rest.rfind("-"))
        if sign < 0:
            raise ValueError(f"{text!r} has no time zone")
        hours, minutes = rest[sign + 1 :].split(":")
        offset = (int(hours) * 60 + int(minutes)) * (-1 if rest[sign] == "-" else 1)
        rest = rest[:sign]
    clock, _, fraction = rest.partition(".")
    hour, minute, second = (int(part) for part in clock.split(":"))
    year, month, date = (int(part) for part in day.split("-"))
    if not (1 <= month <= 12 and 1 <= date <= 31 and hour <= 23 and minute <= 59 and second <= 60):
        raise ValueError(f"{text!r} is out of range")
    seconds = days_since_epoch(year, month, date) * 86400 + hour * 3600 + (minute - offset) * 60 + second
    return seconds * 10**9 + int((fraction + "0" * 9)[:9])


def days_since_epoch(year: int, month: int, day: int) -> int:
    """Days from 1970-01-01 in the Gregorian calendar (years counted from March, so leap days come last)."""
    if month <= 2:
        year -= 1
        month += 12
    return 365 * year + year // 4 - year // 100 + year // 400 + (153 * (month - 3) + 2) // 5 + day - 719469
