"""The node's own log: lines for people, or one JSON object for each."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

from agentenv.config import Settings
from agentenv.context import REQUEST_ID, SANDBOX_ID

TEXT_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# The form of sandbox.records.new_sandbox_id: a line that is not an operation's may still name one.
_SANDBOX = re.compile(r"i[a-z2-7]{19}")


class JsonLines(logging.Formatter):
    """Each record as a JSON object on one line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, and
    `sandbox`, `request` and `exception` where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "sandbox": sandbox_of(record),
            "request": REQUEST_ID.get(),
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
        }
        return json.dumps({name: value for name, value in document.items() if value})


def sandbox_of(record: logging.LogRecord) -> str:
    """The sandbox that a record names, else the one of the operation that it is of."""
    given: Any = record.args
    for each in given if isinstance(given, tuple) else ():
        if isinstance(each, str) and _SANDBOX.fullmatch(each):
            return each
    return SANDBOX_ID.get()


def configure(settings: Settings) -> None:
    """Have this process log to its standard error as the settings say."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if settings.log_format == "json" else logging.Formatter(TEXT_FORM))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the node says itself when it serves and ends
