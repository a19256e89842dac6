"""Which node of a host has which index, block and uids."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from agentenv.errors import CapacityExceeded, HostFault, InvalidRequest
from agentenv.network.node import SLOTS_PER_NODE, NodeIdentity, NodeRegistry, blocks

RANGE = "10.192.0.0/12"


def nothing_in_use(_: NodeIdentity) -> None:
    return None


@pytest.fixture
def registry(tmp_path: Path) -> NodeRegistry:
    return NodeRegistry(tmp_path / "nodes", boot_id="this")


def home(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    return path


def test_the_default_range_has_64_blocks_that_do_not_overlap() -> None:
    found = blocks(RANGE)
    assert len(found) == 64
    assert found[0] == IPv4Network("10.192.0.0/18")
    assert found[63] == IPv4Network("10.207.192.0/18")
    assert all(not one.overlaps(other) for one, other in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("given", "count"), [("10.0.0.0/8", 64), ("172.16.0.0/16", 4), ("172.16.64.0/18", 1)]
)
def test_blocks_of_other_ranges(given: str, count: int) -> None:
    assert len(blocks(given)) == count


@pytest.mark.parametrize("given", ["10.192.0.0/19", "10.192.0.1/12", "fd00::/8", "everything", ""])
def test_a_range_that_cannot_be_used_is_the_callers_mistake(given: str) -> None:
    with pytest.raises(InvalidRequest, match="network_range"):
        blocks(given)


def test_addresses_and_uids_of_all_slots_differ_between_nodes() -> None:
    one, two = (NodeIdentity(index, block) for index, block in enumerate(blocks(RANGE)[:2]))
    assert one.slot_address(SLOTS_PER_NODE) in one.block
    assert one.uid(SLOTS_PER_NODE) < two.uid(0)
    assert one.address not in {one.slot_address(number) for number in range(1, SLOTS_PER_NODE + 1)}
    for number in (1, 255, 256, SLOTS_PER_NODE):
        assert one.slot_number(one.slot_address(number)) == number
    assert one.slot_number(one.address) <= 0
    assert len(two.slot_name(SLOTS_PER_NODE)) <= 15  # the kernel's limit for a link's name


def test_a_node_finds_its_own_index_again(tmp_path: Path, registry: NodeRegistry) -> None:
    one, two = home(tmp_path, "one"), home(tmp_path, "two")
    assert registry.claim(one, RANGE, nothing_in_use).index == 0
    assert registry.claim(two, RANGE, nothing_in_use).index == 1
    assert registry.claim(one, RANGE, lambda _: "its own leftovers").index == 0
    registry.free(one)
    assert registry.claim(home(tmp_path, "three"), RANGE, nothing_in_use).index == 0


def test_claims_of_lost_homes_and_earlier_boots_are_recovered(tmp_path: Path) -> None:
    gone, old = home(tmp_path, "gone"), home(tmp_path, "old")
    before = NodeRegistry(tmp_path / "nodes", boot_id="before")
    before.claim(old, RANGE, nothing_in_use)
    now = NodeRegistry(tmp_path / "nodes", boot_id="now")
    assert now.claim(gone, RANGE, nothing_in_use).index == 0
    gone.rmdir()
    assert now.claim(home(tmp_path, "new"), RANGE, nothing_in_use).index == 0
    assert now.claim(old, RANGE, nothing_in_use).index == 1


def test_a_file_that_is_no_claim_is_replaced(tmp_path: Path, registry: NodeRegistry) -> None:
    registry.directory.mkdir()
    for text in ("", "[]", '{"home": 3}', '{"home": "/", "block": "x", "boot_id": "this"}'):
        (registry.directory / "0").write_text(text)
        assert registry.claim(home(tmp_path, "one"), RANGE, nothing_in_use).index == 0
        registry.free(home(tmp_path, "one"))


def test_what_the_host_uses_is_passed_over(tmp_path: Path, registry: NodeRegistry) -> None:
    def used(identity: NodeIdentity) -> str | None:
        return "a route" if identity.index < 3 else None

    assert registry.claim(home(tmp_path, "one"), RANGE, used).index == 3


def test_when_all_is_used_the_message_says_by_what(tmp_path: Path, registry: NodeRegistry) -> None:
    with pytest.raises(HostFault, match=r"10\.192\.0\.0/18: a VPN.*61 more.*set network_range"):
        registry.claim(home(tmp_path, "one"), RANGE, lambda _: "a VPN")
    assert [file.name for file in registry.directory.iterdir()] == ["lock"]


def test_a_range_for_one_node_is_full_with_one(tmp_path: Path, registry: NodeRegistry) -> None:
    registry.claim(home(tmp_path, "one"), "10.192.0.0/18", nothing_in_use)
    with pytest.raises(CapacityExceeded, match="taken"):
        registry.claim(home(tmp_path, "two"), "10.192.0.0/18", nothing_in_use)


def test_blocks_of_nodes_with_other_ranges_do_not_overlap(tmp_path: Path, registry: NodeRegistry) -> None:
    registry.claim(home(tmp_path, "one"), "10.192.64.0/18", nothing_in_use)  # index 0
    other = registry.claim(home(tmp_path, "two"), RANGE, nothing_in_use)
    assert (other.index, str(other.block)) == (2, "10.192.128.0/18")


def test_a_recorded_identity_is_taken_again_unless_another_has_it(
    tmp_path: Path, registry: NodeRegistry
) -> None:
    before = NodeIdentity(5, IPv4Network("10.193.64.0/18"))
    one = home(tmp_path, "one")
    assert registry.claim(one, RANGE, lambda _: "in use", before=before) == before
    other = registry.claim(home(tmp_path, "two"), RANGE, nothing_in_use, before=before)
    assert other.index == 0


def test_only_the_last_node_is_told_that_it_is(tmp_path: Path, registry: NodeRegistry) -> None:
    told: list[str] = []
    one, two = home(tmp_path, "one"), home(tmp_path, "two")
    registry.claim(one, RANGE, nothing_in_use)
    registry.claim(two, RANGE, nothing_in_use)
    registry.free(one, lambda: told.append("one"))
    registry.free(two, lambda: told.append("two"))
    assert told == ["two"]


def test_nodes_that_start_at_the_same_time_get_different_indexes(tmp_path: Path) -> None:
    def claim(path: Path) -> int:
        return NodeRegistry(tmp_path / "nodes", boot_id="this").claim(path, RANGE, nothing_in_use).index

    homes = [home(tmp_path, f"home-{number}") for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claim, homes)) == list(range(16))


def test_a_claim_names_its_home_for_the_reader(tmp_path: Path, registry: NodeRegistry) -> None:
    registry.claim(home(tmp_path, "one"), RANGE, nothing_in_use)
    record = json.loads((registry.directory / "0").read_text())
    assert record == {"home": str(tmp_path / "one"), "block": "10.192.0.0/18", "boot_id": "this"}


def test_a_registry_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostFault, match="run the node as root"):
        NodeRegistry(tmp_path / "file" / "nodes", boot_id="this").claim(tmp_path, RANGE, nothing_in_use)
