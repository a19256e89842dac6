"""What builds of templates cost: the first time, again, with a changed last step, and many at once.

    AENV_HOME=… python bench/builds.py [--rounds 5] [--at-once 10] [--json]

Runs a node of its own on a scratch copy of the prepared data directory, and asks for builds on the template
`base` with three short steps through the API that E2B's clients use. Seconds go from the request for a build
to its status `ready`, asked for every 10 ms.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

from agentenv import config
from measure import show, summary
from stand import BenchNode, Client, node_on, scratch_home

LOOK_AGAIN_S = 0.01
STEPS = ("echo one > one", "echo two > two", "echo three > three")


def build(client: Client, name: str, texts: tuple[str, ...]) -> float:
    """Build a template; seconds until it is ready."""
    begun = time.perf_counter()
    asked = client.call("POST", "/v3/templates", {"name": name}, expect=(202,)).body
    path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    steps: list[dict[str, Any]] = [{"type": "RUN", "args": [text]} for text in texts]
    client.call("POST", f"/v2{path}", {"fromTemplate": "base", "steps": steps}, expect=(202,))
    while (status := client.call("GET", f"{path}/status?limit=0").body)["status"] != "ready":
        if status["status"] == "error":
            raise SystemExit(f"the build failed: {status['reason']}")
        time.sleep(LOOK_AGAIN_S)
    return time.perf_counter() - begun


def at_once(node: BenchNode, count: int, texts: list[tuple[str, ...]]) -> float:
    """That many builds at the same time; seconds until all are ready."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            client = node.client()
            build(client, f"t{number}", texts[number])
            client.close()
        except BaseException as error:  # told below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"{len(failures)} of {count} builds failed: {failures[0]}")
    return time.perf_counter() - begun


def measure(node: BenchNode, rounds: int, count: int) -> dict[str, Any]:
    """All figures, of one node."""
    client = node.client()
    build(client, "warm", ("true",))  # the base's own first snapshot is made
    first, again, changed = [], [], []
    for number in range(rounds):
        texts = (f"echo {number}", *STEPS)
        first.append(build(client, "first", texts))
        again.append(build(client, "again", texts))
        changed.append(build(client, "changed", (*texts[:-1], f"echo other {number}")))
    client.close()
    return {
        "first": summary(first),
        "unchanged": summary(again),
        "changed_last_step": summary(changed),
        "identical_at_once_s": round(at_once(node, count, [("sleep 1", "echo same")] * count), 2),
        "different_at_once_s": round(at_once(node, count, [(f"echo n{n}",) for n in range(count)]), 2),
        "at_once": count,
        "steps": len(STEPS) + 1,
        "rounds": rounds,
    }


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with scratch_home(config.load().home) as settings, node_on(settings) as node:
        show(measure(node, options.rounds, options.at_once), options.json)


if __name__ == "__main__":
    main()
