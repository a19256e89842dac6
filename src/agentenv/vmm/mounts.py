"""The kernel's calls for mounts, namespaces and descriptors that Python has no functions for.

All act on the calling thread alone, once it has a filesystem view of its own. Sources: mount_setattr(2),
open_tree(2), move_mount(2), fsopen(2) and linux/mount.h; the numbers are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import PurePath

CLONE_FS = 0x00000200
CLONE_FILES = 0x00000400
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000

READ_ONLY, NO_SUID, NO_DEV, NO_EXEC = 1, 2, 4, 8  # MOUNT_ATTR_*

_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_CLOSE_RANGE, _CLOSE_RANGE_CLOEXEC, _LAST = 436, 4, 0x7FFFFFFF
_PIVOT_ROOT = {"x86_64": 155}.get(os.uname().machine, 41)
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE = 1
_FROM_EMPTY_PATH = 4
_SET_STRING, _CREATE = 1, 6
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def unshare(flags: int) -> None:
    """Give the calling thread namespaces of its own (CLONE_*); those of pids are its children's."""
    _checked(_libc.unshare(flags), "new namespaces")


def pass_on(descriptors: Iterable[int]) -> None:
    """Let what the calling thread starts inherit these descriptors and no other one above 2.

    The thread has a table of descriptors of its own from then on, so that no other one's children get them.
    """
    unshare(CLONE_FILES)
    _call("descriptors", _CLOSE_RANGE, 3, _LAST, _CLOSE_RANGE_CLOEXEC)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)


def enter_mounts(namespace: int) -> None:
    """Go into an open mount namespace, to its root. The thread needs CLONE_FS unshared before."""
    _checked(_libc.setns(namespace, CLONE_NEWNS), "a mount namespace")


def name_host(name: str) -> None:
    """Set the host name of the thread's UTS namespace."""
    word = name.encode()
    _checked(_libc.sethostname(word, len(word)), "a host name")


def keep_private() -> None:
    """Let no mount made from now on be seen in another namespace, nor the other way round."""
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "private mounts")


def empty() -> int:
    """A descriptor of a new, empty tmpfs that is mounted nowhere."""
    context = _call("a tmpfs", _FSOPEN, b"tmpfs", 1)
    try:
        _call("a tmpfs", _FSCONFIG, context, _SET_STRING, b"mode", b"755", 0)
        _call("a tmpfs", _FSCONFIG, context, _CREATE, None, None, 0)
        return _call("a tmpfs", _FSMOUNT, context, 1, 0)
    finally:
        os.close(context)


def tree_of(file: int | PurePath, *attributes: int) -> int:
    """A descriptor of a mount of one file or directory, mounted nowhere yet, with attributes set.

    Args:
        file: an open file of this mount namespace, or a path.
        attributes: READ_ONLY and its like.
    """
    where, path = (file, b"") if isinstance(file, int) else (_AT_FDCWD, os.fsencode(file))
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (0 if path else _AT_EMPTY_PATH)
    tree = _call(f"a mount of {file}", _OPEN_TREE, where, path, flags)
    try:
        restrict(tree, *attributes)
    except BaseException:
        os.close(tree)
        raise
    return tree


def restrict(tree: int, *attributes: int) -> None:
    """Set attributes of a mount and of all below it."""
    attr = (ctypes.c_uint64 * 4)(sum(attributes), 0, 0, 0)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    _call("attributes of a mount", _MOUNT_SETATTR, tree, b"", flags, ctypes.byref(attr), ctypes.sizeof(attr))


def attach(tree: int, place: PurePath) -> None:
    """Mount what `tree_of` or `empty` gave on an existing file or directory, and close it."""
    try:
        _call(f"a mount at {place}", _MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(place), _FROM_EMPTY_PATH)
    finally:
        os.close(tree)


def make_root(place: PurePath) -> None:
    """Make a mount the root of the namespace and let go of all else that is mounted in it."""
    os.chdir(place)
    _call("a new root", _PIVOT_ROOT, b".", b".")  # the old one comes to lie above it (pivot_root(2))
    _checked(_libc.umount2(b".", _MNT_DETACH), "leaving the old root")
    os.chdir("/")


def _call(what: str, number: int, *arguments: object) -> int:
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *given), what)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} cannot be had: {os.strerror(number)}")
    return result
