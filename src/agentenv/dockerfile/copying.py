"""COPY and ADD: their arguments, and the step and files that they come to."""

from __future__ import annotations

import posixpath
import re
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentenv.dockerfile.bundle import Archive, Bundle, Entry
from agentenv.dockerfile.context import Context, Found
from agentenv.dockerfile.match import BadPattern
from agentenv.dockerfile.plan import Origin, Step, step
from agentenv.dockerfile.syntax import FlagKind, Flags, Heredoc, Instruction, flags_of, heredoc_name
from agentenv.errors import NotFound

TREE = "files"  # the directory in a bundle whose contents go into the destination
_FLAGS: dict[str, FlagKind] = {
    "chown": "text",
    "chmod": "text",
    "from": "text",
    "link": "switch",
    "parents": "switch",
    "exclude": "list",
}
_ADD_FLAGS: dict[str, FlagKind] = {
    **{name: kind for name, kind in _FLAGS.items() if name != "from"},
    "checksum": "text",
    "keep-git-dir": "switch",
    "unpack": "switch",
}
_OCTAL = re.compile(r"[0-7]{1,4}")
_OWNER = re.compile(r"[^\s:]+(:[^\s:]+)?")
_REMOTE = re.compile(r"(https?|ftp|git|ssh)://|git@", re.IGNORECASE)
_PATTERNS = frozenset("*?[{\\")
_ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Copying:
    """The arguments of a COPY or ADD, expanded. A `destination` that is a directory ends in a slash."""

    instruction: Instruction
    sources: tuple[str | Heredoc, ...]
    destination: str
    owner: str
    mode: str
    origin: str | None
    unpack: bool

    def fault(self, message: str, *, remedy: str | None = None) -> Exception:
        """An error at the instruction."""
        return self.instruction.fault(message, remedy=remedy)


Expand = Callable[[str], str]


def read(instruction: Instruction, expand: Expand, expand_text: Expand) -> Copying:
    """The arguments.

    Args:
        instruction: the COPY or ADD.
        expand: replaces the variables of a word.
        expand_text: replaces those of a heredoc's body.

    Raises:
        DockerfileError: an argument is missing, malformed or not supported.
    """
    adds = instruction.name == "ADD"
    flags = flags_of(instruction, _ADD_FLAGS if adds else _FLAGS)
    _refuse_unsupported(instruction, flags)
    if len(instruction.words) < 2:
        raise instruction.fault("needs a source and a destination")
    *sources, destination = instruction.words
    if heredoc_name(destination) is not None and instruction.heredocs:
        raise instruction.fault("the destination cannot be a heredoc")
    return Copying(
        instruction,
        _sources(instruction, sources, expand, expand_text),
        _destination(instruction, expand(destination), len(sources)),
        _owner(instruction, expand(flags.text("chown") or "")),
        _mode(instruction, expand(flags.text("chmod") or "")),
        flags.text("from"),
        flags.switch("unpack", default=adds),
    )


def _refuse_unsupported(instruction: Instruction, flags: Flags) -> None:
    if flags.switch("parents"):
        raise instruction.fault(
            "--parents is not supported", remedy="copy each directory with its own destination"
        )
    if "exclude" in flags:
        raise instruction.fault("--exclude is not supported", remedy="name the files in .dockerignore")
    for name in ("checksum", "keep-git-dir"):
        if name in flags:
            raise instruction.fault(
                f"--{name} is about remote sources, which are not supported", remedy="fetch them with RUN"
            )


def _sources(
    instruction: Instruction, words: Sequence[str], expand: Expand, expand_text: Expand
) -> tuple[str | Heredoc, ...]:
    bodies = {each.name: each for each in instruction.heredocs}
    sources: list[str | Heredoc] = []
    for word in words:
        name = heredoc_name(word) if bodies else None
        if name is None:
            sources.append(_local(instruction, expand(word)))
        else:
            body = bodies[name]
            content = expand_text(body.content) if body.expand else body.content
            sources.append(Heredoc(name, content, expand=False))
    return tuple(sources)


def _local(instruction: Instruction, source: str) -> str:
    if not source:
        raise instruction.fault("a source is empty")
    if instruction.name == "ADD" and _REMOTE.match(source):
        raise instruction.fault(
            f"{source} is not in the build context, and is not fetched",
            remedy="fetch it with RUN, in the build, where its result is cached",
        )
    return source


def _destination(instruction: Instruction, destination: str, sources: int) -> str:
    if not destination:
        raise instruction.fault("the destination is empty")
    if destination.rpartition("/")[2] in (".", ".."):
        destination += "/"
    if sources > 1 and not destination.endswith("/"):
        raise _several(instruction, destination)
    return destination


def _several(instruction: Instruction, destination: str) -> Exception:
    return instruction.fault(
        f"several sources, and the destination {destination} is no directory",
        remedy=f"end it with a slash: {destination}/",
    )


def _owner(instruction: Instruction, owner: str) -> str:
    if owner and not _OWNER.fullmatch(owner):
        raise instruction.fault(f"--chown={owner}: not an owner", remedy="write USER, USER:GROUP or numbers")
    return owner


def _mode(instruction: Instruction, mode: str) -> str:
    if mode and not _OCTAL.fullmatch(mode):
        raise instruction.fault(f"--chmod={mode}: not a mode", remedy="write it in octal, such as 755")
    return mode.rjust(4, "0") if mode else ""


def from_origin(copying: Copying, origin: Origin) -> list[Step]:
    """The steps of a COPY from another file system: one per source, found there by the node."""
    steps = []
    for source in copying.sources:
        if isinstance(source, Heredoc):
            raise copying.fault("a heredoc comes from the Dockerfile, not from --from")
        path = posixpath.normpath(f"/{source}")
        steps.append(_step(copying, path.replace("//", "/"), origin=origin))
    return steps


def from_context(copying: Copying, context: Context) -> Step:
    """The step of a COPY or ADD from the build context, with its files.

    Raises:
        DockerfileError: a source is not there, or cannot be copied so.
    """
    pieces = [piece for source in copying.sources for piece in _pieces(copying, source, context)]
    if not pieces:
        raise copying.fault("none of the sources matches anything in the context")
    if len(pieces) > 1 and not copying.destination.endswith("/"):
        raise _several(copying.instruction, copying.destination)
    alone = pieces[0]
    if len(pieces) == 1 and not copying.destination.endswith("/") and not _goes_into(copying, alone, context):
        entry = _single(alone, context)
        if not _PATTERNS.isdisjoint(entry.name):  # a node would take it for a pattern
            entry = replace(entry, name=posixpath.basename(copying.destination))
        return _step(copying, entry.name, bundle=Bundle((entry,)))
    parts: list[Entry | Archive] = [Entry(TREE, "directory", 0o755)]
    unpacked = False
    for piece in pieces:
        if isinstance(piece, Heredoc):
            parts.append(_written(piece, f"{TREE}/{piece.name}"))
        elif piece.directory:
            parts.extend(context.tree(piece, TREE))
        elif copying.unpack and _is_archive(copying, context, piece):
            parts.append(Archive(context.root / piece.path, TREE))
            unpacked = True
        else:
            parts.append(context.file(piece, f"{TREE}/{piece.name}"))
    return _step(copying, TREE, bundle=Bundle(tuple(parts)), keeps_owners=unpacked)


def _pieces(copying: Copying, source: str | Heredoc, context: Context) -> Sequence[Found | Heredoc]:
    if isinstance(source, Heredoc):
        return [source]
    try:
        return context.find(source)
    except NotFound as error:
        raise copying.fault(error.message) from None
    except BadPattern:
        raise copying.fault(
            f"{source} is not a pattern", remedy="a bracket that is meant is written [[]"
        ) from None


def _goes_into(copying: Copying, piece: Found | Heredoc, context: Context) -> bool:
    """Whether what there is to copy is a directory's contents, whatever the destination looks like."""
    if isinstance(piece, Heredoc):
        return False
    return piece.directory or (copying.unpack and _is_archive(copying, context, piece))


def _is_archive(copying: Copying, context: Context, piece: Found) -> bool:
    path = context.root / piece.path
    try:
        with path.open("rb") as file:
            if file.read(4) == _ZSTD and ".tar" in piece.name:
                raise copying.fault(
                    f"{piece.name}: archives of zstd are not unpacked here",
                    remedy="COPY it and unpack it with RUN",
                )
        with tarfile.open(path, "r:*"):
            return True
    except (tarfile.TarError, EOFError, OSError, ValueError):
        return False


def _single(piece: Found | Heredoc, context: Context) -> Entry:
    if isinstance(piece, Heredoc):
        return _written(piece, piece.name)
    return context.file(piece, piece.name)


def _written(heredoc: Heredoc, name: str) -> Entry:
    content = heredoc.content.encode()
    return Entry(name, "file", 0o644, content=content, size=len(content))


def _step(
    copying: Copying,
    source: str,
    *,
    bundle: Bundle | None = None,
    origin: Origin | None = None,
    keeps_owners: bool = False,
) -> Step:
    # Without --chown files belong to root, whoever the USER is; E2B's own default would be the USER.
    owner = copying.owner or "0:0"
    return step(
        "COPY",
        (source, copying.destination, owner, copying.mode),
        copying.instruction.line,
        copying.instruction.text,
        bundle=bundle,
        origin=origin,
        extra=("owners",) if keeps_owners and not copying.owner else (),
    )
