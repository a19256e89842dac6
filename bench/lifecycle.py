"""What the life of a sandbox costs, beside the bare hypervisor's steps for the same files, in one run.

    python bench/lifecycle.py [--only create,pause] [--rounds 10] [--json]

Parts: create (pool warm, pool empty), exec, pause (with resume, against dirty memory), checkpoint (against
dirty memory and disk written), fork (1, 4, 16), memory (per idle child), rate (creates per second at 1, 4,
16 at once). Starts a node of its own on a scratch directory beside the prepared one (`AENV_HOME`), whose
guest files and templates it shares; the first start of the template is not measured. Times are in
milliseconds from call to answer over HTTP; `phases` are the node's own (its Server-Timing header), `floor`
the same start through `agentenv.vmm` alone. Run it on a quiet host: the load is told with the result.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from agentenv import config
from agentenv.config import Settings
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.sandbox.records import Records
from floor import Floor, Start, floor_of
from measure import percentile, show, summary
from stand import BenchNode, Call, Client, node_on, scratch_home

MIB = 1 << 20
DIRTY_MIB = (0, 16, 64, 256)
DISK_MIB = (0, 1024)
FORKS = (1, 4, 16)
AT_ONCE = (1, 4, 16)
# What the hypervisor, the guest and (where a snapshot is published durably) the host's disk do; the rest of
# a call is the platform's own part.
MACHINE_PHASES = ("restore", "run", "boot", "agent", "stop", "capture", "end", "prepare", "publish")

# One process that dirties 256 MiB and a while later 4 MiB of them anew, with nothing else in the guest.
TWICE = """
import time
held = bytearray(b"U") * (256 << 20)
open("/tmp/first", "w").write("done")
time.sleep(8)
for page in range(0, 4 << 20, 4096):
    held[page] = 86
time.sleep(99999)
"""

Result = dict[str, Any]


class Bench:
    """A node, its floor, and how often each thing is done."""

    def __init__(self, settings: Settings, template: str, rounds: int, limit_s: float) -> None:
        self.settings = settings
        self.template = template
        self.rounds = rounds
        self._until = time.monotonic() + limit_s
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._floor_context = floor_of(settings)
        self._floor: Floor | None = None
        self.node: BenchNode | None = None

    def each_round(self, rounds: int | None = None) -> Iterator[int]:
        """Round after round, but not beyond the time given; at least one."""
        for number in range(rounds or self.rounds):
            if number and time.monotonic() > self._until:
                return
            yield number

    def floor(self, snapshot_id: str | None = None, *, identify: bool = False) -> Start:
        """One bare start."""
        if self._floor is None:
            self._floor = self._runner.run(self._floor_context.__aenter__())
        return self._runner.run(self._floor.start(snapshot_id, identify=identify))

    def close(self) -> None:
        """Remove what the floor needed."""
        if self._floor is not None:
            self._runner.run(self._floor_context.__aexit__(None, None, None))
        self._runner.close()

    def create(self, client: Client, template: str | None = None) -> Call:
        """A sandbox by HTTP."""
        body = {"templateID": template or self.template, "timeout": 3600}
        return client.call("POST", "/v2/sandboxes", body)

    def snapshot_of(self, sandbox_id: str) -> str:
        """The snapshot that a sandbox stands on, from the node's records."""
        database = Database(self.settings.database)
        try:
            record = Records(database).find(sandbox_id)
        finally:
            database.close()
        assert record is not None and record.snapshot is not None
        return record.snapshot

    def processes(self, sandbox_ids: list[str]) -> dict[str, int]:
        """The hypervisor's process of each sandbox, from the node's records."""
        database = Database(self.settings.database)
        try:
            records, ledger = Records(database), Ledger(database)
            found = {}
            for sandbox_id in sandbox_ids:
                record = records.find(sandbox_id)
                assert record is not None and record.machine is not None
                entries = ledger.entries(owner=record.machine.id, kind="process")
                found[sandbox_id] = int(entries[-1].detail["pid"])
            return found
        finally:
            database.close()


@contextmanager
def sandbox_of(call: Call, client: Client) -> Iterator[dict[str, Any]]:
    """The sandbox of a create's answer, killed at the end."""
    body: dict[str, Any] = call.body
    try:
        yield body
    finally:
        client.call("DELETE", f"/sandboxes/{body['sandboxID']}", expect=(204, 404))


def of_calls(calls: list[Call]) -> Result:
    """Percentiles of calls, the median of each phase, and the platform's own part."""
    names = list(dict.fromkeys(name for call in calls for name in call.phases))
    phases = {
        name: round(percentile([call.phases[name] for call in calls if name in call.phases], 0.5), 1)
        for name in names
    }
    own = [call.seconds - sum(call.phases.get(name, 0.0) for name in MACHINE_PHASES) / 1e3 for call in calls]
    return {
        **summary([call.seconds for call in calls]),
        "own_p50_ms": round(percentile(own, 0.5) * 1e3, 1),
        "phases_p50": phases,
        "n": len(calls),
    }


def of_starts(starts: list[Start]) -> Result:
    """The same of bare starts."""
    return {
        **summary([start.total for start in starts]),
        "running_p50_ms": round(percentile([start.running for start in starts], 0.5) * 1e3, 1),
        "n": len(starts),
    }


def p50(values: list[float]) -> float:
    return percentile(values, 0.5) if values else float("nan")


def ratio(calls: list[Call], starts: list[Start]) -> float:
    """How many times the floor the calls take."""
    return round(p50([call.seconds for call in calls]) / p50([start.total for start in starts]), 2)


# The parts


def part_create(bench: Bench) -> Result:
    """In each round the floor and a create from an empty pool; then creates from a warm one."""
    empty: list[Call] = []
    floors: list[Start] = []
    told: list[Start] = []
    with node_on(bench.settings, pool_most="0") as node:
        client = node.client()
        with sandbox_of(bench.create(client), client):  # prepares the template
            pass
        for _ in bench.each_round():
            floors.append(bench.floor())
            told.append(bench.floor(identify=True))
            call = bench.create(client)
            with sandbox_of(call, client):
                empty.append(call)
            time.sleep(0.3)  # its slot is taken down and another made ahead
    warm, missed = _warm_creates(bench)
    return {
        "floor": of_starts(floors),
        "floor_told": of_starts(told),
        "pool_empty": of_calls(empty),
        "pool_empty_x_floor": ratio(empty, floors),
        "pool_empty_x_floor_told": ratio(empty, told),
        "pool_warm": {**of_calls(warm), "missed": missed},
    }


def _warm_creates(bench: Bench) -> tuple[list[Call], int]:
    """Creates with time for the pool to refill between them; those that found it empty are only counted."""
    warm: list[Call] = []
    missed, pause = 0, 2.0
    with node_on(bench.settings, pool_least="2") as node:
        client = node.client()
        for _ in bench.each_round(2 * bench.rounds):
            call = bench.create(client)
            with sandbox_of(call, client):
                if "restore" in call.phases or "prepare" in call.phases:
                    missed, pause = missed + 1, min(pause * 1.5, 10.0)
                else:
                    warm.append(call)
            if len(warm) == bench.rounds:
                break
            time.sleep(pause)
        client.close()
    return warm, missed


def part_exec(bench: Bench) -> Result:
    """A command in a login shell: the first after a create, and later ones."""
    first: list[float] = []
    later: list[float] = []
    with node_on(bench.settings) as node:
        client = node.client()
        for _ in bench.each_round(max(3, bench.rounds // 2)):
            with sandbox_of(bench.create(client), client) as sandbox:
                first.append(client.start_process(sandbox, "true")[0])
                later += [client.start_process(sandbox, "true")[0] for _ in range(5)]
    return {"first": summary(first), "later": summary(later)}


def dirty(client: Client, sandbox: dict[str, Any], mib: int, byte: int = 0x55) -> None:
    """Have a process in the guest hold `mib` MiB of pages that hold something."""
    if mib:
        hold = f"import time;b=bytes([{byte}])*({mib}<<20);print(len(b),flush=True);time.sleep(99999)"
        said = f"/tmp/held{byte}"
        client.start_process(sandbox, f"python3 -c '{hold}' > {said} 2>&1 & {_until(said)}")


def _until(path: str) -> str:
    """A command that waits for a file with something in it."""
    return f"while ! [ -s {path} ]; do sleep 0.05; done"


def part_pause(bench: Bench) -> Result:
    """Pause and resume against dirty memory; each resume beside a bare start from the same snapshot.

    Without a pool: after each create it would be filled again meanwhile, on the same processors."""
    result: Result = {}
    with node_on(bench.settings, pool_most="0") as node:
        client = node.client()
        for mib in DIRTY_MIB:
            pauses: list[Call] = []
            resumes: list[Call] = []
            floors: list[Start] = []
            for _ in bench.each_round(max(2, bench.rounds // 2)):
                with sandbox_of(bench.create(client), client) as sandbox:
                    dirty(client, sandbox, mib)
                    path = f"/sandboxes/{sandbox['sandboxID']}"
                    pauses.append(client.call("POST", f"{path}/pause"))
                    time.sleep(0.5)  # what is done after the answer
                    floors.append(bench.floor(bench.snapshot_of(sandbox["sandboxID"])))
                    time.sleep(0.5)
                    resumes.append(client.call("POST", f"{path}/connect", {"timeout": 3600}))
                    client.start_process(sandbox, "true")
            running = [
                sum(call.phases.get(name, 0) for name in ("slot", "restore", "run")) for call in resumes
            ]
            result[f"dirty_{mib}"] = {
                "pause": of_calls(pauses),
                "resume": {**of_calls(resumes), "running_p50_ms": round(p50(running), 1)},
                "floor": of_starts(floors),
                "resume_x_floor": ratio(resumes, floors),
            }
    return result


def part_checkpoint(bench: Bench) -> Result:
    """Checkpoints of a running sandbox against dirty memory and disk written, and one right after another.

    Without a pool, as pauses."""
    result: Result = {}
    with node_on(bench.settings, pool_most="0") as node:
        client = node.client()
        for disk in DISK_MIB:
            for mib in DIRTY_MIB if not disk else DIRTY_MIB[:3]:
                calls = _checkpoints(bench, client, mib, disk)
                stopped = [sum(call.phases.get(n, 0) for n in ("stop", "capture", "run")) for call in calls]
                name = f"dirty_{mib}" + (f"_disk_{disk}" if disk else "")
                result[name] = {**of_calls(calls), "stopped_p50_ms": round(p50(stopped), 1)}
        result["second"] = _second_checkpoint(bench, client)
    return result


def _checkpoints(bench: Bench, client: Client, mib: int, disk: int) -> list[Call]:
    calls: list[Call] = []
    for _ in bench.each_round(max(2, bench.rounds // 3)):
        with sandbox_of(bench.create(client), client) as sandbox:
            if disk:
                write = f"dd if=/dev/zero of=/var/tmp/big bs=1M count={disk} oflag=direct 2>&1"
                client.start_process(sandbox, write)
            dirty(client, sandbox, mib)
            calls.append(client.call("POST", f"/sandboxes/{sandbox['sandboxID']}/snapshots"))
            client.start_process(sandbox, "true")
        client.call("DELETE", f"/templates/{calls[-1].body['snapshotID']}", expect=(200, 204))
    return calls


def _second_checkpoint(bench: Bench, client: Client) -> Result:
    """What a checkpoint with 4 MiB newly dirtied stores after one with 256 MiB."""
    with sandbox_of(bench.create(client), client) as sandbox:
        path = f"/sandboxes/{sandbox['sandboxID']}/snapshots"
        client.start_process(sandbox, f"python3 -c '{TWICE}' 2>&1 & {_until('/tmp/first')}")
        first = client.call("POST", path)
        time.sleep(10)
        second = client.call("POST", path)
        stored = [
            client.call("GET", f"/snapshots/{call.body['snapshotID']}").body["addedBytes"]
            for call in (first, second)
        ]
        for call in (second, first):
            client.call("DELETE", f"/templates/{call.body['snapshotID']}", expect=(200, 204))
    return {"first_mib": round(stored[0] / MIB, 1), "second_mib": round(stored[1] / MIB, 1)}


def part_fork(bench: Bench) -> Result:
    """Forks of a running sandbox: call to the last child's answer, and how long the source stood still."""
    result: Result = {}
    cores = os.cpu_count() or 1
    with node_on(bench.settings) as node:
        client = node.client()
        with sandbox_of(bench.create(client), client) as source:
            client.start_process(source, "true")
            floors = [bench.floor(identify=True) for _ in range(3)]
            floor = p50([start.total for start in floors])
            for count in FORKS:
                calls: list[Call] = []
                failed = 0
                for _ in bench.each_round(max(1, bench.rounds // 4)):
                    call = client.call("POST", f"/sandboxes/{source['sandboxID']}/fork", {"count": count})
                    children = [each["sandbox"] for each in call.body if each.get("sandbox")]
                    failed += count - len(children)
                    for child in children:
                        client.call("DELETE", f"/sandboxes/{child['sandboxID']}", expect=(204, 404))
                    calls.append(call)
                    time.sleep(1.0)
                stopped = [sum(call.phases.get(n, 0) for n in ("stop", "capture", "run")) for call in calls]
                result[f"fork_{count}"] = {
                    **{key: value for key, value in of_calls(calls).items() if key != "own_p50_ms"},
                    "failed": failed,
                    "stopped_p50_ms": round(p50(stopped), 1),
                    "x_floor_per_core": round(
                        p50([call.seconds for call in calls]) / (max(1.0, count / cores) * floor), 2
                    ),
                }
            result["floor_told"] = of_starts(floors)
    return result


def part_memory(bench: Bench) -> Result:
    """What an idle child adds: its process's proportional set size, and the guest's own private pages."""
    with node_on(bench.settings) as node:
        client = node.client()
        with sandbox_of(bench.create(client), client) as source:
            client.start_process(source, "true")
            call = client.call("POST", f"/sandboxes/{source['sandboxID']}/fork", {"count": 4})
            children = [each["sandbox"]["sandboxID"] for each in call.body if each.get("sandbox")]
            time.sleep(3)  # idle
            found = [memory_of(pid) for pid in bench.processes(children).values()]
            for child in children:
                client.call("DELETE", f"/sandboxes/{child}", expect=(204, 404))
    return {
        "pss_mib": {"p50": p50([pss for pss, _ in found]), "max": max(pss for pss, _ in found)},
        "guest_private_mib": {"p50": p50([own for _, own in found]), "max": max(own for _, own in found)},
        "n": len(found),
    }


def memory_of(pid: int) -> tuple[float, float]:
    """MiB of a machine's process: proportional set size, and anonymous pages in the guest's memory."""
    pss = _kib(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss:")
    guest = 0.0
    for mapping in _mappings(Path(f"/proc/{pid}/smaps").read_text()):
        if "/memory" in mapping.splitlines()[0] or "/flat" in mapping.splitlines()[0]:
            guest += _kib(mapping, "Anonymous:")
    return round(pss / 1024, 1), round(guest / 1024, 1)


def _mappings(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in text.splitlines():
        if lines and not line.split(" ", 1)[0].endswith(":"):
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def _kib(text: str, name: str) -> float:
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))


def part_rate(bench: Bench) -> Result:
    """Creates per second, so many at once, each from whatever the pool has by then."""
    result: Result = {}
    with node_on(bench.settings) as node:
        for width in AT_ONCE:
            clients = [node.client() for _ in range(width)]
            each = functools.partial(_some, bench, max(8, width) // width)
            with ThreadPoolExecutor(width) as pool:
                begun = time.perf_counter()
                chunks = list(pool.map(each, clients))
                seconds = time.perf_counter() - begun
            calls = [call for chunk in chunks for call in chunk]
            for call in calls:
                clients[0].call("DELETE", f"/sandboxes/{call.body['sandboxID']}", expect=(204, 404))
            pooled = sum("restore" not in call.phases for call in calls)
            result[f"at_once_{width}"] = {
                "per_s": round(len(calls) / seconds, 2),
                **of_calls(calls),
                "from_pool": pooled,
            }
            time.sleep(2)
    return result


def _some(bench: Bench, count: int, client: Client) -> list[Call]:
    return [bench.create(client) for _ in range(count)]


PARTS: dict[str, Callable[[Bench], Result]] = {
    "create": part_create,
    "exec": part_exec,
    "pause": part_pause,
    "checkpoint": part_checkpoint,
    "fork": part_fork,
    "memory": part_memory,
    "rate": part_rate,
}


def table(result: Result) -> None:
    """The result as lines: part, what, figures."""
    for part, content in result.items():
        if not isinstance(content, dict):
            print(f"{part}: {content}")
            continue
        print(f"\n{part}")
        for name, figures in content.items():
            nested = isinstance(figures, dict) and any(isinstance(each, dict) for each in figures.values())
            if nested and not {"p50_ms", "pss_mib"} & figures.keys():
                for inner, values in figures.items():
                    show({f"  {name} {inner}": _flat(values)}, False)
            else:
                show({f"  {name}": _flat(figures)}, False)


def _flat(figures: Any) -> Any:
    if not isinstance(figures, dict):
        return figures
    phases = figures.get("phases_p50")
    flat = {key: value for key, value in figures.items() if key != "phases_p50"}
    if phases:
        flat["| phases"] = " ".join(f"{key}={value}" for key, value in phases.items())
    return flat


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--rounds", type=int, default=10, help="of creates; other parts do fewer")
    parser.add_argument("--template", default="base")
    parser.add_argument("--part-limit", type=float, default=240, help="seconds after which a part ends early")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    parts = [name for name in given.only.split(",") if name]
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    # Ended from outside, it still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result: Result = {"load_before": os.getloadavg()[0], "cores": os.cpu_count()}
    with scratch_home(config.load().home) as settings:
        with node_on(settings) as node:  # makes the template's snapshot
            client = node.client()
            with sandbox_of(Bench(settings, given.template, 1, 1).create(client), client):
                pass
        for name in parts:
            bench = Bench(settings, given.template, given.rounds, given.part_limit)
            try:
                result[name] = PARTS[name](bench)
            finally:
                bench.close()
    result["load_after"] = os.getloadavg()[0]
    if given.json:
        show(result, True)
    else:
        table(result)


if __name__ == "__main__":
    main()
