"""Commands that need root: run by a user, they go through sudo with the user's data directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from agentenv.errors import HostFault, HostIncapable

if TYPE_CHECKING:
    from agentenv.config import Settings

# What sudo would drop and the command needs: package tools and pulls reach their servers through these.
PASSED = (
    *(
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
    ),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)


def require_root(settings: Settings) -> None:
    """Return as root, or replace this process by the same command under sudo.

    Raises:
        HostIncapable: this is not Linux, or the user is not root and there is no sudo.
        HostFault: the data directory cannot be made.
    """
    if sys.platform != "linux":
        raise HostIncapable(
            f"a node needs Linux, and this is {sys.platform}",
            remedy="--url and --api-key of a node elsewhere",
        )
    if os.geteuid() == 0:
        return
    if shutil.which("sudo") is None:
        raise HostIncapable("this command needs root and there is no sudo", remedy="run it as root")
    try:  # made by the user, so that the directory and the key in it belong to the user
        settings.home.mkdir(mode=0o755, parents=True, exist_ok=True)
    except PermissionError:  # root's own, as /var/lib/aenv: then root makes it
        pass
    except OSError as error:
        raise HostFault(
            f"cannot make {settings.home}: {error.strerror}", remedy="set AENV_HOME to another directory"
        ) from None
    _through_sudo(settings)


def rather_as_root(settings: Settings) -> None:
    """As `require_root` where sudo asks for no password; else return, for what a user can do as well."""
    if os.geteuid() == 0 or shutil.which("sudo") is None:
        return
    if subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0:
        _through_sudo(settings)


def _through_sudo(settings: Settings) -> NoReturn:
    kept = {name: value for name, value in os.environ.items() if name.startswith("AENV_") or name in PASSED}
    kept["AENV_HOME"] = str(settings.home)
    kept["AENV_DOCKER_CONFIG"] = str(settings.docker_config)  # the user's own, not root's
    click.echo("aenv: this needs root: going on through sudo", err=True)
    assignments = [f"{name}={value}" for name, value in kept.items()]
    os.execvp("sudo", ["sudo", "env", *assignments, sys.executable, "-m", "agentenv", *sys.argv[1:]])
