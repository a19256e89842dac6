"""What a machine's process sees of its host: the files of its programs, read-only, and nothing else.

The tree is made once, in a mount namespace that only a descriptor keeps. A thread that is about to start a
machine goes in, takes a copy of it and further namespaces, and puts the machine's own files there; so a start
mounts a few files and not the tree. There is no `/proc`, `/dev`, `/sys` or `/run` in it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Literal

from agentenv.errors import HostIncapable
from agentenv.guestimage import libraries
from agentenv.vmm import mounts
from agentenv.vmm.mounts import NO_DEV, NO_EXEC, NO_SUID, READ_ONLY

Given = Literal["memory", "kernel", "initramfs"]

_GIVEN: tuple[Given, ...] = ("memory", "kernel", "initramfs")
_PLACE = PurePath("/machine")
_SCAFFOLD = PurePath("/tmp")  # where the tree is put together, in a namespace that nobody shares
_CACHE = Path("/etc/ld.so.cache")
_HOST_NAME = "machine"
_ISOLATED = mounts.CLONE_NEWNS | mounts.CLONE_NEWIPC | mounts.CLONE_NEWUTS | mounts.CLONE_NEWPID


def place_of(name: Given) -> str:
    """The path at which a machine's process finds a file that it opens by name."""
    return str(_PLACE / name)


class View:
    """A tree with the files of some programs. Kept until `close`; what was started in it has its own copy.

    Args:
        programs: paths of programs, which are seen with the libraries that they need.
        directories: seen whole, where they exist.

    Raises:
        HostIncapable: the host has no such mounts (Linux before 5.12, or no right to make them).
    """

    def __init__(self, programs: Iterable[str], directories: Iterable[str] = ()) -> None:
        files = _needed([Path(program) for program in programs])
        shown = [Path(name) for name in directories if Path(name).is_dir()]
        made: list[int | OSError] = []

        def make() -> None:
            try:
                made.append(_make(files, shown))
            except OSError as error:
                made.append(error)

        # A thread of its own, since it leaves the host's mounts for good.
        thread = threading.Thread(target=make, name="view")
        thread.start()
        thread.join()
        (result,) = made
        if isinstance(result, OSError):
            raise HostIncapable(
                f"machines' processes cannot be kept apart from the host's files: {result}",
                remedy="Linux 5.12 or newer, and the right to make mount namespaces (CAP_SYS_ADMIN)",
            ) from result
        self._namespace = result

    def enter(self, given: Mapping[Given, int]) -> None:
        """Leave the host for good, on a thread that does nothing else afterwards than start a process: that
        one is the first of pid, IPC, UTS and mount namespaces of its own.

        Args:
            given: open files that are seen at `place_of` their names; the memory file alone can be written
                to, if its mode allows it.

        Raises:
            OSError: the kernel refused.
        """
        trees: dict[Given, int] = {}
        try:
            for name, file in given.items():
                trees[name] = mounts.tree_of(
                    file, NO_SUID, NO_DEV, NO_EXEC, *((READ_ONLY,) if name != "memory" else ())
                )
            mounts.unshare(mounts.CLONE_FS)
            mounts.enter_mounts(self._namespace)
            mounts.unshare(_ISOLATED)
            mounts.name_host(_HOST_NAME)
            while trees:
                name, tree = trees.popitem()
                mounts.attach(tree, _PLACE / name)
        finally:
            for tree in trees.values():
                os.close(tree)

    def close(self) -> None:
        """Give up the tree. Repeatable."""
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1


def _needed(programs: list[Path]) -> list[Path]:
    """All files that the programs consist of, as the loader looks for them."""
    found = libraries.of(programs)
    files = {*programs, found.loader, *found.files.values(), *(path for path in (_CACHE,) if path.exists())}
    return sorted(files)


def _make(files: list[Path], directories: list[Path]) -> int:
    mounts.unshare(mounts.CLONE_NEWNS)
    mounts.keep_private()
    namespace = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        links = {path: path.readlink() for path in Path("/").iterdir() if path.is_symlink()}
        trees = [(_real(path), path.is_dir(), mounts.tree_of(path)) for path in (*files, *directories)]
        mounts.attach(mounts.empty(), _SCAFFOLD)
        for path, target in links.items():
            if target.parts[0] == "usr":  # /lib and its like, by which programs name their loader
                _inside(path).symlink_to(target)
        for path, is_directory, tree in trees:
            _stand_in(_inside(path), is_directory)
            mounts.attach(tree, _inside(path))
        for name in _GIVEN:
            _stand_in(_inside(_PLACE / name), False)
        root = os.open(_SCAFFOLD, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mounts.restrict(root, READ_ONLY, NO_SUID, NO_DEV)
        finally:
            os.close(root)
        mounts.make_root(_SCAFFOLD)
    except BaseException:
        os.close(namespace)
        raise
    return namespace


def _real(path: Path) -> Path:
    """The path with its directories resolved, but not its last name."""
    return path.parent.resolve() / path.name


def _inside(path: PurePath) -> Path:
    return Path(_SCAFFOLD / path.relative_to("/"))


def _stand_in(place: Path, is_directory: bool) -> None:
    """What a mount can be put on."""
    if is_directory:
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(0o444)
