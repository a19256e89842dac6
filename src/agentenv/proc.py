"""What /proc tells of a process."""

from __future__ import annotations

from pathlib import Path


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (proc(5)); empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int, *, zombie: bool = True) -> int | None:
    """When a process started, in clock ticks since boot (field 22); None when it is gone, or without
    `zombie` when only its exit status is left."""
    fields = stat(pid)
    return int(fields[19]) if fields and (zombie or fields[0] not in "ZX") else None
