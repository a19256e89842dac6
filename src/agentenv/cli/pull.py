"""`aenv pull`: an image into the cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.options import credential_options, credentials, home_option, quiet_option
from agentenv.cli.output import form_of, form_option, show_one
from agentenv.cli.progress import Steps
from agentenv.cli.root import require_root

if TYPE_CHECKING:
    from agentenv.config import Settings
    from agentenv.image.cache import CachedImage
    from agentenv.image.credentials import Credentials


@click.command("pull")
@click.argument("image")
@click.option(
    "--disk", type=click.IntRange(min=64), metavar="MIB", help="Root disk in MiB (2048, or as needed)."
)
@credential_options
@quiet_option
@form_option
@home_option
def command(
    image: str,
    disk: int | None,
    username: str | None,
    password_stdin: bool,
    quiet: bool,
    form: str | None,
    home: Path | None,
) -> None:
    """Fetch IMAGE and convert it to a root filesystem, so that templates of it are made at once.

    IMAGE is one of a registry, or another SOURCE of `aenv template create`. Credentials are those of `docker
    login`, or those given here, which are used once and kept nowhere.

    \b
    Examples:
      aenv pull python:3.13
      pass show ghcr | aenv pull ghcr.io/owner/private:1 --username owner --password-stdin
    """
    import asyncio

    from agentenv import config

    settings = config.load(home=home)
    require_root(settings)
    given = credentials(username, password_stdin)
    with Steps(quiet=quiet) as steps:
        found = asyncio.run(_pull(settings, image, disk, given, steps))
    facts = {
        "image": image,
        "digest": found.digest,
        "disk_mib": found.disk_mib,
        "size_bytes": found.size_bytes,
        "rootfs": str(found.rootfs),
    }
    show_one(facts, form_of(form), key="digest")


async def _pull(
    settings: Settings, image: str, disk_mib: int | None, given: Credentials | None, progress: Steps
) -> CachedImage:
    from agentenv.image.cache import Images, reap
    from agentenv.records.database import Database
    from agentenv.records.ledger import Ledger

    database = Database(settings.database)
    try:
        ledger = Ledger(database)
        reap(ledger)
        images = Images(settings, database, ledger)
        try:
            return await images.get(image, credentials=given, disk_mib=disk_mib, progress=progress)
        finally:
            await images.close()
    finally:
        database.close()
