"""The build context: which files a source of COPY means, without what `.dockerignore` leaves out.

The context's directory is the root: a path or symbolic link that climbs out of it, or begins with a slash,
counts from there. A link that is a source is followed; one inside a directory is copied as a link.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2b_dockerfile_utils import PatternMatcher

from agentenv.dockerfile.bundle import Entry
from agentenv.dockerfile.match import compile_segment, is_pattern
from agentenv.errors import InvalidRequest, NotFound, StoreFault

IGNORE_FILE = ".dockerignore"
LINKS_LIMIT = 40  # symbolic links followed on one way, as path_resolution(7)


@dataclass(frozen=True)
class Found:
    """Something that a source means. `name` is its last segment as the source has it, `path` where it really
    is in the context ("" is the context itself)."""

    name: str
    path: str
    directory: bool


class Context:
    """A directory to build from.

    Args:
        root: the directory.
        ignore: patterns of `.dockerignore`, in their order.

    Raises:
        NotFound: no such directory. InvalidRequest: a pattern is malformed.
    """

    def __init__(self, root: Path, ignore: list[str] | None = None) -> None:
        if not root.is_dir():
            raise NotFound(f"{root} is not a directory", remedy="give the directory with the build context")
        self.root = root
        self.skipped: list[str] = []  # what was met and cannot be copied: sockets, devices
        try:
            self._ignore = PatternMatcher(ignore or [])
        except ValueError as error:
            raise InvalidRequest(f"{IGNORE_FILE}: {error}") from None
        self._any_ignored = bool(self._ignore.patterns)

    @classmethod
    def of(cls, root: Path, dockerfile: Path) -> Context:
        """The context with the patterns of `DOCKERFILE.dockerignore`, or else of its own `.dockerignore`."""
        for path in (dockerfile.with_name(f"{dockerfile.name}{IGNORE_FILE}"), root / IGNORE_FILE):
            try:
                text = path.read_text(encoding="utf-8-sig")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, UnicodeDecodeError) as error:
                raise StoreFault(f"{path} cannot be read: {error}") from None
            return cls(root, text.splitlines())
        return cls(root)

    def find(self, source: str) -> list[Found]:
        """What `source` means, in the order of names; empty where a pattern matches nothing.

        Raises:
            NotFound: it is no pattern and there is no such file, or it is ignored.
            BadPattern: it is malformed.
        """
        segments = [each for each in posixpath.normpath(f"/{source}").split("/") if each]
        found = sorted(self._matches("", segments), key=lambda each: each.path)
        if not found and not any(is_pattern(segment) for segment in segments):
            raise NotFound(self._absence(source, "/".join(segments)))
        return found

    def tree(self, found: Found, into: str) -> Iterator[Entry]:
        """What is in a directory that was found, with names under `into`; parents come first."""
        yield from self._walk(found.path, into, [])

    def file(self, found: Found, name: str) -> Entry:
        """A file that was found, to be called `name`."""
        path = self.root / found.path
        status = _status(path)
        return Entry(name, "file", stat.S_IMODE(status.st_mode), path, size=status.st_size)

    def ignored(self, path: str) -> bool:
        """Whether `.dockerignore` leaves the path out; the context itself never is."""
        return self._any_ignored and path != "" and self._ignore.matches(path)

    def _matches(self, directory: str, segments: list[str]) -> Iterator[Found]:
        if not segments:
            yield Found("", directory, True)
            return
        head, *rest = segments
        for name in self._names(directory, head):
            lexical = posixpath.join(directory, name)
            real = self._resolve(lexical)
            if real is None:
                continue
            is_directory = (self.root / real).is_dir()
            if rest:
                if is_directory:
                    yield from self._matches(real, rest)
            elif self._is_taken(real, is_directory):
                yield Found(name, real, is_directory)

    def _names(self, directory: str, segment: str) -> list[str]:
        if not is_pattern(segment):
            return [segment]
        pattern = compile_segment(segment)
        return sorted(name for name in _listed(self.root / directory) if pattern.fullmatch(name))

    def _is_taken(self, path: str, is_directory: bool) -> bool:
        if not self.ignored(path):
            return is_directory or (self.root / path).is_file()
        return is_directory and self._ignore.may_match_under(path)

    def _resolve(self, path: str) -> str | None:
        """The path with every symbolic link followed inside the context; None where it leads nowhere."""
        left = [each for each in reversed(path.split("/")) if each]
        real: list[str] = []
        links = 0
        while left:
            segment = left.pop()
            if segment in ("", "."):
                continue
            if segment == "..":
                del real[-1:]
                continue
            here = self.root.joinpath(*real, segment)
            if here.is_symlink():
                links += 1
                if links > LINKS_LIMIT:
                    return None
                target = os.readlink(here)  # noqa: PTH115 - a Path would fold what ".." means here
                if target.startswith("/"):
                    real = []
                left.extend(reversed(target.split("/")))
            elif not here.exists() or (left and not here.is_dir()):
                return None
            else:
                real.append(segment)
        return "/".join(real)

    def _walk(self, directory: str, into: str, owed: list[Entry]) -> Iterator[Entry]:
        """`owed` are ignored directories on the way: they come with the first thing in them that is not."""
        for name in sorted(_listed(self.root / directory)):
            relative, path = posixpath.join(directory, name), self.root / directory / name
            entry = _entry(posixpath.join(into, name), path, _status(path))
            ignored = self.ignored(relative)
            if not ignored:
                if entry is None:
                    self.skipped.append(relative)
                    continue
                yield from owed
                owed.clear()
                yield entry
            if entry is None or entry.kind != "directory":
                continue
            if not ignored:
                yield from self._walk(relative, entry.name, owed)
            elif self._ignore.may_match_under(relative):
                owed.append(entry)
                yield from self._walk(relative, entry.name, owed)
                if owed:  # nothing in it was taken
                    owed.pop()

    def _absence(self, source: str, path: str) -> str:
        if self._resolve(path) is None:
            return f"{source}: there is no such file in the context {self.root}"
        if self.ignored(path):
            return f"{source} is left out of the context by {IGNORE_FILE}"
        return f"{source} is neither a file nor a directory"


def _entry(name: str, path: Path, status: os.stat_result) -> Entry | None:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        return Entry(name, "directory", mode)
    if stat.S_ISLNK(status.st_mode):
        return Entry(name, "link", 0o777, target=os.readlink(path))  # noqa: PTH115 - as it is written
    if stat.S_ISREG(status.st_mode):
        return Entry(name, "file", mode, path, size=status.st_size)
    return None


def _listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 - names are all that is wanted
    except OSError as error:
        raise StoreFault(f"{directory} cannot be read: {error.strerror}") from error


def _status(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except OSError as error:
        raise StoreFault(f"{path} cannot be read: {error.strerror}") from error
