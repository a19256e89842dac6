"""Unpacks tarballs into a tree: a whole root filesystem, or one layer over those below it.

Layer rules: https://github.com/opencontainers/image-spec/blob/main/layer.md. A whiteout hides what
lower layers hold and never what its own layer does, wherever in the archive it stands.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import tarfile
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

from agentenv.errors import StoreCorrupt
from agentenv.image.streams import CHUNK, Readable, content, members
from agentenv.image.tree import BLOCK, Attributes, Tree, clean

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
_XATTR = "SCHILY.xattr."
_XATTR_BASE64 = "LIBARCHIVE.xattr."


def attributes(member: tarfile.TarInfo) -> Attributes:
    """What a tar header says of an entry beside its content."""
    return Attributes(
        uid=_identity(member, member.uid),
        gid=_identity(member, member.gid),
        mode=stat.S_IMODE(member.mode),
        mtime_ns=_mtime_ns(member),
        xattrs=_xattrs(member.pax_headers),
    )


def _identity(member: tarfile.TarInfo, value: int) -> int:
    if not 0 <= value < 0xFFFFFFFF:
        raise StoreCorrupt(f"{member.name!r} belongs to the impossible user or group {value}")
    return value


def _mtime_ns(member: tarfile.TarInfo) -> int:
    exact = member.pax_headers.get("mtime")
    try:
        return int(Decimal(exact) * 1_000_000_000) if exact else int(member.mtime) * 1_000_000_000
    except (InvalidOperation, OverflowError, ValueError):
        return 0


def _xattrs(headers: Mapping[str, str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for key, value in headers.items():
        if key.startswith(_XATTR):
            found[key.removeprefix(_XATTR)] = value.encode("utf-8", "surrogateescape")
        elif key.startswith(_XATTR_BASE64) and _XATTR + key.removeprefix(_XATTR_BASE64) not in headers:
            try:
                found[key.removeprefix(_XATTR_BASE64)] = base64.b64decode(value + "==")
            except binascii.Error:
                raise StoreCorrupt(f"the extended attribute {key} is not base64") from None
    return found


class Unpacking:
    """One tarball being unpacked over what is in the tree.

    With `whiteouts`, the rules of image layers hold; without, such names are files like others.
    """

    def __init__(self, tree: Tree, *, whiteouts: bool) -> None:
        self._tree = tree
        self._whiteouts = whiteouts
        self._written: set[str] = set()  # entries of this layer, and the directories they are in
        self._times: dict[str, int] = {}  # directories' times, set when nothing more changes them

    def run(self, tar: tarfile.TarFile) -> None:
        """Unpack every member.

        Raises:
            StoreCorrupt: a member cannot be what a root filesystem holds.
            InvalidRequest: it is more than the tree's budget allows.
        """
        for member in members(tar):
            self._tree.check()
            self._member(tar, member)
        for directory, mtime_ns in self._times.items():
            if (status := self._tree.status(directory)) and stat.S_ISDIR(status.st_mode):
                self._tree.set_time(directory, mtime_ns)

    def _member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = clean(member.name)
        parent, _, leaf = name.rpartition("/")
        if self._whiteouts and leaf.startswith(WHITEOUT):
            self._whiteout(parent, leaf)
        elif name:
            self._write(tar, member, self._place(parent, leaf))
        elif member.isdir():
            self._finish_directory("", attributes(member))

    def _place(self, parent: str, leaf: str) -> str:
        """Where an entry goes; the directory it goes to keeps its time."""
        real = self._tree.directory(parent, make=True)
        assert real is not None
        if real not in self._times:
            self._times[real] = os.lstat(self._tree.at(real)).st_mtime_ns
        return f"{real}/{leaf}" if real else leaf

    def _whiteout(self, parent: str, leaf: str) -> None:
        directory = self._tree.directory(parent, make=False)
        if directory is None:
            return
        if directory not in self._times:
            self._times[directory] = os.lstat(self._tree.at(directory)).st_mtime_ns
        if leaf == OPAQUE:
            for child in self._tree.children(directory):
                self._hide(child)
        elif not leaf.startswith(WHITEOUT + WHITEOUT):  # else aufs' own bookkeeping
            hidden = leaf.removeprefix(WHITEOUT)
            if hidden in ("", ".", ".."):
                raise StoreCorrupt(f"the whiteout {leaf!r} hides nothing that can have a name")
            self._hide(f"{directory}/{hidden}" if directory else hidden)

    def _hide(self, relative: str) -> None:
        """Remove what lower layers have there."""
        if relative not in self._written:
            self._tree.remove(relative)
            return
        status = self._tree.status(relative)
        if status is not None and stat.S_ISDIR(status.st_mode):
            for child in self._tree.children(relative):
                self._hide(child)

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, relative: str) -> None:
        tree = self._tree
        if member.isdir():
            self._make_directory(member, relative)
        elif member.islnk():
            self._hard_link(member, relative)
        elif member.isreg():
            copy_sparse(content(tar, member), tree, relative, member.size)
            tree.set_attributes(relative, attributes(member))
        elif member.issym():
            tree.remove(relative)
            tree.budget.add_entry()
            os.symlink(member.linkname, tree.at(relative))  # noqa: PTH211
            tree.set_attributes(relative, attributes(member), link=True)
        elif member.isdev():
            tree.remove(relative)
            tree.budget.add_entry()
            os.mknod(tree.at(relative), _node_type(member) | 0o600, _device(member))
            tree.set_attributes(relative, attributes(member))
        else:
            return  # a volume label, or what only a backup program understands
        self._note(relative)

    def _note(self, relative: str) -> None:
        while self._whiteouts and relative and relative not in self._written:
            self._written.add(relative)
            relative = relative.rpartition("/")[0]

    def _make_directory(self, member: tarfile.TarInfo, relative: str) -> None:
        status = self._tree.status(relative)
        if status is None or not stat.S_ISDIR(status.st_mode):
            self._tree.remove(relative)
            self._tree.make_directory(relative)
        self._finish_directory(relative, attributes(member))

    def _finish_directory(self, relative: str, wanted: Attributes) -> None:
        self._tree.clear_xattrs(relative)
        self._tree.set_attributes(relative, wanted)
        self._times[relative] = wanted.mtime_ns

    def _hard_link(self, member: tarfile.TarInfo, relative: str) -> None:
        parent, _, leaf = clean(member.linkname).rpartition("/")
        directory = self._tree.directory(parent, make=False)
        target = f"{directory}/{leaf}" if directory else leaf
        status = self._tree.status(target) if directory is not None and leaf else None
        if status is None or stat.S_ISDIR(status.st_mode):
            raise StoreCorrupt(
                f"{member.name!r} is a hard link to {member.linkname!r}, which is no file here"
            )
        if target == relative:
            return
        self._tree.remove(relative)
        if self._tree.status(target) is None:
            raise StoreCorrupt(f"{member.name!r} takes the place of {member.linkname!r}, which it links to")
        self._tree.budget.add_entry()
        os.link(self._tree.at(target), self._tree.at(relative), follow_symlinks=False)


def _node_type(member: tarfile.TarInfo) -> int:
    if member.isfifo():
        return stat.S_IFIFO
    return stat.S_IFCHR if member.ischr() else stat.S_IFBLK


def _device(member: tarfile.TarInfo) -> int:
    return 0 if member.isfifo() else os.makedev(member.devmajor, member.devminor)


def copy_sparse(source: Readable, tree: Tree, relative: str, size: int) -> None:
    """Write a new file from `source` in the place of what is there, leaving holes where chunks are zero.

    Raises:
        StoreCorrupt: the source ends before `size` bytes.
    """
    descriptor = tree.create(relative)
    try:
        offset = written = 0
        while offset < size:
            chunk = source.read(min(CHUNK, size - offset))
            if not chunk:
                raise StoreCorrupt(f"the archive ends inside {relative!r}", remedy="make or fetch it again")
            offset += len(chunk)
            if _write_blocks(descriptor, chunk, offset - len(chunk), tree):
                written = offset
            tree.check()
        if written < size:
            os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def _write_blocks(descriptor: int, chunk: bytes, offset: int, tree: Tree) -> bool:
    """Write a chunk unless it is a hole; whether it was written."""
    if len(chunk) >= BLOCK and not chunk.strip(b"\0"):
        return False
    tree.budget.add(len(chunk))
    view = memoryview(chunk)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    return True
