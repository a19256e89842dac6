"""Who a sandbox's commands run as, and where, when nobody says.

The user is `user` where the image has one (E2B's convention), else the image's own USER, else root.
The directory is the image's WORKDIR, else that user's home.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

E2B_USER = "user"


@dataclass(frozen=True)
class Account:
    """A line of /etc/passwd, as far as it matters here."""

    name: str
    uid: int
    home: str


def parse_passwd(text: str) -> Mapping[str, Account]:
    """Accounts by name; lines that make no sense are passed over, as the C library does."""
    accounts: dict[str, Account] = {}
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) >= 6 and fields[0] and fields[2].isdecimal():
            accounts.setdefault(fields[0], Account(fields[0], int(fields[2]), fields[5] or "/"))
    return accounts


def default_account(accounts: Mapping[str, Account], image_user: str) -> Account:
    """The account by the rule above.

    A USER given as a number is looked up by uid; one that the image's passwd file does not know is an account
    at home in /, as in Docker. A name that it does not know counts as not given: root then.
    """
    if found := accounts.get(E2B_USER):
        return found
    wanted = image_user.partition(":")[0]
    if found := accounts.get(wanted):
        return found
    if wanted.isdecimal():
        for account in accounts.values():
            if account.uid == int(wanted):
                return account
        return Account(wanted, int(wanted), "/")
    return accounts.get("root", Account("root", 0, "/root"))


def default_workdir(account: Account, image_workdir: str) -> str:
    """The directory by the rule above; a relative WORKDIR counts from the root."""
    if not image_workdir or image_workdir == "/":
        return account.home
    return image_workdir if image_workdir.startswith("/") else f"/{image_workdir}"
