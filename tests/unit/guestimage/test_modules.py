"""Finding modules and what they need, on a tree made here and on the prepared kernel's own."""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv import config
from agentenv.errors import HostFault
from agentenv.guestimage import manifest
from agentenv.guestimage.modules import ModuleTree, depends, module_name


def module(*needs: str) -> bytes:
    return b"\x7fELF\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=x\0"


@pytest.fixture
def tree(tmp_path: Path) -> ModuleTree:
    drivers = tmp_path / "kernel/drivers"
    drivers.mkdir(parents=True)
    (drivers / "virtio_net.ko.xz").write_bytes(lzma.compress(module("net_failover", "virtio_ring")))
    (drivers / "net_failover.ko.gz").write_bytes(gzip.compress(module("failover")))
    (drivers / "failover.ko").write_bytes(module())
    (drivers / "virtio-rng.ko").write_bytes(module("failover"))
    (tmp_path / "modules.builtin").write_text("kernel/drivers/virtio/virtio_ring.ko\n")
    return ModuleTree(tmp_path)


def test_what_a_module_needs_comes_before_it(tree: ModuleTree) -> None:
    assert [one.name for one in tree.closure(["virtio_net"])] == ["failover", "net_failover", "virtio_net"]


def test_each_module_comes_once(tree: ModuleTree) -> None:
    names = [one.name for one in tree.closure(["virtio_rng", "virtio_net", "failover"])]
    assert names == ["failover", "virtio_rng", "net_failover", "virtio_net"]


def test_built_in_ones_are_left_out(tree: ModuleTree) -> None:
    assert tree.closure(["virtio_ring"]) == []
    assert not tree.has("virtio_ring")


def test_a_name_may_be_written_with_either_dash(tree: ModuleTree) -> None:
    assert tree.has("virtio-rng")
    assert module_name(Path("virtio-rng.ko.zst")) == "virtio_rng"


def test_modules_come_unpacked(tree: ModuleTree) -> None:
    assert all(one.data.startswith(b"\x7fELF") for one in tree.closure(["virtio_net"]))


def test_an_absent_one_is_named(tree: ModuleTree) -> None:
    with pytest.raises(HostFault, match="no module virtio_gpu"):
        tree.closure(["virtio_gpu"])


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd")
def test_modules_compressed_as_ubuntu_does(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    plain = tmp_path / "kernel/one.ko"
    plain.write_bytes(module())
    subprocess.run(["zstd", "-q", "--rm", plain], check=True)
    assert [one.data for one in ModuleTree(tmp_path).closure(["one"])] == [module()]
    assert [path.name for path in (tmp_path / "kernel").iterdir()] == ["one.ko.zst"]


def test_a_module_that_needs_nothing() -> None:
    assert depends(module()) == ()
    assert depends(b"no information at all") == ()


def test_the_real_network_driver() -> None:
    directory = config.load().guest_dir
    made = manifest.read(directory)
    if made is None or made.modules is None:
        pytest.skip("no prepared kernel with modules")
    names = [one.name for one in ModuleTree(directory / made.modules).closure(["virtio_net"])]
    assert not names or names[-1] == "virtio_net"
