"""A template fetched from a node as an OCI archive."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO
from urllib.parse import quote

from agentenv.cli.api import download
from agentenv.cli.meter import TransferMeter
from agentenv.errors import InvalidRequest, StoreFault

LIMIT_S = 3600.0  # nothing comes until a machine has read all of it
STDOUT = Path("-")


def file_of(name: str) -> Path:
    """The file that a template is written to where nobody says."""
    return Path(name.replace("/", "-").replace(":", "-") + ".tar")


def export(url: str, api_key: str, name: str, file: Path, *, quiet: bool = False) -> int:
    """Write a template's archive to a file, or to standard output; returns its bytes. Of a failed call no
    file is left.

    Raises:
        InvalidRequest: the file is there already. StoreFault: it cannot be written.
        AenvError: the node refused, or is not to be reached.
    """
    if file == STDOUT:
        return _fetch(url, api_key, name, sys.stdout.buffer, quiet)
    if file.exists():  # before it is fetched
        raise _there(file)
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with partial.open("xb") as out:
            size = _fetch(url, api_key, name, out, quiet)
        try:
            os.link(partial, file)
        except FileExistsError:
            raise _there(file) from None
        return size
    except OSError as error:
        raise StoreFault(f"{file} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _there(file: Path) -> InvalidRequest:
    return InvalidRequest(f"{file} is there already", remedy="name another with --output")


def _fetch(url: str, api_key: str, name: str, out: IO[bytes], quiet: bool) -> int:
    address = f"{url.rstrip('/')}/templates/{quote(name, safe='')}/export"
    with TransferMeter(quiet=quiet) as meter:
        answer = download(
            address,
            out,
            headers={"X-API-KEY": api_key},
            limit_s=LIMIT_S,
            begun=lambda size: meter.total(1, size),
            came=meter.add,
        )
    if answer.status != 200:
        raise answer.fault(f"export of {name}")
    return int(answer.headers["content-length"])
