"""What is kept of steps, and of uploads, and for how long."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.building.cache import StepCache
from agentenv.building.contexts import LINK_LIFE_S, Contexts
from agentenv.config import Settings
from agentenv.errors import Forbidden, InvalidRequest, NotFound
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from agentenv.snapshot.keeping import Kept, excess
from agentenv.snapshot.records import Descent, Resources, Snapshot
from agentenv.snapshot.store import Snapshots

FILES = "a" * 64


def kept(key: str, size: int, used_at: float) -> Kept:
    return Kept(key, size, used_at)


def test_the_longest_unused_go_first() -> None:
    steps = [kept("old", 10, 1.0), kept("new", 10, 3.0), kept("middle", 10, 2.0)]
    assert [each.key for each in excess(steps, 20, 100, 4.0)] == ["old"]
    assert [each.key for each in excess(steps, 19, 100, 4.0)] == ["old", "middle"]
    assert excess(steps, 30, 100, 4.0) == ()
    assert [each.key for each in excess(steps, 30, 1.5, 4.0)] == ["old", "middle"]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 100)), max_size=8),
    st.integers(0, 100),
    st.floats(0, 100),
)
def test_what_stays_fits_and_is_newer(facts: list[tuple[int, float]], budget: int, keep_s: float) -> None:
    steps = [kept(str(number), *fact) for number, fact in enumerate(facts)]
    gone = set(excess(steps, budget, keep_s, 100.0))
    stays = [each for each in steps if each not in gone]
    assert sum(each.bytes for each in stays) <= budget
    assert all(each.used_at >= 100.0 - keep_s for each in stays)


class Shop:
    """A cache over snapshots that are a file each."""

    def __init__(self, home: Path) -> None:
        self.database = Database(home / "aenv.db")
        self.snapshots = Snapshots(self.database, Ledger(self.database), home)
        self.collections = 0
        self.cache = self.open()

    def open(self) -> StepCache:
        return StepCache(self.database, self.snapshots, self._count, budget_mib=1, keep_s=3600)

    def _count(self) -> None:
        self.collections += 1

    async def snapshot(self, size: int = 4096) -> Snapshot:
        draft = self.snapshots.begin("b1")
        (draft.path / "disk").write_bytes(bytes([1]) * size)
        record = Snapshot(
            draft.id, "step", Descent("", "step", "key"), Resources(1, 512, 64), (draft.disk(),), time.time()
        )
        return await self.snapshots.publish(draft, record)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


async def test_found_replaced_and_forgotten(shop: Shop) -> None:
    first, second = await shop.snapshot(), await shop.snapshot()
    assert shop.cache.find("k") is None
    shop.cache.put("k", first)
    shop.cache.put("same", first)
    assert shop.cache.find("k") == first
    shop.cache.put("k", second)
    assert shop.cache.find("k") == second
    assert shop.snapshots.find(first.id) == first, "another key has it still"
    shop.cache.forget("same")
    assert shop.snapshots.find(first.id) is None
    shop.cache.forget("k")
    assert shop.collections == 2
    assert set((await shop.snapshots.collect()).records) == {first.id, second.id}


async def test_what_is_damaged_is_not_found(shop: Shop) -> None:
    made = await shop.snapshot()
    shop.cache.put("k", made)
    shop.snapshots.path(made.disk[0]).unlink()
    assert shop.cache.find("k") is None
    assert shop.snapshots.find(made.id) is None


async def test_trimmed_to_the_budget(shop: Shop) -> None:
    big = [await shop.snapshot(400_000) for _ in range(3)]
    for number, each in enumerate(big):
        shop.cache.put(str(number), each)
    assert shop.cache.find("0") == big[0]
    assert shop.cache.trim(time.time()) == 1
    assert [shop.cache.find(str(number)) is not None for number in range(3)] == [True, False, True]
    assert shop.cache.trim(time.time() + 3601) == 2


async def test_orphans_of_a_crash_go_at_the_next_start(shop: Shop) -> None:
    orphan, known = await shop.snapshot(), await shop.snapshot()
    shop.cache.put("k", known)
    shop.open().drop_orphans()
    assert shop.snapshots.find(orphan.id) is None
    assert shop.snapshots.find(known.id) == known


# Uploads


@pytest.fixture
def contexts(tmp_path: Path) -> Contexts:
    return Contexts(Settings(home=tmp_path, context_max_mib=1, context_keep_s=100))


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_stored_under_the_hash_that_was_given(contexts: Contexts) -> None:
    with pytest.raises(NotFound):
        contexts.get(FILES)
    assert await contexts.receive(FILES, chunks(b"ab", b"c")) == 3
    assert contexts.get(FILES).read_bytes() == b"abc"
    await contexts.receive(FILES, chunks(b"anew"))
    assert contexts.get(FILES).read_bytes() == b"anew"
    assert contexts.get(FILES).stat().st_mode & 0o777 == 0o600


async def test_what_breaks_off_leaves_nothing(contexts: Contexts) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"some"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await contexts.receive(FILES, broken())
    with pytest.raises(InvalidRequest, match="more than 1 MiB"):
        await contexts.receive(FILES, chunks(bytes(1 << 20), b"x"))
    assert list(contexts.directory.iterdir()) == []


def test_tickets_are_for_one_hash_and_two_hours(contexts: Contexts) -> None:
    ticket = contexts.ticket(FILES, now=1000.0)
    contexts.check(FILES, ticket, now=1000.0 + LINK_LIFE_S)
    for digest, shown, now in [
        ("b" * 64, ticket, 1000.0),
        (FILES, ticket, 1001.0 + LINK_LIFE_S),
        (FILES, "", 1000.0),
        (FILES, "99999." + ticket.partition(".")[2], 1000.0),
        (FILES, ticket + "ü", 1000.0),
    ]:
        with pytest.raises(Forbidden):
            contexts.check(digest, shown, now=now)


async def test_unused_uploads_go(contexts: Contexts) -> None:
    assert contexts.sweep(time.time()) == 0
    await contexts.receive(FILES, chunks(b"a"))
    assert contexts.sweep(time.time() + 99) == 0
    assert contexts.find(FILES) is not None
    assert contexts.sweep(time.time() + 101) == 1
    assert contexts.find(FILES) is None
