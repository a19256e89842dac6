"""What pulling and converting an image costs, beside other programs' way, in one run.

    python bench/images.py [--mib 300] [--layers 4] [--rounds 3] [--packed gzip|zstd] [--json]

An image is made of files of this host's /usr and pushed to a docker-registry on loopback. Then, in turn:
`skopeo copy` to a directory, `tar x` of each layer, `mkfs.ext4 -d` (the floor); and the image cache in a data
directory of its own, until the root filesystem is there (`convert`) and until nothing runs any more
(`settled`). Beside them `again`, for an image that is there. Memory is the largest sum of what the cache's
processes hold; processor seconds are of all but the registry. Needs root, docker-registry, skopeo, zstd.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from agentenv.config import Settings
from agentenv.image.cache import Images
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from measure import percentile, show
from support.archives import Layout, zstandard
from support.registry import Registry

MIB = 1 << 20
PLACES = ("/usr/lib", "/usr/share", "/usr/bin")
LARGEST = 30 * MIB


def gzip(data: bytes) -> bytes:
    """As build tools pack layers; Python's own way is slower."""
    return subprocess.run(["gzip", "-cn"], input=data, stdout=subprocess.PIPE, check=True).stdout


PACKED = {"gzip": gzip, "zstd": zstandard}


def chosen(mib: int, layers: int) -> list[list[str]]:
    """Files of /usr, `mib` in all, a list per layer; the same ones each time on one host."""
    files = [
        (os.path.join(directory, name), os.lstat(os.path.join(directory, name)).st_size)
        for place in PLACES
        for directory, _, names in sorted(os.walk(place))
        for name in sorted(names)
        if not os.path.islink(os.path.join(directory, name))
    ]
    random.Random(1).shuffle(files)
    lists: list[list[str]] = [[] for _ in range(layers)]
    left, number = mib * MIB, 0
    for path, size in files:
        if size <= min(left, LARGEST):
            left -= size
            lists[number % layers].append(path)
            number += 1
    return [sorted(each) for each in lists]


def pushed(registry: Registry, place: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Make the image and push it; its name, files, and bytes plain and packed."""
    layout, lists = Layout(place / "layout"), chosen(given.mib, given.layers)
    tarballs = []
    for paths in lists:
        command = ["tar", "--create", "--file=-", "--format=posix", "--no-recursion", "--files-from=-", "-P"]
        packed = subprocess.run(command, input="\n".join(paths).encode(), capture_output=True, check=True)
        tarballs.append(packed.stdout)
    entry = layout.image(tarballs, packed=PACKED[given.packed])
    name = registry.push(layout, entry, "bench/image")
    sizes = [layer["size"] for layer in json.loads(layout.read(entry))["layers"]]
    shutil.rmtree(layout.directory)
    return {
        "name": name,
        "files": sum(map(len, lists)),
        "plain_mib": sum(map(len, tarballs)) // MIB,
        "packed_mib": sum(sizes) // MIB,
    }


def floor(name: str, place: Path, disk_mib: int) -> dict[str, float]:
    """Seconds of each step, done by other programs one after the other."""
    copy, tree = place / "copy", place / "tree"
    taken: dict[str, float] = {}
    tree.mkdir(parents=True)

    def step(what: str, *command: str) -> None:
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        taken[what] = taken.get(what, 0.0) + time.perf_counter() - begun

    quiet = ("skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false")
    step("skopeo", *quiet, f"docker://{name}", f"dir:{copy}")
    for layer in json.loads((copy / "manifest.json").read_text())["layers"]:
        packed = str(copy / layer["digest"].removeprefix("sha256:"))
        program = "--zstd" if layer["mediaType"].endswith("zstd") else "--gzip"
        step("tar", "tar", program, "-xf", packed, "-C", str(tree))
    step("mkfs", "mkfs.ext4", "-q", "-F", "-d", str(tree), str(place / "out.ext4"), f"{disk_mib}M")
    taken["floor"] = sum(taken.values())
    return taken


async def ours(name: str, home: Path, disk_mib: int) -> dict[str, float]:
    """Seconds until the cache has the root filesystem, until it is at rest, and for the same again."""
    settings = Settings(home=home, insecure_registries=[name.partition("/")[0]])
    database = Database(settings.database)
    images = Images(settings, database, Ledger(database))
    begun = time.perf_counter()
    try:
        await images.get(f"docker:{name}", disk_mib=disk_mib, progress=lambda text: None)
        convert = time.perf_counter() - begun
        await images.close()
        settled = time.perf_counter() - begun
        begun = time.perf_counter()
        await images.get(f"docker:{name}", disk_mib=disk_mib, progress=lambda text: None)
        return {"convert": convert, "settled": settled, "again": time.perf_counter() - begun}
    finally:
        database.close()


def processor_s() -> float:
    """Processor seconds, in programs and in the kernel, of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def family_rss(root: int) -> int:
    """Bytes that the descendants of a process hold, shared ones counted for each."""
    parents, held = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)], held[int(entry.name)] = int(fields[1]), int(fields[21])
    family, grown = {root}, True
    while grown:
        found = {pid for pid, parent in parents.items() if parent in family} - family
        grown = bool(found)
        family |= found
    return sum(held[pid] for pid in family - {root} if pid in held) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def watching(ignored: int) -> Iterator[list[int]]:
    """Notes what this process' descendants hold while the block runs, all but the process `ignored`."""
    seen, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.03):
            other = int(Path(f"/proc/{ignored}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            seen.append(family_rss(os.getpid()) - other)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def measure(place: Path, given: argparse.Namespace) -> dict[str, Any]:
    registry = Registry(place / "registry")
    rounds: list[dict[str, float]] = []
    peak = 0
    try:
        image = pushed(registry, place, given)
        disk_mib = 2 * given.mib + 512
        for _ in range(given.rounds):
            begun = processor_s()
            taken = floor(image["name"], place / "floor", disk_mib)
            taken["floor_processor"], begun = processor_s() - begun, processor_s()
            shutil.rmtree(place / "floor")
            with watching(registry.pid) as seen:
                taken |= asyncio.run(ours(image["name"], place / "home", disk_mib))
            taken["settled_processor"] = processor_s() - begun
            peak = max(peak, *seen)
            shutil.rmtree(place / "home")
            rounds.append(taken)
    finally:
        registry.close()
    shown = {step: round(percentile([each[step] for each in rounds], 0.5), 3) for step in rounds[0]}
    ratios = [each["convert"] / each["floor"] for each in rounds]
    return {
        "image": {key: value for key, value in image.items() if key != "name"},
        "seconds_p50": shown,
        "x_floor": {"p50": round(percentile(ratios, 0.5), 2), "max": round(max(ratios), 2)},
        "memory_mib": {"peak": peak // MIB},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=300, help="MiB of files in the image")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--packed", choices=PACKED, default="gzip", help="how layers are compressed")
    parser.add_argument("--directory", type=Path, help="where all of it goes; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        show(measure(Path(place), given), given.json)


if __name__ == "__main__":
    main()
