"""Drives beside the root disk: found by serial number, mounted where they are wanted; and disks that grow.

The places for them are devices of every machine, of no size at first. When the host has put something there,
the driver has to look at the device anew: it then sees its size, and whether it can be written to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from agentenv.guest import loop
from agentenv.guest.connect import ConnectError, field, flag_field, text_field
from agentenv.guest.launch import BUSYBOX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentenv.guest.connect import Message

_BLOCK = "/sys/block"
_DRIVER = "/sys/bus/virtio/drivers/virtio_blk"
_APART = "/run/.agentenv-drive"  # where a whole drive is while a part of it is mounted elsewhere
_PLACES = "spare"  # how the serial numbers of all drives begin

_RESIZE_FS = 0x40086610  # _IOW('f', 16, __u64), fs/ext4/ext4.h


_LOOK_AGAIN_S = 0.002
_GROWN_LIMIT_S = 10.0


class DriveFailed(Exception):
    """A drive, or the root disk, cannot be used as it is wanted; the message names it."""


class Wanted:
    """A drive and where it is to be: `part` is a directory of it, which is then all that is seen."""

    __slots__ = ("name", "part", "path", "read_only", "serial")

    def __init__(self, message: Message) -> None:
        """Raises ConnectError: the message is not of the right form."""
        self.name = text_field(message, "name")
        self.serial = text_field(message, "serial")
        self.path = text_field(message, "path")
        self.part = text_field(message, "subPath")
        self.read_only = flag_field(message, "readOnly", True)
        if not self.serial or not self.path.startswith("/"):
            raise ConnectError("invalid_argument", f"drive {self.name!r} has no serial or no absolute path")


def wanted_of(message: Message) -> list[Wanted]:
    """The drives that a message asks for; those first that others may lie below."""
    given = field(message, "drives", [])
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ConnectError("invalid_argument", "drives is not a list of objects")
    return sorted((Wanted(each) for each in given), key=lambda each: each.path.count("/"))


def mount(wanted: Wanted) -> None:
    """Mounts a drive, and gives its filesystem all the room that there is; nothing if it is mounted there.

    Raises:
        DriveFailed: it cannot be; says why.
    """
    try:
        name = _present(wanted.serial)
        if name is None:
            raise DriveFailed(f"drive {wanted.name!r}: the machine has no place {wanted.serial!r}")
        if _is_mounted(name, wanted.path):
            return
        os.makedirs(wanted.path, exist_ok=True)
        if wanted.part:
            _mount_part(name, wanted)
        else:
            _mount(name, wanted.path, wanted.read_only)
    except OSError as error:
        about = f"{error.filename}: " if error.filename and error.filename != wanted.path else ""
        reason = f"{about}{error.strerror or error}"
        raise DriveFailed(f"drive {wanted.name!r} cannot be mounted at {wanted.path}: {reason}") from None


async def grow_root(mib: int) -> None:
    """Gives the root filesystem all of its disk, which becomes so large about now.

    Raises:
        DriveFailed: it cannot be.
    """
    device = os.stat("/").st_dev
    disk = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    left = _GROWN_LIMIT_S
    try:
        while _size(disk) < mib << 20:  # the driver hears of it from the host, and tells nobody
            if left <= 0:
                raise DriveFailed(f"the root disk has not become {mib} MiB large")
            await loop.sleep(_LOOK_AGAIN_S)
            left -= _LOOK_AGAIN_S
        grow("/")
    except OSError as error:
        raise DriveFailed(f"the root filesystem cannot grow to {mib} MiB: {error.strerror}") from None


def grow(path: str) -> None:
    """Gives the filesystem at `path` all of its disk.

    Raises:
        OSError: it cannot be.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        device = os.fstat(fd).st_dev
        size = _size(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        fcntl.ioctl(fd, _RESIZE_FS, struct.pack("Q", size // os.fstatvfs(fd).f_bsize))
    finally:
        os.close(fd)


def written() -> list[str]:
    """Where drives are mounted that can be written to, each once."""
    found: dict[str, str] = {}
    for device, place, options in _mounts():
        try:
            with open(f"/sys/dev/block/{device}/serial") as file:
                ours = file.read().strip().startswith(_PLACES)
        except OSError:
            continue
        if ours and "rw" in options:
            found.setdefault(device, place)
    return list(found.values())


def _mount_part(name: str, wanted: Wanted) -> None:
    apart = f"{_APART}-{wanted.serial}"
    os.makedirs(apart, 0o700, exist_ok=True)
    try:
        _mount(name, apart, wanted.read_only)
        try:
            part = os.path.realpath(f"{apart}/{wanted.part}")
            if not f"{part}/".startswith(f"{apart}/") or not os.path.isdir(part):
                raise DriveFailed(
                    f"drive {wanted.name!r}: there is no directory {wanted.part!r} in its image"
                )
            _run("mount", "-o", "bind", part, wanted.path)
        finally:
            _run("umount", "-l", apart)
    finally:
        os.rmdir(apart)


def _mount(name: str, path: str, read_only: bool) -> None:
    how = "ro" if read_only else "rw,noinit_itable"
    _run("mount", "-t", "ext4", "-o", f"{how},nosuid,nodev,noatime", f"/dev/{name}", path)
    if not read_only:
        grow(path)


def _run(*argv: str) -> None:
    """Runs a program of the busybox, which takes milliseconds: Python has no binding for mount(2), and to
    import what could call it takes half a second under emulation.

    Raises:
        OSError: it did not succeed; says why in its own words.
    """
    told, telling = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.posix_spawn(
            BUSYBOX, ("busybox", *argv), {}, file_actions=[(os.POSIX_SPAWN_DUP2, telling, 2)]
        )
    finally:
        os.close(telling)
    with open(told, "rb") as words:
        said = words.read(4096).decode(errors="replace").strip()
    # Before the loop's next turn, in which it would be reaped as a stranger.
    if os.waitpid(pid, 0)[1] != 0:
        raise OSError(said or f"{argv[0]} failed")


def _present(serial: str) -> str | None:
    """The disk with a serial number, as it is now; None if there is none."""
    name = _named(serial)
    if name is not None and _size(f"{_BLOCK}/{name}") == 0:
        device = os.path.basename(os.readlink(f"{_BLOCK}/{name}/device"))
        for action in ("unbind", "bind"):
            with open(f"{_DRIVER}/{action}", "w") as file:
                file.write(device)
        name = _named(serial)
        if name is not None and _size(f"{_BLOCK}/{name}") == 0:
            raise OSError(errno.ENOMEDIUM, "the host has put nothing there")
    return name


def _named(serial: str) -> str | None:
    for name in os.listdir(_BLOCK):
        try:
            with open(f"{_BLOCK}/{name}/serial") as file:
                if file.read().strip() == serial:
                    return name
        except OSError:
            pass  # a kind of disk that has none
    return None


def _size(disk: str) -> int:
    """Bytes of a disk, by its directory in /sys."""
    with open(f"{disk}/size") as file:
        return int(file.read()) * 512


def _is_mounted(name: str, path: str) -> bool:
    with open(f"{_BLOCK}/{name}/dev") as file:
        device = file.read().strip()
    place = os.path.realpath(path)
    return any(each == device and where == place for each, where, _ in _mounts())


def _mounts() -> Iterator[tuple[str, str, list[str]]]:
    """Device numbers, place and options of each mount (proc(5), mountinfo)."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, _, device, _, place, options, *_ = line.split(" ")
            yield device, _plain(place), options.split(",")


def _plain(place: str) -> str:
    for character in (" ", "\t", "\n", "\\"):
        place = place.replace(f"\\{ord(character):03o}", character)
    return place
