"""The node's log as JSON objects."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentenv.context import REQUEST_ID, SANDBOX_ID
from agentenv.observe.logs import JsonLines
from agentenv.sandbox.live import Live
from agentenv.sandbox.records import Origin, Sandbox, new_sandbox_id
from agentenv.sandbox.transitions import State


class Kept(logging.Handler):
    """Formats at once, as a stream's handler does."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        assert "\n" not in text
        self.lines.append(json.loads(text))


def logger() -> tuple[logging.Logger, Kept]:
    kept, made = Kept(), logging.Logger("test")
    made.addHandler(kept)
    return made, kept


def test_a_line_has_what_is_known_and_no_more() -> None:
    log, kept = logger()
    log.warning("many\nlines %d", 2)
    [line] = kept.lines
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "warning", "logger": "test", "message": "many\nlines 2"}
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("it failed")
    assert "ValueError: wrong" in kept.lines[1]["exception"]


async def test_an_operation_has_its_sandbox_and_the_request_that_began_it() -> None:
    log, kept = logger()
    record = Sandbox(new_sandbox_id(), State.RUNNING, Origin("t", "base", "b"), 0.0, 1.0, 1, 1, 512, 1024)
    other = new_sandbox_id()
    answered = asyncio.Event()

    async def work() -> None:
        log.info("begun")
        await answered.wait()
        log.info("of another: %s", other)

    token = REQUEST_ID.set("r-1")
    task = Live(record).begin(work(), "test")
    await asyncio.sleep(0)
    REQUEST_ID.reset(token)
    answered.set()
    await task
    log.info("outside")
    seen = [(line["message"].split()[0], line.get("sandbox"), line.get("request")) for line in kept.lines]
    assert seen == [("begun", record.id, "r-1"), ("of", other, "r-1"), ("outside", None, None)]
    assert SANDBOX_ID.get() == ""


def test_a_process_logs_in_the_form_of_its_settings(tmp_path: Path) -> None:
    program = (
        "import logging; from agentenv import config; from agentenv.observe import logs;"
        "logs.configure(config.load()); log = logging.getLogger('a'); log.info('said'); log.debug('not said')"
    )
    for form in ("json", "text"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"AENV_HOME": str(tmp_path), "AENV_LOG_FORMAT": form, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        [line] = done.stderr.splitlines()
        assert json.loads(line)["message"] == "said" if form == "json" else line.endswith("INFO a: said")
