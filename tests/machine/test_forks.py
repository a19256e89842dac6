"""Children of a running sandbox: what they share with it, and what is each one's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2b import Sandbox

from support.running import RunningNode
from support.wholeness import require_whole

pytestmark = pytest.mark.machine

CHILDREN = 3

# A process that lives on in each child. `random` is seeded once, from the kernel; what comes after a fork
# is the same in all of them, as on every fork, unless it asks the kernel again.
PROGRAM = """
import ctypes, os, random, time
libc = ctypes.CDLL(None)
def fresh():
    buffer = ctypes.create_string_buffer(16)
    assert libc.getrandom(buffer, 16, 0) == 16
    return [
        open('/dev/urandom', 'rb').read(16).hex(), buffer.raw.hex(), os.urandom(16).hex(),
        str(random.Random(os.urandom(32)).random()), str(random.SystemRandom().random()),
        open('/proc/sys/kernel/random/uuid').read().strip(),
    ]
print('ready', flush=True)
number = 0
while True:
    number += 1
    with open('/dev/shm/told.new', 'w') as file:
        print(number, time.time(), time.monotonic(), *fresh(), file=file)
    os.rename('/dev/shm/told.new', '/dev/shm/told')
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    return node_factory("forks")


@pytest.fixture
def source(node: RunningNode, host_audit: None) -> Iterator[Sandbox]:
    """A sandbox; it and all that came of it are gone afterwards."""
    yield node.sandbox("base")
    with node.client() as client:
        for each in client.get("/v2/sandboxes").json():
            assert client.delete(f"/sandboxes/{each['sandboxID']}").status_code == 204
    require_whole(node)


@pytest.fixture
def family(source: Sandbox) -> list[Sandbox]:
    """The sandbox, in which a program runs and a server listens, and its children."""
    source.files.write("/home/user/program.py", PROGRAM)
    source.commands.run("echo shared | tee /dev/shm/shared > /home/user/shared")
    source.commands.run("python3 -m http.server 8000 --directory /home/user", background=True, timeout=0)
    source.commands.run("exec python3 /home/user/program.py", background=True, timeout=0)
    source.commands.run("until [ -s /dev/shm/told ]; do sleep 0.05; done")
    children = source.fork(count=CHILDREN, timeout=600)
    assert all(isinstance(each, Sandbox) for each in children), children
    return [source, *(each for each in children if isinstance(each, Sandbox))]


def said(sandbox: Sandbox, command: str) -> list[str]:
    return list(sandbox.commands.run(command).stdout.split())


def everywhere(family: list[Sandbox], command: str) -> list[list[str]]:
    """What a command says in each, all at the same time."""
    with ThreadPoolExecutor(len(family)) as threads:
        return list(threads.map(lambda each: said(each, command), family))


def test_children_are_independent(node: RunningNode, family: list[Sandbox]) -> None:
    check_names(family)
    check_randomness_and_clock(family)
    check_memory_and_disk(family)
    check_network(node, family)


def check_names(family: list[Sandbox]) -> None:
    """Host name and machine-id are each one's own; the kernel's boot is one that all of them went through."""
    told = everywhere(
        family, "hostname; cat /etc/hostname /etc/machine-id; cat /proc/sys/kernel/random/boot_id; id -un"
    )
    assert [each[:2] for each in told] == [[sandbox.sandbox_id] * 2 for sandbox in family]
    assert len({each[2] for each in told}) == len(family)
    assert len({each[3] for each in told}) == 1
    assert len({sandbox._envd_access_token for sandbox in family}) == len(family)


def check_randomness_and_clock(family: list[Sandbox]) -> None:
    """Whatever asks the kernel gets numbers of its own, in processes that went on and in new ones; the wall
    clock is right, and the other one went on."""
    before = [said(each, "cat /dev/shm/told")[0] for each in family]
    for sandbox, number in zip(family, before, strict=True):
        sandbox.commands.run(
            f"until [ $(cut -d' ' -f1 /dev/shm/told) -gt {int(number) + 1} ]; do sleep 0.05; done"
        )
    earliest = time.time() - 2
    told = everywhere(
        family, "cat /dev/shm/told; date +%s.%N; python3 -c 'import random; print(random.random())'"
    )
    latest = time.time() + 2
    for each in told:
        assert len(each) == 3 + 6 + 2
        assert earliest - 2 <= float(each[1]) <= latest
        assert earliest <= float(each[-2]) <= latest
    numbers = [value for each in told for value in (*each[3:9], each[-1])]
    assert len(set(numbers)) == len(numbers)


def check_memory_and_disk(family: list[Sandbox]) -> None:
    """What was there is in each, and what one writes is in no other."""
    assert everywhere(family, "cat /dev/shm/shared /home/user/shared") == [["shared", "shared"]] * len(family)
    for sandbox in family:
        name = sandbox.sandbox_id
        sandbox.commands.run(
            f"echo {name} | tee /dev/shm/shared > /home/user/shared; touch /home/user/{name}"
        )
    told = everywhere(family, "cat /dev/shm/shared /home/user/shared; ls /home/user | grep -c '^i'")
    assert told == [[sandbox.sandbox_id, sandbox.sandbox_id, "1"] for sandbox in family]


def check_network(node: RunningNode, family: list[Sandbox]) -> None:
    """Each has the server that was listening, at an address of its own, and is not its siblings."""
    with ThreadPoolExecutor(len(family)) as threads:
        answers = list(threads.map(lambda each: fetched(node, each), family))
    assert answers == [sandbox.sandbox_id for sandbox in family]
    family[1].kill()
    with pytest.raises(AssertionError):
        fetched(node, family[1])
    rest = [family[0], *family[2:]]
    assert [fetched(node, each) for each in rest] == [each.sandbox_id for each in rest]


def fetched(node: RunningNode, sandbox: Sandbox) -> str:
    """What the server in a sandbox says is shared."""
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
    answer = httpx.get(f"{node.url}/shared", headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.text.strip()


def test_a_fork_while_clients_are_connected(source: Sandbox) -> None:
    """The source's own connections and commands go on through a fork of it; they are no child's."""
    command = source.commands.run(
        "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.2; done", background=True
    )
    made: list[object] = []
    forking = threading.Thread(target=lambda: made.extend(source.fork(count=1, timeout=600)))
    forking.start()
    assert command.wait().stdout.split() == [str(number) for number in range(1, 11)]
    forking.join()
    assert len(made) == 1
    assert isinstance(made[0], Sandbox)
    assert said(made[0], "echo well") == ["well"]
