"""Random things done to real sandboxes by several clients at the same time, and the node killed in between.

A model decides: what was answered is there, nothing else is, and the node is whole whenever it rests.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from e2b import Sandbox

from support.random_life import DISK, MEMORY, Client, Story, Subject, Values
from support.running import RunningNode
from support.wholeness import require_whole

pytestmark = pytest.mark.machine

SOAK = bool(os.environ.get("AENV_TEST_SOAK"))
OPERATIONS = 200 if SOAK else 24
CLIENTS = 3
STEPS = 4  # of each client, between two looks
MOST = 4

# Of another run, to repeat its choices (not its moments).
SEED = int(os.environ.get("AENV_TEST_SEED") or random.SystemRandom().randrange(1 << 31))


@pytest.fixture(scope="module")
def node(node_factory: Callable[..., RunningNode]) -> RunningNode:
    """A node of this module's own: it is killed."""
    return node_factory("random", max_sandboxes=str(MOST + 2))


@pytest.fixture
def story(node: RunningNode, host_audit: None) -> Iterator[Story]:
    """Tells what was done when something is wrong; in the end nothing is left."""
    print(f"AENV_TEST_SEED={SEED}")
    story = Story(node, MOST)
    yield story
    print("\n".join(story.done))
    end_all(node)
    with node.client() as client:
        for each in client.get("/snapshots").json():
            assert client.delete(f"/templates/{each['snapshotID']}").status_code == 204
    require_whole(node)


@pytest.mark.timeout(3600 if SOAK else 300)
def test_any_order(story: Story) -> None:
    dice = random.Random(SEED)
    bursts = -(-OPERATIONS // (CLIENTS * STEPS))
    for number in range(bursts):
        burst(story, dice, dies=number % 2 == 1)
        assert story.wrong == []
        require_whole(story.node)
        check_who_is_there(story)
        for subject in list(story.subjects.values()):
            if dice.random() < 0.6 or number == bursts - 1:
                check(story, subject)
    end_all(story.node)  # what was captured outlives them
    for name in dice.sample(sorted(story.snapshots), min(3, len(story.snapshots))):
        check_snapshot(story, name)


def end_all(node: RunningNode) -> None:
    with node.client() as client:
        for each in client.get("/v2/sandboxes").json():
            assert client.delete(f"/sandboxes/{each['sandboxID']}").status_code == 204


def burst(story: Story, dice: random.Random, *, dies: bool) -> None:
    """Some operations at the same time. The node may be killed in their midst, and is there again after."""
    clients = [Client(story, dice.randrange(1 << 31)) for _ in range(CLIENTS)]
    threads = [threading.Thread(target=client.run, args=(STEPS,)) for client in clients]
    story.note("--- burst")
    for thread in threads:
        thread.start()
    if dies:
        time.sleep(dice.uniform(0.1, 2.0))  # the moment is random
        story.dying.set()
        story.node.kill()
        story.note("--- killed")
    for thread in threads:
        thread.join()
    if dies:
        story.node.start()
        story.dying.clear()


def check_who_is_there(story: Story) -> None:
    """Those that were answered and not killed; what came of calls without an answer is ended here."""
    with story.node.client() as client:
        listed = {each["sandboxID"]: each for each in client.get("/v2/sandboxes").json()}
        for subject in list(story.subjects.values()):
            assert subject.id in listed or not subject.certain, f"{subject.id} is gone"
            if subject.id not in listed:
                story.gone(subject)
            subject.certain = True
        for name in listed.keys() - story.subjects.keys():
            assert listed[name]["metadata"]["tag"] in story.unanswered, f"nobody asked for {name}"
            assert client.delete(f"/sandboxes/{name}").status_code == 204
        story.unanswered.clear()
        known = {each["snapshotID"] for each in client.get("/snapshots", params={"limit": 100}).json()}
    assert story.snapshots.keys() <= known


def check(story: Story, subject: Subject) -> None:
    """A sandbox at rest: its first call after a connect succeeds, and what was written is there."""
    assert_values(connected(story.node, subject.id), subject.values)


def check_snapshot(story: Story, name: str) -> None:
    """What was written before a checkpoint is in all that starts from it."""
    sandbox = story.node.sandbox(name)
    assert_values(sandbox, story.snapshots[name])
    sandbox.kill()


def connected(node: RunningNode, sandbox_id: str) -> Sandbox:
    return Sandbox.connect(
        sandbox_id,
        timeout=600,
        api_url=node.url,
        sandbox_url=node.url,
        api_key=node.key,
        request_timeout=60,
    )


def assert_values(sandbox: Sandbox, values: Values) -> None:
    command = "; ".join(f"(cat {path} && echo) || echo none" for path in (DISK, MEMORY))
    disk, memory = sandbox.commands.run(command).stdout.split()
    assert disk in values[DISK], f"{sandbox.sandbox_id}: {values}"
    assert memory in values[MEMORY], f"{sandbox.sandbox_id}: {values}"
