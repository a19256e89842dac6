"""OCI layouts and archives: which image is meant, digests, and agreement with umoci and skopeo."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import InvalidRequest, StoreCorrupt
from agentenv.image.container import (
    Image,
    choose_saved,
    open_archive,
    open_layout,
    plain_file,
    saved_entries,
    unpack_layer,
)
from agentenv.image.streams import decompressed, read_faults
from agentenv.image.tree import Budget, Tree
from support.archives import (
    Item,
    Layout,
    digest_of,
    directory,
    file,
    gzipped,
    hardlink,
    plain,
    symlink,
    tarball,
    zstandard,
)
from support.trees import described

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")

CONFIG = {"Env": ["A=b"], "User": "app", "WorkingDir": "/srv", "Cmd": ["run"]}


def nothing() -> None:
    pass


def unpack(image: Image, root: Path) -> dict[str, tuple[Any, ...]]:
    root.mkdir()
    tree = Tree(root, Budget(1 << 30))
    for layer in image.layers:
        with layer.open() as packed, read_faults(layer.name), decompressed(packed) as stream:
            unpack_layer(layer, stream, tree)
    return described(root)


def small(text: str) -> bytes:
    return tarball(file("which", text.encode()))


def content(image: Image) -> bytes:
    """The plain tarball of an image's only layer."""
    with image.layers[0].open() as packed, decompressed(packed) as stream:
        return stream.read()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def test_the_only_image_needs_no_tag(layout: Layout) -> None:
    entry = layout.image([small("one")], tag="v7", config=CONFIG)
    image = open_layout(layout.directory, None, None, nothing)
    assert image.digest == layout.config_digest(entry)
    assert image.config.user == "app"
    assert content(image) == small("one")


def test_by_tag_by_name_and_by_digest(layout: Layout) -> None:
    layout.image([small("one")], tag="v1")
    second = layout.image([small("two")], tag="example.org/app:v2")
    for tag, digest in [("v2", None), ("example.org/app:v2", None), (None, second["digest"])]:
        assert content(open_layout(layout.directory, tag, digest, nothing)) == small("two")


def test_of_several_the_latest_is_meant_and_else_one_must_be_named(layout: Layout) -> None:
    layout.image([small("one")], tag="v1")
    layout.image([small("two")], tag="v2")
    with pytest.raises(InvalidRequest, match="v1, v2"):
        open_layout(layout.directory, None, None, nothing)
    layout.image([small("three")], tag="latest")
    assert content(open_layout(layout.directory, None, None, nothing)) == small("three")
    with pytest.raises(InvalidRequest, match="tags there: latest, v1, v2"):
        open_layout(layout.directory, "v3", None, nothing)


def test_the_platform_is_chosen_in_nested_indexes(layout: Layout) -> None:
    arm = layout.image([small("arm")], architecture="arm64", listed=False, tag=None,
                       platform={"os": "linux", "architecture": "arm64", "variant": "v8"})  # fmt: skip
    amd = layout.image([small("amd")], listed=False, tag=None,
                       platform={"os": "linux", "architecture": "amd64"})  # fmt: skip
    note = layout.image([small("attestation")], listed=False, tag=None,
                        platform={"os": "unknown", "architecture": "unknown"})  # fmt: skip
    media = "application/vnd.oci.image.index.v1+json"
    index = layout.document({"schemaVersion": 2, "manifests": [arm, note, amd]}, media)
    layout.entries = [layout.document({"schemaVersion": 2, "manifests": [index]}, media)]
    layout.write()
    image = open_layout(layout.directory, None, None, nothing)
    assert (image.digest, content(image)) == (layout.config_digest(amd), small("amd"))


def test_another_machines_image_is_refused(layout: Layout) -> None:
    layout.image([small("arm")], architecture="arm64")
    with pytest.raises(InvalidRequest, match="linux/arm64"):
        open_layout(layout.directory, None, None, nothing)


def test_indexes_in_a_circle_or_too_deep(layout: Layout) -> None:
    entry = layout.image([small("deep")])
    for _ in range(6):
        media = "application/vnd.oci.image.index.v1+json"
        entry = layout.document({"schemaVersion": 2, "manifests": [entry]}, media)
    layout.entries = [entry]
    layout.write()
    with pytest.raises(StoreCorrupt, match="nested"):
        open_layout(layout.directory, None, None, nothing)


def blob_path(layout: Layout, digest: str) -> Path:
    return layout.directory / "blobs" / digest.replace(":", "/")


@pytest.mark.parametrize("which", ["manifest", "config", "layer"])
def test_a_changed_blob_is_noticed(layout: Layout, which: str) -> None:
    entry = layout.image([small("one")])
    manifest = json.loads(blob_path(layout, entry["digest"]).read_text())
    digest = {
        "manifest": entry["digest"],
        "config": manifest["config"]["digest"],
        "layer": manifest["layers"][0]["digest"],
    }[which]
    path = blob_path(layout, digest)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(StoreCorrupt, match=digest):
        open_layout(layout.directory, None, None, nothing)
    path.unlink()
    with pytest.raises(StoreCorrupt, match="lacks"):
        open_layout(layout.directory, None, None, nothing)


def test_a_layer_that_unpacks_to_something_else_is_noticed(layout: Layout, tmp_path: Path) -> None:
    document = {"os": "linux", "architecture": "amd64",
                "rootfs": {"diff_ids": [digest_of(small("promised"))]}}  # fmt: skip
    manifest = {
        "config": layout.document(document, "application/vnd.oci.image.config.v1+json"),
        "layers": [layout.blob(gzipped(small("given")), "application/vnd.oci.image.layer.v1.tar+gzip")],
    }
    layout.entries = [layout.document(manifest, "application/vnd.oci.image.manifest.v1+json")]
    layout.write()
    with pytest.raises(StoreCorrupt, match="unpacks to"):
        unpack(open_layout(layout.directory, None, None, nothing), tmp_path / "tree")


MANIFEST = "application/vnd.oci.image.manifest.v1+json"
BAD_DOCUMENTS: dict[str, bytes] = {
    "not JSON": b"{",
    "no object": b"[]",
    "no manifests": b"{}",
    "a number for a digest": b'{"manifests": [{"digest": 5, "size": 1}]}',
    "a path for a digest": b'{"manifests": [{"digest": "sha256:../../../etc/passwd", "size": 1}]}',
    "a negative size": b'{"manifests": [{"digest": "sha256:' + b"a" * 64 + b'", "size": -1}]}',
    "a document of a gigabyte": b'{"manifests": [{"digest": "sha256:'
    + b"a" * 64
    + b'", "size": 1073741824}]}',
    "nesting": b"[" * 100_000,
}


@pytest.mark.parametrize("data", BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS.keys())
def test_bad_index(layout: Layout, data: bytes) -> None:
    (layout.directory / "index.json").write_bytes(data)
    with pytest.raises(StoreCorrupt):
        open_layout(layout.directory, None, None, nothing)


def test_layers_and_their_digests_must_be_as_many(layout: Layout) -> None:
    document = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": []}}
    manifest = {
        "config": layout.document(document, "application/vnd.oci.image.config.v1+json"),
        "layers": [layout.blob(small("x"), "application/vnd.oci.image.layer.v1.tar")],
    }
    layout.entries = [layout.document(manifest, MANIFEST)]
    layout.write()
    with pytest.raises(StoreCorrupt, match="1 layers"):
        open_layout(layout.directory, None, None, nothing)


CAPABILITY = "\x01\x00\x00\x02" + "\x00" * 16
LOWER = [
    directory("./"),
    directory("bin", mode=0o755),
    file("bin/su", b"elf", mode=0o4755),
    hardlink("bin/also-su", "bin/su"),
    directory("usr/lib", uid=1, gid=2, mtime=1_400_000_000),
    symlink("lib", "usr/lib"),
    file("lib/a", b"a", mtime=1_300_000_000),
    directory("opaque"),
    file("opaque/old", b"old"),
    directory("opaque/sub"),
    file("opaque/sub/older"),
    directory("gone"),
    file("gone/x"),
    file("swap-file"),
    directory("swap-dir"),
    file("swap-dir/y"),
    Item("null", tarfile.CHRTYPE, mode=0o666, device=(1, 3)),
    Item("pipe", tarfile.FIFOTYPE, mode=0o644, uid=9),
    file(
        "x",
        pax={
            "SCHILY.xattr.user.k": "v",
            "SCHILY.xattr.security.capability": "\x01\x00\x00\x02" + "\x00" * 16,
        },
    ),
]
UPPER = [
    file(".wh.gone"),
    directory("opaque", mode=0o700),
    file("opaque/new", b"new"),
    file("opaque/.wh..wh..opq"),
    directory("swap-file"),
    file("swap-file/z"),
    file("swap-dir", b"now a file"),
    file("lib/b", b"through the link"),
    file("lib/.wh.a"),
    hardlink("c", "lib/b"),
    symlink("lib2", "/usr/lib"),
    file("lib2/deep/d", b"d"),
    file("usr/.wh.nothing"),
]


@as_root
@pytest.mark.parametrize("packed", [plain, gzipped, zstandard])
def test_the_tree_is_what_umoci_makes_of_it(
    layout: Layout, tmp_path: Path, packed: Callable[[bytes], bytes]
) -> None:
    layers = [tarball(*LOWER), tarball(*UPPER)]
    layout.image(layers, packed=packed)
    reference = Layout(tmp_path / "reference")  # this umoci knows no zstd
    reference.image(layers)
    subprocess.run(
        ["umoci", "unpack", "--image", f"{reference.directory}:latest", str(tmp_path / "bundle")],
        check=True,
        capture_output=True,
    )
    ours = unpack(open_layout(layout.directory, None, None, nothing), tmp_path / "tree")
    theirs = described(tmp_path / "bundle/rootfs")
    assert ours.keys() == theirs.keys()
    # umoci sets the times of directories whose headers it sees, and not of those reached by a link.
    touched = {"usr", "usr/lib", "usr/lib/deep"}
    for name in ours:
        compared = slice(0, -1) if name in touched else slice(None)
        assert ours[name][compared] == theirs[name][compared], name
    assert ours["usr/lib"][-1] == 1_400_000_000


def skopeo_copy(source: str, target: str) -> None:
    subprocess.run(
        ["skopeo", "--insecure-policy", "copy", "-q", source, target], check=True, capture_output=True
    )


@as_root
@pytest.mark.parametrize("form", ["docker-archive", "oci-archive", "oci"])
def test_what_skopeo_writes_is_read_alike(layout: Layout, tmp_path: Path, form: str) -> None:
    layout.image([tarball(*LOWER), tarball(*UPPER)], config=CONFIG)
    expected = unpack(open_layout(layout.directory, None, None, nothing), tmp_path / "expected")
    target = tmp_path / "copy"
    skopeo_copy(f"oci:{layout.directory}:latest", f"{form}:{target}:example.org/app:v1" if form != "oci"
                else f"oci:{target}:v1")  # fmt: skip
    opens = open_layout if form == "oci" else open_archive
    image = opens(target, "v1", None, nothing)
    assert image.config.user == "app"
    assert dict(image.config.env) == {"A": "b"}
    found = unpack(image, tmp_path / "found")
    assert {name: entry for name, entry in found.items() if name not in ("usr", "usr/lib/deep")} == {
        name: entry for name, entry in expected.items() if name not in ("usr", "usr/lib/deep")
    }


def legacy_archive(path: Path, layers: dict[str, bytes], *extra: Item) -> None:
    """What `docker save` wrote before version 25: a directory per layer, manifest.json last."""
    config = json.dumps(
        {
            "os": "linux",
            "architecture": "amd64",
            "config": CONFIG,
            "rootfs": {"diff_ids": [digest_of(layer) for layer in layers.values()]},
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": ["app:v1"], "Layers": list(layers)}]
    items = [file(layer, data) for layer, data in layers.items()]
    path.write_bytes(
        tarball(*items, *extra, file(name, config), file("manifest.json", json.dumps(manifest).encode()))
    )


def test_the_old_docker_format(tmp_path: Path) -> None:
    legacy_archive(tmp_path / "saved.tar", {"a/layer.tar": small("one"), "b/layer.tar": small("two")})
    for tag in (None, "v1", "app:v1"):
        image = open_archive(tmp_path / "saved.tar", tag, None, nothing)
        assert [layer.name for layer in image.layers] == ["a/layer.tar", "b/layer.tar"]
        assert unpack(image, tmp_path / f"tree-{tag}")["which"][3] == hashlib.sha256(b"two").hexdigest()
    with pytest.raises(InvalidRequest, match="tags: app:v1"):
        open_archive(tmp_path / "saved.tar", "v2", None, nothing)


def test_links_between_layers_of_the_old_format(tmp_path: Path) -> None:
    path = tmp_path / "saved.tar"
    legacy_archive(path, {"a/layer.tar": small("one"), "c/layer.tar": small("one")})
    data = path.read_bytes()
    assert data.count(b"c/layer.tar") == 2
    # The second layer's member becomes a link to the first.
    with tarfile.open(path) as tar:
        items = [
            symlink(member.name, "../a/layer.tar")
            if member.name == "c/layer.tar"
            else file(member.name, (tar.extractfile(member) or pytest.fail()).read())
            for member in tar.getmembers()
        ]
    path.write_bytes(tarball(*items))
    image = open_archive(path, None, None, nothing)
    assert unpack(image, tmp_path / "tree")["which"][3] == hashlib.sha256(b"one").hexdigest()


def test_links_out_of_an_archive_lead_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "saved.tar"
    manifest = [{"Config": "config.json", "RepoTags": [], "Layers": []}]
    path.write_bytes(
        tarball(symlink("config.json", "/etc/hostname"), file("manifest.json", json.dumps(manifest).encode()))
    )
    with pytest.raises(StoreCorrupt, match="lacks"):
        open_archive(path, None, None, nothing)


def test_damage_in_the_old_format(tmp_path: Path) -> None:
    path = tmp_path / "saved.tar"
    legacy_archive(path, {"a/layer.tar": small("one")})
    changed = path.read_bytes().replace(b'"User": "app"', b'"User": "ape"')
    path.write_bytes(changed)
    with pytest.raises(StoreCorrupt, match="digest"):
        open_archive(path, None, None, nothing)


@pytest.mark.parametrize("data", [b"{}", b"5", b"[5]", b'[{"Config": 1}]', b"nonsense"])
def test_bad_manifest_json(data: bytes) -> None:
    with pytest.raises((StoreCorrupt, InvalidRequest)):
        choose_saved(saved_entries(data), None, None)


def test_a_tarball_that_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "rootfs.tar").write_bytes(tarball(file("bin/sh")))
    with pytest.raises(InvalidRequest, match="not a saved image"):
        open_archive(tmp_path / "rootfs.tar", None, None, nothing)
    (tmp_path / "text").write_text("hello" * 1000)
    with pytest.raises(InvalidRequest, match="not a tarball"):
        open_archive(tmp_path / "text", None, None, nothing)


@pytest.mark.parametrize("packed", [gzipped, zstandard])
def test_a_compressed_archive_is_read_through_a_copy(
    tmp_path: Path, packed: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "a").write_bytes(packed(small("x")))
    with plain_file(tmp_path / "a", tmp_path, 1 << 20, nothing) as path:
        assert path.read_bytes() == small("x")
    assert not path.exists()
    (tmp_path / "bomb").write_bytes(packed(bytes(4 << 20)))
    with (
        pytest.raises(InvalidRequest, match="more than 1 MiB"),
        plain_file(tmp_path / "bomb", tmp_path, 1 << 20, nothing),
    ):
        pass
    (tmp_path / "cut").write_bytes(packed(os.urandom(100_000))[:-20])
    with (
        pytest.raises(StoreCorrupt, match="damaged"),
        plain_file(tmp_path / "cut", tmp_path, 1 << 20, nothing),
    ):
        pass
    assert sorted(os.listdir(tmp_path)) == ["a", "bomb", "cut"]


@as_root
def test_umocis_own_images_are_read(tmp_path: Path) -> None:
    """An image made by umoci from changes to a tree, whiteouts and all."""
    layout, bundle = tmp_path / "made", tmp_path / "bundle"

    def umoci(*words: str) -> None:
        subprocess.run(["umoci", *words], check=True, capture_output=True)

    umoci("init", "--layout", str(layout))
    umoci("new", "--image", f"{layout}:v1")
    umoci("unpack", "--image", f"{layout}:v1", str(bundle))
    rootfs = bundle / "rootfs"
    (rootfs / "a").mkdir()
    (rootfs / "a/kept").write_text("1")
    (rootfs / "a/gone").write_text("2")
    (rootfs / "tree/deep").mkdir(parents=True)
    umoci("repack", "--refresh-bundle", "--image", f"{layout}:v1", str(bundle))
    (rootfs / "a/gone").unlink()
    shutil.rmtree(rootfs / "tree")
    (rootfs / "tree").symlink_to("a")
    os.chown(rootfs / "a/kept", 5, 6)
    (rootfs / "a/kept").chmod(stat.S_ISUID | 0o711)
    umoci("repack", "--refresh-bundle", "--image", f"{layout}:v1", str(bundle))
    unpack(open_layout(layout, "v1", None, nothing), tmp_path / "tree")
    # Without times: umoci rounds them when it packs.
    assert described(tmp_path / "tree", times=False) == described(rootfs, times=False)
