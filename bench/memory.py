"""What memory layers cost per MiB, beside copying memory with memcpy, in one run.

    python bench/memory.py [--mib 64] [--size 512] [--rounds 5] [--directory DIR] [--json]

A child process maps a file of `size` MiB privately and dirties `mib` of it, once in one piece and once
every other page, the worst case. Then: scan the page map, capture (read, compare, write), a second
capture of the same pages (compare only: nothing differs), apply to a fresh child, fold. The floor is a
copy of as many bytes within this process, through a buffer of 1 MiB. Layers are written to files that
are removed afterwards; the directory should be where a node has its data.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agentenv.vmm.memory import Image, apply, capture, fold
from agentenv.vmm.pagemap import mapping_of, private_pages
from measure import percentile, show

MIB = 1 << 20
PAGE = mmap.PAGESIZE

CHILD = """
import mmap, os, sys
descriptor, pages, step = map(int, sys.argv[1:])
memory = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
for page in range(0, pages * step, step):
    memory[page * mmap.PAGESIZE:(page + 1) * mmap.PAGESIZE] = bytes([page % 255 + 1]) * mmap.PAGESIZE
print("ready", flush=True)
sys.stdin.read()
"""


class Child:
    """A process with `pages` dirty pages, `step` apart."""

    def __init__(self, base: Path, pages: int, step: int) -> None:
        with base.open("rb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-c", CHILD, str(file.fileno()), str(pages), str(step)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[file.fileno()],
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        self.process.communicate()


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def copy_floor(mib: int) -> float:
    source = np.ones((mib, MIB), np.uint8)
    target = np.ones(MIB, np.uint8)

    def copy() -> None:
        for part in source:
            np.copyto(target, part)

    return timed(copy)


def one_round(base: Path, place: Path, mib: int, step: int) -> dict[str, float]:
    """Seconds of each step."""
    pages, taken = mib * MIB // PAGE, {"memcpy": copy_floor(mib)}
    child = Child(base, pages, step)
    pid, delta, again, flat = child.process.pid, place / "delta", place / "again", place / "flat"
    try:
        mapping = mapping_of(pid, base)
        taken["scan"] = timed(lambda: private_pages(mapping))
        with Image(base) as image:
            taken["capture"] = timed(lambda: capture(pid, image, delta))
        taken["open"] = timed(lambda: Image(base, [delta]).close())
        with Image(base, [delta]) as image:
            taken["compare"] = timed(lambda: capture(pid, image, again))
            fresh = Child(base, 0, 1)
            try:
                taken["apply"] = timed(lambda: apply(fresh.process.pid, image))
            finally:
                fresh.end()
            taken["fold"] = timed(lambda: fold(image, flat))
    finally:
        child.end()
        for path in place.iterdir():
            if path != base:
                path.unlink()
    return taken


def measure(place: Path, mib: int, size: int, rounds: int) -> dict[str, Any]:
    base = place / "base"
    with base.open("wb") as file:
        for _ in range(size // 4):
            file.write(os.urandom(MIB))
        file.truncate(size * MIB)
    patterns = {"piece": 1, "every_other": 2}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in patterns}
    for _ in range(rounds):
        for name, step in patterns.items():
            taken[name].append(one_round(base, place, mib, step))
    return {name: report(all_rounds, mib) for name, all_rounds in taken.items()}


def report(rounds: list[dict[str, float]], mib: int) -> dict[str, dict[str, float]]:
    """p50 of each step as milliseconds, per MiB, and as a multiple of memcpy."""
    floor = percentile([each["memcpy"] for each in rounds], 0.5)
    shown = {}
    for step in rounds[0]:
        middle = percentile([each[step] for each in rounds], 0.5)
        shown[step] = {
            "ms": round(middle * 1e3, 2),
            "ms_per_mib": round(middle * 1e3 / mib, 3),
            "best_ms_per_mib": round(min(each[step] for each in rounds) * 1e3 / mib, 3),
            "x_memcpy": round(middle / floor, 1),
        }
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="MiB dirtied")
    parser.add_argument("--size", type=int, default=512, help="MiB of the guest's memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the layers go; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if 2 * given.mib > given.size:
        parser.error("twice --mib must not be more than --size")
    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        result = measure(Path(place), given.mib, given.size, given.rounds)
    if given.json:
        show({"mib": given.mib, "size": given.size, **result}, True)
        return
    for pattern, steps in result.items():
        print(f"{given.mib} MiB of {given.size}, {pattern}")
        show(steps, False)


if __name__ == "__main__":
    main()
