"""Commands that need root: run by a user, they go through sudo with the user's data directory."""

from __future__ import annotations

import os
import shutil
import sys

import click

from agentenv.config import Settings
from agentenv.errors import HostIncapable

# What sudo would drop and the command needs: package tools reach their mirror through these.
PASSED = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")


def require_root(settings: Settings) -> None:
    """Return as root, or replace this process by the same command under sudo.

    Raises:
        HostIncapable: not root, and there is no sudo.
    """
    if os.geteuid() == 0:
        return
    if shutil.which("sudo") is None:
        raise HostIncapable("this command needs root and there is no sudo", remedy="run it as root")
    # Made by the user, so that the directory and the key in it belong to the user.
    settings.home.mkdir(mode=0o755, parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith("AENV_") or name in PASSED}
    kept["AENV_HOME"] = str(settings.home)
    click.echo("aenv: this needs root: going on through sudo", err=True)
    assignments = [f"{name}={value}" for name, value in kept.items()]
    os.execvp("sudo", ["sudo", "env", *assignments, sys.executable, "-m", "agentenv", *sys.argv[1:]])
