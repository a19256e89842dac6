"""KVM or software emulation: which of them this node's machines run with, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentenv.config import Settings
from agentenv.host import kvm

Accelerator = Literal["kvm", "tcg"]


@dataclass(frozen=True)
class Choice:
    """What machines run with, and the reason in words."""

    accelerator: Accelerator
    reason: str

    def __str__(self) -> str:
        return f"{NAMES[self.accelerator]}: {self.reason}"


NAMES = {"kvm": "KVM", "tcg": "software emulation"}


def choose(settings: Settings) -> Choice:
    """The accelerator in force. The verdict on KVM is made once and then remembered.

    Raises:
        HostIncapable: nothing is forced and there are no guest files yet to try KVM with.
    """
    if settings.accelerator != "auto":
        return Choice(settings.accelerator, "set by AENV_ACCELERATOR")
    known = kvm.verdict(settings)
    return decide(known)


def decide(known: kvm.Verdict) -> Choice:
    """KVM where it works."""
    return Choice("kvm" if known.usable else "tcg", known.reason)
