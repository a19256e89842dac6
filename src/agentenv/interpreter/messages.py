"""A kernel's messages as the lines that clients read.

Kernel messages: https://jupyter-client.readthedocs.io/en/stable/messaging.html. The lines are those that
E2B's clients take: objects whose `type` is stdout, stderr, result, error, number_of_executions, keepalive or
end_of_execution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

Line = dict[str, Any]
Message = Mapping[str, Any]

KEEPALIVE: Line = {"type": "keepalive"}
END: Line = {"type": "end_of_execution"}

_FIELDS: Mapping[str, str] = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def line_of(message: Message) -> Line | None:
    """The line that a message from a kernel's output comes to, or None where clients are told nothing."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        name = "stderr" if content["name"] == "stderr" else "stdout"
        return {"type": name, "text": content["text"], "timestamp": _timestamp(message)}
    if kind in ("display_data", "execute_result"):
        return result(content["data"], main=kind == "execute_result")
    if kind == "error":
        return error(content["ename"], content["evalue"], "\n".join(content["traceback"]))
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None


def result(data: Mapping[str, Any], *, main: bool) -> Line:
    """What was displayed, by the names that clients have for its forms; others go under `extra`."""
    line: Line = {"type": "result", "is_main_result": main, "extra": {}}
    for form, value in data.items():
        name = _FIELDS.get(form)
        if name is None:
            line["extra"][form] = value
        elif value is not None:
            line[name] = value
    if isinstance(text := line.get("text"), str):
        line["text"] = _unquoted(_COLOUR.sub("", text))
    return line


def error(name: str, value: str, traceback: str = "") -> Line:
    """What went wrong in the code, or with its kernel."""
    return {"type": "error", "name": name, "value": value, "traceback": _COLOUR.sub("", traceback)}


def ends(message: Message) -> bool:
    """Whether the kernel has done all that the request asked for."""
    return bool(message["msg_type"] == "status" and message["content"]["execution_state"] == "idle")


def _unquoted(text: str) -> str:
    """A string's own text, where the kernel shows it as a literal."""
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _timestamp(message: Message) -> str | None:
    date = message["header"].get("date")
    return date.isoformat() if isinstance(date, datetime) else date
