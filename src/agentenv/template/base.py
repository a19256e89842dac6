"""The system that `debootstrap:SUITE` installs, and so the template `base`: what E2B's users expect.

User `user` (uid 1000, sudo without a password), bash, coreutils, procps, iproute2, python3 and `python`
with pip, curl, git with its daemon, ncurses, certificates. Shell start-up files run no programs: a
command of a client runs in a login shell, and each fork costs milliseconds under emulation.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from agentenv.image import aptsource
from agentenv.image.bootstrap import DPKG_OPTIONS, System

NAME = "base"
USER = "user"
UID = 1000
HOME = f"/home/{USER}"

PACKAGES = (
    "apt",  # Ubuntu's minimum is without
    "bash",
    "ca-certificates",
    "coreutils",
    "curl",
    "git",
    "iproute2",
    "iputils-ping",
    "less",
    "ncurses-bin",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "sudo",
    "tzdata",
    "util-linux",
    "xz-utils",
)

ENV = {"LANG": "C.UTF-8"}

_PROFILE = """\
# System-wide start-up of login shells. It runs no programs.

# Whoever starts the shell may have chosen a path.
PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
export PATH

if [ "${PS1-}" ]; then
  if [ "${BASH-}" ] && [ "$BASH" != "/bin/sh" ]; then
    if [ -f /etc/bash.bashrc ]; then
      . /etc/bash.bashrc
    fi
  else
    PS1='$ '
  fi
fi

for i in /etc/profile.d/*.sh; do
  if [ -r "$i" ]; then
    . "$i"
  fi
done
unset i
"""

_USER_PROFILE = """\
# Start-up of login shells.

if [ -n "$BASH_VERSION" ] && [ -f "$HOME/.bashrc" ]; then
  . "$HOME/.bashrc"
fi

for i in "$HOME/bin" "$HOME/.local/bin"; do
  if [ -d "$i" ]; then
    PATH="$i:$PATH"
  fi
done
unset i
"""

_BASHRC = """\
# Start-up of interactive shells; others stop here.
case $- in
  *i*) ;;
  *) return ;;
esac

HISTCONTROL=ignoreboth
HISTSIZE=1000
HISTFILESIZE=2000
shopt -s histappend checkwinsize

alias ls='ls --color=auto'
alias grep='grep --color=auto'
alias ll='ls -alF'
"""

_PIP = """\
# The whole machine belongs to its user: there is nothing to protect from pip.
[global]
break-system-packages = true
disable-pip-version-check = true
root-user-action = ignore
"""

_HOSTS = """\
127.0.0.1 localhost
::1 localhost ip6-localhost ip6-loopback
"""


@dataclass(frozen=True)
class File:
    """A file of the base system that no package brings."""

    path: str
    content: str
    mode: int = 0o644
    owner: int = 0


FILES = (
    File("etc/profile", _PROFILE),
    File("etc/pip.conf", _PIP),
    File("etc/hosts", _HOSTS),
    File(f"etc/sudoers.d/{USER}", f"{USER} ALL=(ALL:ALL) NOPASSWD:ALL\n", 0o440),
    File("root/.profile", _USER_PROFILE),
    File("root/.bashrc", _BASHRC),
    File("etc/skel/.profile", _USER_PROFILE),
    File("etc/skel/.bashrc", _BASHRC),
)

# Added to the account files; `useradd` would need a chroot and writes today's date.
ACCOUNTS = (
    ("etc/passwd", f"{USER}:x:{UID}:{UID}::{HOME}:/bin/bash\n"),
    ("etc/shadow", f"{USER}:*:19000:0:99999:7:::\n"),
    ("etc/group", f"{USER}:x:{UID}:\n"),
    ("etc/gshadow", f"{USER}:!::\n"),
)

LINKS = (("usr/bin/python", "python3"),)

# Ubuntu's asks `locale-check` at each login what is known here.
UNWANTED = ("etc/profile.d/01-locale-fix.sh",)


def prepare(root: Path) -> None:
    """Add to a freshly installed tree what packages do not bring."""
    for file in FILES:
        write(root, file)
    for name, line in ACCOUNTS:
        with (root / name).open("a") as account_file:
            account_file.write(line)
    for name, target in LINKS:
        if not os.path.lexists(root / name):
            (root / name).symlink_to(target)
    for name in UNWANTED:
        (root / name).unlink(missing_ok=True)
    make_home(root)


def write(root: Path, file: File) -> None:
    """Put one file in place with its owner and mode."""
    path = root / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.content)
    path.chmod(file.mode)
    os.chown(path, file.owner, file.owner)


def make_home(root: Path) -> None:
    """The user's home directory, filled from /etc/skel."""
    home = root / HOME.lstrip("/")
    home.mkdir(mode=0o755)
    for source in (root / "etc/skel").iterdir():
        if source.is_file():
            shutil.copy(source, home / source.name)
    for path in (home, *home.iterdir()):
        os.chown(path, UID, UID)


def _identity() -> str:
    """A digest of the definition: another one means that the same suite makes another tree."""
    parts = (PACKAGES, FILES, ACCOUNTS, LINKS, UNWANTED, DPKG_OPTIONS, ENV)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


SYSTEM = System(packages=PACKAGES, prepare=prepare, identity=_identity(), env=ENV)


def default_source(os_release: str) -> str:
    """The source of `base` on a host: its own suite if that is a known one, else Debian 12.

    A host that reaches only its distribution's mirror can install its own suite, if any.
    """
    for line in os_release.splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME" and aptsource.distribution_of(value.strip('"')):
            return f"debootstrap:{value.strip(chr(34))}"
    return "debootstrap:bookworm"
