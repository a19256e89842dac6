"""`aenv cp`, `upload` and `download`: files between here and sandboxes."""

from __future__ import annotations

import getpass
import hashlib
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from agentenv.cli.attached.door import Door
from agentenv.cli.completing import SANDBOX
from agentenv.cli.meant import node_address
from agentenv.cli.naming import sandbox_of
from agentenv.cli.options import node_options, quiet_option
from agentenv.cli.server import Node
from agentenv.errors import Conflict, InvalidRequest, NotFound

ATTEMPTS = 3  # of a transfer whose connection breaks although the sandbox runs on

F = TypeVar("F", bound=Callable[..., Any])


def copy_options(function: F) -> F:
    """What the three commands have in common."""
    function = click.option(
        "--user", "-u", metavar="NAME", help="As whom in the sandbox (its default user)."
    )(quiet_option(function))
    return node_options(function)


@dataclass(frozen=True)
class Place:
    """A path here (no sandbox), or in a sandbox."""

    sandbox: str | None
    path: str


def parse_place(text: str) -> Place:
    """`SANDBOX:PATH`, or a path here: one with a slash before the first colon, or without a colon."""
    head, colon, path = text.partition(":")
    if not colon or "/" in head or not head:
        return Place(None, text)
    return Place(head, path or ".")


@click.command("cp")
@click.argument("places", nargs=-1, required=True, metavar="SOURCE... DESTINATION")
@copy_options
def cp(places: tuple[str, ...], **asked: Any) -> None:
    """Copy files and directories between here and sandboxes, or from one sandbox to another.

    SANDBOX:PATH is in a sandbox, where paths count from its default directory; - is standard input or
    output. Directories are copied with all below, and SOURCE/. is their content alone. Modes, times and links
    are kept; the owner is who writes. What exists is replaced file by file, when the new one is complete. The
    same command again goes on with large files that were broken off.

    \b
    Examples:
      aenv cp project isx3k2v9:/srv
      aenv cp isx3k2v9:/srv/results/. results
      aenv cp isx3k2v9:data isy81mq0:data
      tar c . | aenv cp - isx3k2v9:/tmp/all.tar
    """
    if len(places) < 2:
        raise click.UsageError("give at least a source and a destination")
    parsed = [parse_place(each) for each in places]
    copy(parsed[:-1], parsed[-1], **asked)


@click.command("upload")
@click.argument("sandbox", type=SANDBOX)
@click.argument("paths", nargs=-1, required=True, metavar="SOURCE... [DESTINATION]")
@copy_options
def upload(sandbox: str, paths: tuple[str, ...], **asked: Any) -> None:
    """Copy files and directories into SANDBOX; see `aenv cp`.

    Of several paths the last is the destination there; of one alone that is the default directory.

    \b
    Examples:
      aenv upload isx3k2v9 notes.txt
      aenv upload isx3k2v9 project /srv/project
    """
    sources, destination = (paths[:-1], paths[-1]) if len(paths) > 1 else (paths, ".")
    copy([Place(None, each) for each in sources], Place(sandbox, destination), **asked)


@click.command("download")
@click.argument("sandbox", type=SANDBOX)
@click.argument("paths", nargs=-1, required=True, metavar="SOURCE... [DESTINATION]")
@copy_options
def download(sandbox: str, paths: tuple[str, ...], **asked: Any) -> None:
    """Copy files and directories out of SANDBOX; see `aenv cp`.

    Of several paths the last is the destination here; of one alone that is the current directory.

    \b
    Examples:
      aenv download isx3k2v9 /srv/results.json
      aenv download isx3k2v9 /srv/results results
      aenv download isx3k2v9 /var/log/syslog - | less
    """
    sources, destination = (paths[:-1], paths[-1]) if len(paths) > 1 else (paths, ".")
    copy([Place(sandbox, each) for each in sources], Place(None, destination), **asked)


def copy(
    sources: Sequence[Place],
    destination: Place,
    *,
    user: str | None,
    quiet: bool,
    url: str | None,
    api_key: str | None,
    home: Path | None,
) -> None:
    """Copy, and end this process with status 1 where something was left out.

    Raises:
        InvalidRequest: the places do not go together. AenvError: as `Transfer`.
    """
    origins = {each.sandbox for each in sources}
    if len(origins) > 1:
        raise InvalidRequest("the sources are not all in one place", remedy="one command for each")
    origin = origins.pop()
    if origin is None and destination.sandbox is None:
        raise InvalidRequest("neither is in a sandbox", remedy="SANDBOX:PATH names a place in one")
    from agentenv.cli.attached.transfers import End, Transfer
    from agentenv.cli.meter import TransferMeter

    node = Node(*node_address(url, api_key, home))
    left_out: list[str] = []
    meter = TransferMeter(quiet=quiet)
    transfer = Transfer(_tag(sources, destination), meter, left_out.append)
    paths = [each.path for each in sources]
    ends = [Door(node, sandbox_of(node, name)) for name in (origin, destination.sandbox) if name is not None]

    def once() -> None:
        left_out.clear()
        there = [End(door.agent(user=user), door.way()) for door in ends]
        if origin is None:
            transfer.upload(there[0], paths, destination.path)
        elif destination.sandbox is None:
            transfer.download(there[0], paths, destination.path)
        else:
            transfer.between(there[0], paths, there[1], destination.path)

    with meter:
        _repeat(once, ends, again="-" not in (*paths, destination.path))
    for line in left_out:
        click.echo(f"aenv: {line}", err=True)
    if left_out:
        sys.exit(1)


def _repeat(once: Callable[[], None], ends: Sequence[Door], *, again: bool) -> None:
    """Do it, again after a break of the connection while the sandboxes run."""
    from agentenv.cli.attached.wire import LineBroken

    for attempt in range(1, ATTEMPTS + 1):
        try:
            once()
            return
        except LineBroken as error:
            for door in ends:
                try:
                    state = door.look()["state"]
                except NotFound:
                    raise NotFound(f"sandbox {door.id} ended while files were copied") from error
                if state == "paused":
                    raise Conflict(
                        f"sandbox {door.id} was paused while files were copied",
                        remedy="the same command again goes on with large files where they are",
                    ) from error
            if not again or attempt == ATTEMPTS:
                raise


def _tag(sources: Sequence[Place], destination: Place) -> str:
    """A name that is the same when the same user gives the same command in the same directory again."""
    here = [platform.node(), getpass.getuser(), str(Path.cwd())]
    words = [*here, *(f"{each.sandbox}:{each.path}" for each in (*sources, destination))]
    return "aenv-copy-" + hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:16]
