"""Clients that do random things to a real node at the same time, and a model of what must come of it.

The model knows, for each sandbox and each snapshot, what its files may hold. A write that was answered
leaves one possibility; one whose outcome nobody knows adds one. What depends on the model exactly is
done by one client per sandbox at a time; pauses and resumes come from anybody at any time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from support.running import RunningNode

DISK, MEMORY = "/home/user/value", "/dev/shm/value"
NONE = "none"

Values = dict[str, frozenset[str]]

AT_FIRST: Values = {DISK: frozenset({NONE}), MEMORY: frozenset({NONE})}


def either(one: Values, other: Values) -> Values:
    """What may be there when it is not known which of two things happened."""
    return {path: one[path] | other[path] for path in (DISK, MEMORY)}


@dataclass
class Subject:
    """A sandbox and what its files may hold.

    `certain` is whether it is known to be there: a kill may have happened without an answer.
    """

    id: str
    token: str
    values: Values
    start: Values
    checkpoints: set[str] = field(default_factory=set)
    certain: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


class Story:
    """What was done to a node so far, and what was wrong about it."""

    def __init__(self, node: RunningNode, most: int) -> None:
        self.node = node
        self.most = most
        self.subjects: dict[str, Subject] = {}
        self.snapshots: dict[str, Values] = {}
        self.unanswered: set[str] = set()  # tags of sandboxes that may exist
        self.wrong: list[str] = []
        self.done: list[str] = []
        self.dying = threading.Event()
        self._lock = threading.Lock()
        self._numbers = iter(range(1, 1 << 30))

    def number(self) -> str:
        """One that was never given before."""
        with self._lock:
            return str(next(self._numbers))

    def note(self, what: str) -> None:
        """One line of the story."""
        with self._lock:
            self.done.append(what)

    def born(self, answer: dict[str, Any], values: Values) -> None:
        """A sandbox has been answered."""
        subject = Subject(answer["sandboxID"], answer["envdAccessToken"], values, values)
        with self._lock:
            self.subjects[subject.id] = subject

    def gone(self, subject: Subject) -> None:
        """A sandbox has ended."""
        with self._lock:
            self.subjects.pop(subject.id, None)


class Client:
    """One client, at random."""

    def __init__(self, story: Story, seed: int) -> None:
        self.story = story
        self.dice = random.Random(seed)
        self._http = story.node.client()

    def run(self, steps: int) -> None:
        """Do some things, or as many as the node lives for."""
        with self._http:
            for _ in range(steps):
                if self.story.dying.is_set():
                    return
                try:
                    self.step()
                except Exception as error:  # for the thread that started this one
                    self.story.wrong.append(f"a client ended: {error!r}")
                    raise

    def step(self) -> None:
        subjects = list(self.story.subjects.values())
        if len(subjects) < 2 or (len(subjects) < self.story.most and self.dice.random() < 0.1):
            self.create()
            return
        subject = self.dice.choice(subjects)
        alone: list[Callable[[Subject], None]] = [
            *[self.write] * 5, *[self.look] * 2, *[self.checkpoint] * 3, *[self.rollback] * 2,
            self.fork, self.kill, self.pause_to_disk,
        ]  # fmt: skip
        anybody: list[Callable[[Subject], object]] = [self.pause, self.connect, self.prolong]
        if self.dice.random() < 0.65 and subject.lock.acquire(blocking=False):
            try:
                self.dice.choice(alone)(subject)
            finally:
                subject.lock.release()
        else:
            self.dice.choice(anybody)(subject)

    # What any client may do at any time

    def pause(self, subject: Subject) -> None:
        self.ask("POST", f"/sandboxes/{subject.id}/pause")

    def connect(self, subject: Subject) -> bool:
        answer = self.ask("POST", f"/v2/sandboxes/{subject.id}/connect", {"timeout": 600})
        return answer is not None and answer.is_success

    def prolong(self, subject: Subject) -> None:
        self.ask("POST", f"/sandboxes/{subject.id}/timeout", {"timeout": 900})

    def create(self) -> None:
        source, values = self.dice.choice([("base", AT_FIRST), *list(self.story.snapshots.items())])
        tag = self.story.number()
        body = {
            "templateID": source,
            "timeout": 600,
            "metadata": {"tag": tag},
            "autoResume": {"enabled": self.dice.random() < 0.5},
        }
        answer = self.ask("POST", "/v2/sandboxes", body, tags=(tag,))
        if answer is not None and answer.is_success:
            self.story.born(answer.json(), values)

    # What one client per sandbox does at a time

    def write(self, subject: Subject) -> None:
        """New values in the memory and on the disk; mostly as clients do, of a sandbox that runs."""
        if self.dice.random() < 0.8:
            self.connect(subject)
        for path in self.dice.sample([DISK, MEMORY], 2):
            value = self.story.number()
            answer = self.data("POST", subject, path, files={"file": ("value", value.encode())})
            before = subject.values[path]
            known = answer is not None and answer.is_success
            subject.values = {**subject.values, path: frozenset({value}) | (frozenset() if known else before)}

    def look(self, subject: Subject) -> None:
        if self.dice.random() < 0.5:
            self.connect(subject)
        for path in (DISK, MEMORY):
            answer = self.data("GET", subject, path)
            if answer is not None and answer.is_success and answer.text not in subject.values[path]:
                self.story.wrong.append(f"{subject.id}: {path} is {answer.text}, not {subject.values[path]}")

    def checkpoint(self, subject: Subject) -> None:
        answer = self.ask("POST", f"/sandboxes/{subject.id}/snapshots")
        if answer is not None and answer.is_success:
            name = answer.json()["snapshotID"]
            subject.checkpoints.add(name)
            self.story.snapshots[name] = subject.values

    def rollback(self, subject: Subject) -> None:
        choices: list[str | None] = [None, *sorted(subject.checkpoints)]
        target = self.dice.choice(choices)
        values = subject.start if target is None else self.story.snapshots[target]
        body = {} if target is None else {"snapshotID": target}
        answer = self.ask("POST", f"/sandboxes/{subject.id}/rollback", body)
        if answer is None:
            subject.values = either(subject.values, values)
        elif answer.is_success:
            subject.values = values

    def fork(self, subject: Subject) -> None:
        count = self.dice.randrange(1, 3)
        tags = tuple(self.story.number() for _ in range(count))
        body = {"count": count, "timeout": 600, "children": [{"metadata": {"tag": tag}} for tag in tags]}
        answer = self.ask("POST", f"/sandboxes/{subject.id}/fork", body, tags=tags)
        for each in answer.json() if answer is not None and answer.is_success else ():
            if "sandbox" in each:
                self.story.born(each["sandbox"], subject.values)
            elif each["error"]["code"] != 503:
                self.story.wrong.append(f"a child of {subject.id}: {each}")

    def kill(self, subject: Subject) -> None:
        answer = self.ask("DELETE", f"/sandboxes/{subject.id}")
        if answer is None:
            subject.certain = False
        elif answer.status_code in (204, 404):
            self.story.gone(subject)

    def pause_to_disk(self, subject: Subject) -> None:
        """Its memory is lost, unless the call joined another pause."""
        answer = self.ask("POST", f"/sandboxes/{subject.id}/pause", {"memory": False})
        if answer is None or answer.is_success:
            lost = {**subject.values, MEMORY: frozenset({NONE})}
            subject.values = either(subject.values, lost)

    # Asking

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, tags: tuple[str, ...] = ()
    ) -> httpx.Response | None:
        """The answer of the control plane, or None where the node died first. Only what is the matter of
        other clients may be refused: a sandbox that is gone or busy, and a node that is full."""
        self.story.unanswered.update(tags)
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            if not self.story.dying.is_set():
                self.story.wrong.append(f"{method} {path}: {error!r}")
            self.story.note(f"{method} {path} {body or ''}: unknown")
            return None
        self.story.unanswered.difference_update(tags)
        self.story.note(f"{method} {path} {body or ''}: {answer.status_code} {answer.text[:200]}")
        if not answer.is_success and answer.status_code not in (404, 409, 503):
            self.story.wrong.append(self.story.done[-1])
        return answer

    def data(self, method: str, subject: Subject, path: str, **given: Any) -> httpx.Response | None:
        """The answer of a sandbox's agent, or None: the sandbox may be paused or killed meanwhile."""
        headers = {
            "E2b-Sandbox-Id": subject.id,
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": subject.token,
        }
        parameters = {"path": path, "username": "user"}
        try:
            answer = self._http.request(method, "/files", params=parameters, headers=headers, **given)
        except httpx.TransportError as error:
            self.story.note(f"{method} {path} of {subject.id}: {error!r}")
            return None
        self.story.note(f"{method} {path} of {subject.id}: {answer.status_code} {answer.text[:40]}")
        return answer
