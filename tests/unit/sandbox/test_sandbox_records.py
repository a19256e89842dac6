"""Sandbox records as documents, and the table that keeps them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import StoreCorrupt, StoreFault
from agentenv.network.slot import Slot
from agentenv.records.database import Database
from agentenv.sandbox.records import (
    Claim,
    Lifecycle,
    Network,
    Origin,
    Records,
    Sandbox,
    decode,
    encode,
    new_sandbox_id,
)
from agentenv.sandbox.transitions import State
from agentenv.vmm.machine import GuestFiles, Layer, MachineSpec, Nic

SLOT = Slot(3, "s3", Path("/ns/s3"), "tap0", "02:fc", "10.0.0.3", 1003)
SPEC = MachineSpec(
    id="iabc",
    vcpus=2,
    memory_mib=512,
    disk_mib=2048,
    guest=GuestFiles(Path("/k"), Path("/i"), Path("/t")),
    layers=(Layer(Path("/base"), "raw"), Layer(Path("/top"), "qcow2")),
    nic=Nic(Path("/ns/s3"), "tap0", "02:fc"),
    uid=1003,
)


def record(name: str = "iabc", state: State = State.RUNNING, **given: object) -> Sandbox:
    return Sandbox(name, state, Origin("t1", "base", "b1"), 10.0, 310.0, 300, 1, 512, 2048).with_state(
        state, **given
    )


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(Database(tmp_path / "aenv.db"))


def test_a_full_record_survives_its_document() -> None:
    full = record(
        metadata={"k": "v"},
        env={"A": "1"},
        access_token="t",
        traffic_token="u",
        lifecycle=Lifecycle("pause", True, False),
        network=Network(False, True, {"allowPublicTraffic": False}),
        machine=SPEC,
        slot=SLOT,
        boot_id="b",
        ended_at=11.5,
        reason="why",
    )
    assert decode(encode(full)) == full


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"]))
    ),
    st.floats(0, 4e9),
)
def test_any_metadata_and_time_survive(metadata: dict[str, str], moment: float) -> None:
    one = record(metadata=metadata, started_at=moment)
    assert decode(encode(one)) == one


def test_what_is_no_record_is_called_corrupt() -> None:
    with pytest.raises(StoreCorrupt, match="cannot be read"):
        decode('{"id": 3}')


def test_ids_are_lowercase_letters_and_digits_and_differ() -> None:
    ids = {new_sandbox_id() for _ in range(500)}
    assert len(ids) == 500
    assert all(re.fullmatch(r"i[a-z2-7]{19}", each) for each in ids)


def test_insert_update_find(records: Records) -> None:
    records.insert(record())
    records.update(record(state=State.KILLING, reason="killed"))
    found = records.find("iabc")
    assert found is not None
    assert (found.state, found.reason) == (State.KILLING, "killed")
    assert records.find("other") is None


def test_one_id_is_kept_once(records: Records) -> None:
    records.insert(record())
    with pytest.raises(StoreFault):
        records.insert(record())


def test_only_what_has_not_ended_is_to_be_recovered(records: Records) -> None:
    for state in State:
        records.insert(record(f"i{state}", state))
    assert {each.state for each in records.unended()} == set(State) - {State.KILLED, State.FAILED}


def test_a_claim_comes_and_goes_with_its_record(records: Records) -> None:
    records.insert(record(), Claim("key", "digest", "iabc", 10.0))
    assert records.claim("key") == Claim("key", "digest", "iabc", 10.0)
    records.update(record(state=State.FAILED), forget_claim=True)
    assert records.claim("key") is None


def test_a_claim_that_is_taken_keeps_the_record_out(records: Records) -> None:
    records.insert(record(), Claim("key", "digest", "iabc", 10.0))
    with pytest.raises(StoreFault):
        records.insert(record("iother"), Claim("key", "digest", "iother", 11.0))
    assert records.find("iother") is None


def test_pruning_forgets_old_ends_and_keys_only(records: Records) -> None:
    records.insert(record("iold", State.KILLED, ended_at=100.0))
    records.insert(record("inew", State.FAILED, ended_at=200.0))
    records.insert(record("irun", State.RUNNING), Claim("kold", "d", "irun", 100.0))
    records.insert(record("iclaimed", State.KILLED, ended_at=100.0), Claim("knew", "d", "iclaimed", 200.0))
    records.prune(ended_before=150.0, claims_before=150.0)
    assert [name for name in ("iold", "inew", "irun", "iclaimed") if records.find(name)] == [
        "inew",
        "irun",
        "iclaimed",
    ]
    assert records.claim("kold") is None
    assert records.claim("knew") is not None
