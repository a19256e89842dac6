"""What a host can do, as data, and how people and programs are shown it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "degraded", "missing"]

_WIDTH = 100


@dataclass(frozen=True)
class Capability:
    """One thing that a node needs or profits from.

    `degraded` is: it works, but less well; `required` and `missing` is: no node can run here.
    `remedy` is a command, or a sentence, and empty where nothing is to be done.
    """

    name: str
    status: Status
    required: bool
    detail: str
    why: str
    remedy: str


def able(capabilities: Sequence[Capability]) -> bool:
    """Whether a node can run here."""
    return not any(one.required and one.status == "missing" for one in capabilities)


def as_json(capabilities: Sequence[Capability]) -> str:
    """One JSON object: `able`, and `capabilities` in the order of the table."""
    content = {"able": able(capabilities), "capabilities": [asdict(one) for one in capabilities]}
    return json.dumps(content, indent=2)


def as_table(capabilities: Sequence[Capability]) -> str:
    """Lines for people: a capability each, and below what is not ok why it matters and the remedy."""
    width = max((len(one.name) for one in capabilities), default=0)
    lines: list[str] = []
    for one in capabilities:
        lines += _indented(f"{one.name:<{width}}  {one.status:<8}  ", one.detail)
        if one.status != "ok":
            need = "required" if one.required else "optional"
            lines += _indented(f"{'':<{width}}  {'':<8}  ", f"{need}: {one.why}")
            if one.remedy:
                lines += _indented(f"{'':<{width}}  {'':<8}  ", f"remedy: {one.remedy}")
    return "\n".join([*lines, "", _verdict(capabilities)])


def _verdict(capabilities: Sequence[Capability]) -> str:
    lacking = [one.name for one in capabilities if one.required and one.status == "missing"]
    if lacking:
        return f"No node can run here: {', '.join(lacking)} missing."
    degraded = [one.name for one in capabilities if one.status != "ok"]
    return f"A node can run here{'; less than ideal: ' + ', '.join(degraded) if degraded else ''}."


def _indented(head: str, text: str) -> list[str]:
    room = max(40, _WIDTH - len(head))
    first, *rest = textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""]
    return [(head + first).rstrip(), *(" " * len(head) + line for line in rest)]
