"""Memory layers against a process that really maps a memory file privately."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.errors import HostFault, StoreCorrupt, StoreFault, StoreFull
from agentenv.vmm import pagemap, softdirty
from agentenv.vmm.layer import Delta, decode_map, encode_map, read_map
from agentenv.vmm.memory import Image, apply, capture, fold, merge
from agentenv.vmm.pagemap import mapping_of, private_pages
from agentenv.vmm.stored import digest_of, map_of
from agentenv.vmm.transfer import PAGE, RUNS_MAX
from support.mapped import Mapped

PAGES = 700  # more than two batches


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A flat file with content, holes, and a hole at its end."""
    path = tmp_path / "base"
    with path.open("wb") as file:
        for page in range(0, 300, 3):
            file.seek(page * PAGE)
            file.write(bytes([page % 251 + 1]) * PAGE)
        file.truncate(PAGES * PAGE)
    return path


def flat(image: Image, into: Path) -> bytes:
    fold(image, into)
    return into.read_bytes()


def sha(content: bytes | bytearray) -> str:
    return hashlib.sha256(content).hexdigest()


def test_only_written_pages_are_private(base: Path) -> None:
    with Mapped(base) as child:
        mapping = mapping_of(child.pid, base)
        assert mapping.pages == PAGES
        assert private_pages(mapping).tolist() == []
        child.touch(3)
        child.write(7, 1)
        child.write(500, 9, 40)
        assert private_pages(mapping).tolist() == [7, *range(500, 540)]


@pytest.mark.parametrize("split", [False, True])
def test_the_kernel_and_the_page_map_say_the_same(
    split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more runs of pages than are asked for at once."""
    file = tmp_path / "file"
    file.write_bytes(b"\1" * (3000 * PAGE))
    monkeypatch.setattr(pagemap, "_REGIONS", 700)
    with Mapped(file, split=split) as child:
        for page in range(0, 2900, 3):
            child.write(page, 2, 1 + page % 2)
        mapping = mapping_of(child.pid, file)
        found = private_pages(mapping).tolist()
        monkeypatch.setattr(pagemap, "_scanned", lambda *_: None)
        assert found == private_pages(mapping).tolist()
        assert len(found) == 967 + 483


def test_a_renamed_file_in_two_segments_is_found(base: Path) -> None:
    with Mapped(base, split=True) as child:
        moved = base.rename(base.with_name("moved"))
        mapping = mapping_of(child.pid, moved)
        assert [(s.first, s.pages) for s in mapping.segments] == [(0, 350), (350, 350)]
        child.write(345, 5, 10)
        with Image(moved) as image:
            assert capture(child.pid, image, moved.with_name("delta")).pages == 10
        assert read_map(moved.with_name("delta"))[0].tolist() == list(range(345, 355))


def test_a_file_that_is_not_mapped_is_refused(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(base.read_bytes())
    with Mapped(base) as child:
        with pytest.raises(HostFault, match="does not map"):
            mapping_of(child.pid, other)
        os.truncate(base, PAGE * (PAGES + 1))
        with pytest.raises(HostFault, match="whole"):
            mapping_of(child.pid, base)


def test_a_process_that_is_gone_is_named(base: Path, tmp_path: Path) -> None:
    with Mapped(base) as child, Image(base) as image:
        child.write(0, 1)
        mapping = mapping_of(child.pid, base)
        child.kill()
        with pytest.raises(HostFault):
            private_pages(mapping)
        with pytest.raises(HostFault):
            capture(child.pid, image, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_a_capture_keeps_what_differs(base: Path, tmp_path: Path) -> None:
    with Mapped(base) as child, Image(base) as image:
        child.write(3, 4)  # what the base has there already
        child.write(4, 4)
        child.write(600, 0)  # zeros over a hole
        child.write(601, 8)
        made = capture(child.pid, image, tmp_path / "delta")
        assert (made.pages, made.private, made.bytes) == (2, 4, 2 * PAGE)
        assert read_map(made.memory)[0].tolist() == [4, 601]
        assert made.memory.read_bytes() == b"\4" * PAGE + b"\10" * PAGE


def test_layers_mapped_side_by_side_are_different_files(base: Path, tmp_path: Path) -> None:
    with Mapped(base) as child, Image(base) as image:
        child.write(40, 9, 60)
        capture(child.pid, image, tmp_path / "delta")
    with Image(base, [tmp_path / "delta"]) as image:
        image._starts[1] = image._starts[0] + np.uint64(40 * PAGE)  # as the kernel may place them
        content = np.empty((100, PAGE // 8), np.uint64)
        image.read(np.arange(100, dtype=np.uint32), content)
        assert content.tobytes() == base.read_bytes()[: 40 * PAGE] + b"\t" * (60 * PAGE)
        assert flat(image, tmp_path / "flat")[: 100 * PAGE] == content.tobytes()


def test_the_pages_of_a_delta_may_come_in_any_order() -> None:
    pages = np.array([9, 10, 3, 400, 4], np.uint32)
    assert decode_map(encode_map(pages, 500))[0].tolist() == pages.tolist()
    with pytest.raises(ValueError, match="contradict"):
        decode_map(encode_map(np.array([3, 9, 3], np.uint32), 500))


def test_a_capture_of_nothing_is_a_layer_too(base: Path, tmp_path: Path) -> None:
    with Mapped(base) as child, Image(base) as image:
        assert capture(child.pid, image, tmp_path / "delta").pages == 0
        with Image(base, [tmp_path / "delta"]) as above:
            assert apply(child.pid, above) == 0
            assert flat(above, tmp_path / "flat") == base.read_bytes()


def test_every_other_page_of_more_runs_than_one_call_takes(tmp_path: Path) -> None:
    base, pages = tmp_path / "base", 2 * (RUNS_MAX + 100)
    base.touch()
    os.truncate(base, pages * PAGE)
    with Mapped(base) as child:
        for page in range(0, pages, 2):
            child.write(page, page % 255 + 1)
        with Image(base) as image:
            assert capture(child.pid, image, tmp_path / "delta").pages == pages // 2
        before = child.digest()
    with Mapped(base) as restored, Image(base, [tmp_path / "delta"]) as image:
        assert apply(restored.pid, image) == pages // 2
        assert restored.digest() == before == sha(flat(image, tmp_path / "flat"))


def test_a_second_capture_costs_what_changed_since_the_first(base: Path, tmp_path: Path) -> None:
    with Mapped(base) as child:
        child.write(100, 77, 256)
        with Image(base) as image:
            assert capture(child.pid, image, tmp_path / "d1").pages == 256
        child.write(200, 78, 3)
        with Image(base, [tmp_path / "d1"]) as image:
            made = capture(child.pid, image, tmp_path / "d2")
        assert (made.pages, made.private) == (3, 256)


def test_a_machine_is_captured_against_a_fold_of_what_it_came_from(base: Path, tmp_path: Path) -> None:
    with Mapped(base) as child:
        child.write(10, 1, 20)
        with Image(base) as image:
            capture(child.pid, image, tmp_path / "d1")
        with Image(base, [tmp_path / "d1"]) as image:
            fold(image, tmp_path / "folded")
        child.write(15, 2)
        with Image(tmp_path / "folded") as image:
            made = capture(child.pid, image, tmp_path / "d2", mapped=base)
            assert made.pages == 1
        with Image(tmp_path / "folded", [tmp_path / "d2"]) as image:
            assert sha(flat(image, tmp_path / "flat")) == child.digest()


writes = st.lists(st.tuples(st.integers(0, 63), st.integers(0, 3), st.integers(1, 20)), max_size=6)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chain=st.lists(writes, min_size=1, max_size=6))
def test_chains_against_plain_bytes(
    tmp_path_factory: pytest.TempPathFactory, chain: list[list[tuple[int, int, int]]]
) -> None:
    """Each generation is restored in a new process, written to and captured; every point of the chain
    must be what a model of plain bytes says, restored, folded and merged alike."""
    place, pages = tmp_path_factory.mktemp("chain"), 80
    base = place / "base"
    model = bytearray(b"\1" * (40 * PAGE) + bytes(40 * PAGE))
    base.write_bytes(model)
    deltas: list[Path] = []
    for generation, changes in enumerate(chain):
        before = bytes(model)
        with Mapped(base) as child, Image(base, deltas, size=pages * PAGE) as image:
            apply(child.pid, image)
            assert child.digest() == sha(model)
            for page, byte, count in changes:
                count = min(count, pages - page)
                child.write(page, byte, count)
                model[page * PAGE : (page + count) * PAGE] = bytes([byte]) * (count * PAGE)
            made = capture(child.pid, image, place / f"d{generation}")
        changed = [
            n for n in range(pages) if model[n * PAGE : (n + 1) * PAGE] != before[n * PAGE : (n + 1) * PAGE]
        ]
        assert read_map(made.memory)[0].tolist() == changed
        deltas.append(made.memory)
    with Image(base, deltas) as image:
        assert flat(image, place / "flat") == model
        merge(image, place / "merged")
    with Image(base, [place / "merged"]) as image:
        assert flat(image, place / "flat-of-merged") == model


@given(pages=st.sets(st.integers(0, 5000)))
def test_maps_are_read_back(pages: set[int]) -> None:
    ordered = np.array(sorted(pages), np.uint32)
    back, total = decode_map(encode_map(ordered, 5001))
    assert back.tolist() == ordered.tolist()
    assert total == 5001


@given(at=st.integers(0), bit=st.integers(0, 7))
def test_a_changed_bit_in_a_map_is_seen(at: int, bit: int) -> None:
    data = bytearray(encode_map(np.array([1, 2, 3, 9], np.uint32), 10))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(ValueError):
        decode_map(bytes(data))


@pytest.fixture
def delta(base: Path, tmp_path: Path) -> Path:
    with Mapped(base) as child, Image(base) as image:
        child.write(5, 200, 9)
        return capture(child.pid, image, tmp_path / "delta").memory


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [cut, Path.unlink, lambda path: os.truncate(path, 0)])
@pytest.mark.parametrize("which", [lambda memory: memory, map_of])
def test_damaged_layers_are_not_opened(base: Path, delta: Path, which: object, damage: object) -> None:
    damage(which(delta))  # type: ignore[operator]
    with pytest.raises(StoreCorrupt):
        Image(base, [delta])


def test_layers_of_another_size_are_not_opened(base: Path, delta: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreCorrupt, match="of its record"):
        Image(base, size=PAGE)
    other = tmp_path / "other"
    other.write_bytes(bytes(PAGE))
    with pytest.raises(StoreCorrupt, match="its base has 1"):
        Image(other, [delta])
    cut(base)
    with pytest.raises(StoreCorrupt, match="whole pages"):
        Image(base, [delta])
    base.unlink()
    with pytest.raises(StoreCorrupt, match="missing"):
        Image(base)


def test_a_layer_cut_short_while_open_is_an_error_and_no_signal(base: Path, delta: Path) -> None:
    with Mapped(base) as child, Image(base, [delta]) as image:
        os.truncate(delta, 0)
        with pytest.raises(StoreCorrupt, match="cut short"):
            apply(child.pid, image)
        with pytest.raises(StoreCorrupt):
            merge(image, delta.with_name("merged"))
        with pytest.raises(StoreCorrupt):
            fold(image, delta.with_name("flat"))
    assert sorted(path.name for path in delta.parent.iterdir()) == ["base", "delta", "delta.map"]


def test_digests_tell_layers_apart(base: Path, delta: Path) -> None:
    before = digest_of(delta, map_of(delta))
    assert before == f"sha256:{sha(delta.read_bytes() + map_of(delta).read_bytes())}"
    with delta.open("r+b") as file:
        file.write(b"x")
    assert digest_of(delta, map_of(delta)) != before
    Delta(delta).close()  # its length is right: only the digest tells


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_leaves_nothing(base: Path, small_disk: Path) -> None:
    with Mapped(base) as child, Image(base) as image:
        child.write(0, 255, 600)
        with pytest.raises(StoreFull):
            capture(child.pid, image, small_disk / "delta")
        assert list(small_disk.iterdir()) == []
        made = capture(child.pid, image, base.with_name("delta"))
        with Image(base, [made.memory]) as above:
            for make in (fold, merge):
                with pytest.raises(StoreFull):
                    make(above, small_disk / "made")
                assert list(small_disk.iterdir()) == []
            fold(above, base.with_name("flat"))  # to another filesystem than a part of its layers
            assert sha(base.with_name("flat").read_bytes()) == child.digest()


def test_what_is_there_is_not_overwritten(base: Path, delta: Path) -> None:
    content = delta.read_bytes()
    with Mapped(base) as child, Image(base) as image:
        child.write(1, 1)
        with pytest.raises(StoreFault, match="exists"):
            capture(child.pid, image, delta)
        delta.rename(delta.with_name("moved"))
        with pytest.raises(StoreFault, match="exists"):
            capture(child.pid, image, delta)
    assert not delta.exists()
    assert delta.with_name("moved").read_bytes() == content
    assert map_of(delta).exists()


def test_folding_keeps_holes(base: Path, delta: Path, tmp_path: Path) -> None:
    with Image(base, [delta]) as image:
        fold(image, tmp_path / "flat")
    status = (tmp_path / "flat").stat()
    assert status.st_size == PAGES * PAGE
    assert status.st_blocks * 512 < 320 * PAGE


def test_soft_dirty_bits_are_what_the_probe_says(base: Path, tmp_path: Path) -> None:
    """Here they are not there, and a capture that believed in them would be empty; where they are,
    a capture finds what was written since."""
    with Mapped(base) as child, Image(base) as image:
        child.write(10, 99, 5)
        softdirty.clear(child.pid)
        child.write(12, 98)
        made = capture(child.pid, image, tmp_path / "delta", soft_dirty=True)
        assert read_map(made.memory)[0].tolist() == ([12] if softdirty.available() else [])
