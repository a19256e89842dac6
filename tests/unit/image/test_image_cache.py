"""The image cache: once per content, for several processes, within a budget, nothing left when it fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.config import Settings
from agentenv.errors import AenvError, Forbidden, HostFault, NotFound, StoreCorrupt, StoreFull, Unreachable
from agentenv.image import cache
from agentenv.image.cache import CachedImage, Images
from agentenv.image.credentials import Credentials
from agentenv.image.entries import Entries
from agentenv.image.eviction import GRACE_S, Kept, plan
from agentenv.records.database import Database
from agentenv.records.ledger import Ledger
from support.archives import Layout, digest_of, file, gzipped, plain, tarball, zstandard
from support.registry import PASSWORD, USER, Answer, Asked, Front, Registry, Spoil, Tokens, basic, fronts

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root filesystems are built as root")

DISK = 512
LAYERS = [
    tarball(file("one", os.urandom(300_000)), file("etc/passwd", b"app:x:7:7::/srv:/bin/sh\n")),
    tarball(file("two", os.urandom(300_000))),
]
CONFIG = {"User": "app", "Env": ["A=b"]}
LATER = 1e10  # when everything was last used long ago
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    running = Registry(tmp_path_factory.mktemp("registry") / "open")
    layout = Layout(tmp_path_factory.mktemp("layout") / "app")
    running.push(layout, layout.image(LAYERS, config=CONFIG), "team/app")
    yield running
    running.close()


@pytest.fixture
def front(registry: Registry) -> Iterator[Callable[..., Front]]:
    with fronts(registry) as start:
        yield start


class Home:
    """A data directory with its records, and the cache of it. Registries are named that need no TLS."""

    def __init__(self, path: Path, *hosts: str, **settings: Any) -> None:
        values = {"disk_mib": DISK, "docker_config": path, "insecure_registries": list(hosts), **settings}
        self.settings = Settings(home=path, **values)
        self.database = Database(self.settings.database)
        self.ledger = Ledger(self.database)
        self.images = Images(self.settings, self.database, self.ledger)
        self.told: list[str] = []

    async def get(self, source: object, **given: Any) -> CachedImage:
        return await self.images.get(str(source), **{"progress": self.told.append, **given})

    async def at_rest(self) -> None:
        """Nothing runs, and nothing under construction is left."""
        await self.images.close()
        images, blobs = self.settings.images_dir, self.settings.blobs_dir
        left = (*images.glob(".*"), *images.glob("cache/locks/*"), *blobs.glob("partial/*"))
        assert list(left) == []
        assert self.ledger.entries(kind=cache.KIND) == []

    def filesystems(self) -> list[Path]:
        return sorted(self.settings.cache_dir.glob("*/*.ext4"))

    def blobs(self) -> set[str]:
        return {path.name for path in self.settings.blobs_dir.glob("sha256/*")}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "home"


async def test_an_image_is_pulled_converted_and_kept(place: Path, front: Callable[..., Front]) -> None:
    server = front()
    home = Home(place, server.host)
    image = await home.get(f"docker:{server.host}/team/app")
    assert subprocess.run(["e2fsck", "-fn", image.rootfs], capture_output=True).returncode == 0
    assert image.rootfs.stat().st_size == image.disk_mib << 20 == DISK << 20
    assert image.rootfs.stat().st_mode & 0o777 == 0o444
    assert (image.default_user, image.config.env) == ("app", {"A": "b"})
    await home.at_rest()
    before = len(server.asked)
    assert await home.get(f"{server.host}/team/app:latest") == image
    assert [each.path for each in server.asked[before:]] == ["/v2/team/app/manifests/latest"]
    assert "is here already" in home.told[-1]


async def test_one_content_is_one_file_whatever_it_is_called(
    place: Path, registry: Registry, tmp_path: Path
) -> None:
    home = Home(place, registry.host)
    first = await home.get(f"{registry.host}/team/app")
    layout = Layout(tmp_path / "layout")
    for packed in (plain, zstandard):
        entry = layout.image(LAYERS, config=CONFIG, packed=packed, tag=packed.__name__)
        name = registry.push(layout, entry, "other/name", packed.__name__)
        home.told.clear()
        assert await home.get(name) == first
        assert not any("unpacking" in text for text in home.told)
    assert await home.get(f"{layout.directory}:zstandard") == first
    await home.at_rest()


async def test_shared_layers_are_fetched_once(
    place: Path, front: Callable[..., Front], registry: Registry, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "layout")
    registry.push(layout, layout.image([*LAYERS, tarball(file("three"))]), "team/next")
    server = front()
    home = Home(place, server.host)
    await home.get(f"{server.host}/team/app")
    before = server.count("/blobs/")
    await home.get(f"{server.host}/team/next")
    assert server.count("/blobs/") == before + 2, "its configuration and the new layer"
    await home.at_rest()


async def test_those_who_ask_at_once_share_one_conversion(place: Path, front: Callable[..., Front]) -> None:
    server = front()
    home = Home(place, server.host)
    told: list[list[str]] = [[] for _ in range(6)]
    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(home.get(f"{server.host}/team/app", progress=each.append)) for each in told
        ]
    assert all(each.result() == asked[0].result() for each in asked)
    assert server.count("/blobs/") == 3
    assert all("unpacking layer 2 of 2" in each for each in told)
    await home.at_rest()


async def test_processes_share_one_conversion_and_the_command_says_what_it_is(
    place: Path, front: Callable[..., Front]
) -> None:
    server = front()
    home = Home(place, server.host)
    command = [sys.executable, "-m", "agentenv", "pull", f"docker:{server.host}/team/app", "--quiet"]
    environment = {
        **os.environ,
        "AENV_HOME": str(place),
        "AENV_DISK_MIB": str(DISK),
        "AENV_INSECURE_REGISTRIES": f'["{server.host}"]',
    }
    processes = [
        await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
        for _ in range(3)
    ]
    answers = {(await process.communicate())[0].decode() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert server.count("/blobs/") == 3
    image = await home.get(f"{server.host}/team/app")
    (answer,) = map(json.loads, answers)
    assert (answer["image"], answer["digest"]) == (f"docker:{server.host}/team/app", image.digest)
    await home.at_rest()


async def test_unpacking_begins_before_everything_is_there(place: Path, front: Callable[..., Front]) -> None:
    unpacking = threading.Event()
    waited: list[bool] = []

    def slow(asked: Asked) -> None:
        """The upper layer waits until the lower one is unpacked."""
        if asked.path.endswith(digest_of(gzipped(LAYERS[1]))):
            waited.append(unpacking.wait(LIMIT_S))

    def progress(text: str) -> None:
        if text == "unpacking layer 2 of 2":  # said once the lower one is done
            unpacking.set()

    server = front(slow)
    home = Home(place, server.host)
    await home.get(f"{server.host}/team/app", progress=progress)
    assert waited == [True]
    await home.at_rest()


async def test_without_the_registry_an_image_is_what_it_was_last(
    place: Path, front: Callable[..., Front]
) -> None:
    server = front(lambda asked: Answer(429, {"Retry-After": "9999"}) if down else None)
    down: list[bool] = []
    home = Home(place, server.host)
    image = await home.get(f"{server.host}/team/app")
    down.append(True)
    assert await home.get(f"{server.host}/team/app") == image
    assert any("using what it was last" in text for text in home.told)
    with pytest.raises(Unreachable):
        await home.get(f"{server.host}/team/other")
    await home.at_rest()


async def test_by_digest_nothing_is_asked_once_it_is_here(place: Path, front: Callable[..., Front]) -> None:
    server = front()
    home = Home(place, server.host)
    image = await home.get(f"{server.host}/team/app")
    entries = Entries(home.settings.cache_dir)
    digest = (entries.pointed(f"image {server.host}/team/app:latest") or {})["manifest"]
    before = len(server.asked)
    assert await home.get(f"{server.host}/team/app@{digest}") == image
    assert len(server.asked) == before
    await home.at_rest()


async def test_a_disk_of_the_size_that_is_asked_for(place: Path, registry: Registry) -> None:
    home = Home(place, registry.host)
    sizes = [await home.get(f"{registry.host}/team/app", disk_mib=mib) for mib in (64, 1024, None)]
    assert [image.disk_mib for image in sizes] == [64, 1024, DISK]
    assert len({image.rootfs for image in sizes}) == 3
    assert len({image.digest for image in sizes}) == 1
    await home.at_rest()


async def test_a_larger_disk_is_grown_from_a_smaller_one(place: Path, front: Callable[..., Front]) -> None:
    server = front()
    home = Home(place, server.host)
    small = await home.get(f"{server.host}/team/app")
    before, home.told = server.count("/blobs/"), []
    large = await home.get(f"{server.host}/team/app", disk_mib=4096)
    assert server.count("/blobs/") == before
    assert not any("unpacking" in text for text in home.told)
    assert large.rootfs.stat().st_size == 4096 << 20
    assert large.size_bytes < small.size_bytes + (8 << 20)
    assert large.rootfs.stat().st_mode & 0o777 == 0o444
    for image in (small, large):
        checked = subprocess.run(["e2fsck", "-fn", image.rootfs], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    told = subprocess.run(["debugfs", "-R", "stat /one", large.rootfs], capture_output=True, text=True).stdout
    assert "Size: 300000" in told
    header = subprocess.run(["dumpe2fs", "-h", large.rootfs], capture_output=True, text=True).stdout
    inodes = next(line for line in header.splitlines() if line.startswith("Inode count:"))
    assert int(inodes.split()[-1]) >= (4096 << 20) // 16384
    await home.at_rest()


async def test_files_are_known_again_and_noticed_when_they_change(place: Path, tmp_path: Path) -> None:
    home, path = Home(place), tmp_path / "rootfs.tar"
    path.write_bytes(tarball(file("a")))
    first = await home.get(path)
    home.told.clear()
    assert await home.get(path) == first
    assert home.told == [f"{path} is here already"]
    path.write_bytes(tarball(file("b")))
    assert (await home.get(path)).digest != first.digest
    await home.at_rest()


# When it fails


async def test_what_is_neither_a_file_nor_an_image(place: Path, registry: Registry) -> None:
    home = Home(place, registry.host)
    with pytest.raises(NotFound, match="nor is there such a file here"):
        await home.get(f"{registry.host}/team/nothing")
    with pytest.raises(NotFound, match="has no image"):
        await home.get(f"docker:{registry.host}/team/nothing")
    await home.at_rest()


async def test_an_error_of_the_worker_arrives_as_it_is_and_nothing_is_left(
    place: Path, front: Callable[..., Front]
) -> None:
    server = front(lambda asked: Spoil(lambda data: data[:-1] + b"!") if asked.is_blob else None)
    home = Home(place, server.host)
    with pytest.raises(StoreCorrupt, match="came with the content of"):
        await home.get(f"{server.host}/team/app")
    await home.at_rest()
    assert home.filesystems() == []
    server.rules.clear()
    await home.get(f"{server.host}/team/app")
    await home.at_rest()


async def test_a_layer_that_unpacks_to_something_else(
    place: Path, registry: Registry, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "layout")
    name = registry.push(layout, layout.image(LAYERS, packed=lying), "team/lie")
    home = Home(place, registry.host)
    with pytest.raises(StoreCorrupt, match="unpacks to"):
        await home.get(name)
    await home.at_rest()
    assert home.filesystems() == []


def lying(layer: bytes) -> bytes:
    return gzipped(tarball(file("other")))


async def test_a_blob_that_was_damaged_on_the_disk_is_fetched_again(
    place: Path, front: Callable[..., Front]
) -> None:
    server = front()
    home = Home(place, server.host)
    await home.get(f"{server.host}/team/app")
    await home.images.close()
    blobs = sorted(home.settings.blobs_dir.glob("sha256/*"), key=lambda path: path.stat().st_size)
    blobs[-1].chmod(0o600)
    blobs[-1].write_bytes(bytes(blobs[-1].stat().st_size))
    image = await home.get(f"{server.host}/team/app", disk_mib=64)
    assert image.disk_mib == 64
    assert any("damaged" in text for text in home.told)
    await home.at_rest()


@pytest.mark.parametrize("room", ["1m", "8m"])
async def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, registry: Registry, room: str) -> None:
    """Once the layers do not fit, once what is made of them."""
    place = tmp_path / "home"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "none", str(place)], check=True)
    try:
        home = Home(place, registry.host)
        layout = Layout(tmp_path / "layout")
        large = tarball(file("large", os.urandom(4 << 20)))
        name = registry.push(layout, layout.image([large], packed=plain), "team/large")
        with pytest.raises(StoreFull):
            await home.get(name)
        await home.at_rest()
        assert home.filesystems() == []
        home.database.close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("part", ["/manifests/", "/blobs/"])
async def test_called_off_at_any_point_nothing_is_left(
    place: Path, front: Callable[..., Front], part: str
) -> None:
    loop, arrived, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hang(asked: Asked) -> None:
        if part in asked.path:
            loop.call_soon_threadsafe(arrived.set)
            release.wait(LIMIT_S)

    server = front(hang)
    home = Home(place, server.host)
    asked = asyncio.create_task(home.get(f"{server.host}/team/app"))
    await arrived.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert home.ledger.entries(kind=cache.KIND) == []
    assert list(home.settings.images_dir.glob(".*")) == []
    release.set()
    server.rules.clear()
    assert (await home.get(f"{server.host}/team/app")).digest
    await home.at_rest()


async def test_one_who_goes_does_not_end_it_for_the_others(place: Path, front: Callable[..., Front]) -> None:
    loop, arrived, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hang(asked: Asked) -> None:
        if asked.is_blob:
            loop.call_soon_threadsafe(arrived.set)
            release.wait(LIMIT_S)

    server = front(hang)
    home = Home(place, server.host)
    first, second = (asyncio.create_task(home.get(f"{server.host}/team/app")) for _ in range(2))
    await arrived.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    release.set()
    assert (await second).config.user == "app"
    await home.at_rest()


async def test_a_worker_that_is_killed(place: Path, front: Callable[..., Front]) -> None:
    server = front()
    home = Home(place, server.host)

    def kill(text: str) -> None:
        if text.startswith("writing"):
            (entry,) = home.ledger.entries(kind=cache.KIND)
            os.killpg(entry.detail["worker"], signal.SIGKILL)

    with pytest.raises(HostFault, match="ended"):
        await home.get(f"{server.host}/team/app", progress=kill)
    await home.at_rest()
    assert home.filesystems() == []


# Credentials


def everything_readable(root: int) -> Iterator[bytes]:
    """Command lines and environments of this process' descendants."""
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdecimal() and f"PPid:\t{root}\n" in Path(entry.path, "status").read_text():
                yield Path(entry.path, "cmdline").read_bytes() + Path(entry.path, "environ").read_bytes()
                yield from everything_readable(int(entry.name))
        except OSError:
            continue


async def test_credentials_are_in_no_process_list_no_file_and_no_record(
    place: Path, front: Callable[..., Front], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    seen: list[bytes] = []

    def look(asked: Asked) -> None:
        if asked.is_blob:
            seen.extend(everything_readable(os.getpid()))

    server = front(look, Tokens({USER: PASSWORD}))
    home = Home(place, server.host)
    given = Credentials(USER, PASSWORD)
    with pytest.raises(Forbidden):
        await home.get(f"{server.host}/team/app", credentials=Credentials(USER, "wrong"))
    await home.get(f"{server.host}/team/app", credentials=given)
    await home.at_rest()
    home.database.sync()
    assert any(b"agentenv.image.worker" in each for each in seen), "the worker was looked at"
    secrets = [PASSWORD, basic(USER, PASSWORD).removeprefix("Basic "), Tokens.TOKEN]
    written = [path.read_bytes() for path in place.rglob("*") if path.is_file() and path.suffix != ".ext4"]
    for secret in secrets:
        assert not any(secret.encode() in each for each in (*seen, *written))
        assert secret not in caplog.text + "".join(home.told)


# Letting go


def kept(name: str, size: int, used: float) -> Kept:
    return Kept(Path(name), size, used)


def test_the_least_recently_used_go_first_and_what_is_needed_never() -> None:
    present = [kept("old", 5, 1), kept("needed", 50, 0), kept("older", 5, 0.5), kept("new", 5, 2)]
    needed = {Path("needed")}
    assert [each.path.name for each in plan(present, needed, 10, LATER)] == ["older"]
    assert [each.path.name for each in plan(present, needed, 0, LATER)] == ["older", "old", "new"]
    assert plan(present, needed, 15, LATER) == ()


def test_what_was_used_just_now_stays() -> None:
    assert plan([kept("now", 5, 1000)], (), 0, 1000 + GRACE_S - 1) == ()
    assert plan([kept("now", 5, 1000)], (), 0, 1000 + GRACE_S + 1) != ()


async def test_what_nothing_needs_goes_when_it_is_too_much(place: Path, registry: Registry) -> None:
    home = Home(place, registry.host, image_cache_mib=0)
    image = await home.get(f"{registry.host}/team/app")
    await home.at_rest()
    assert await home.images.evict() == (), "it was used just now"
    with home.images.keep(image.digest):
        await home.images.evict(LATER)
        assert home.filesystems() == [image.rootfs]
        assert home.blobs() == set(), "which a held filesystem does not need"
    await home.images.evict(LATER)
    assert home.filesystems() == []
    assert list(home.settings.cache_dir.glob("1-*")) == []
    again = await home.get(f"{registry.host}/team/app")
    assert (again.digest, again.rootfs != image.rootfs) == (image.digest, True), "no name is given twice"
    await home.at_rest()


async def test_a_directory_made_again_leaves_what_is_in_use(place: Path, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("x")
    home = Home(place)
    first = await home.get(tmp_path / "tree")
    inode = first.rootfs.stat().st_ino
    assert await home.get(tmp_path / "tree") == first
    assert first.rootfs.stat().st_ino == inode
    await home.at_rest()


@pytest.mark.parametrize("table", ["builds", "snapshots", "sandboxes"])
async def test_what_a_record_names_stays(place: Path, registry: Registry, table: str) -> None:
    home = Home(place, registry.host, image_cache_mib=0)
    image = await home.get(f"{registry.host}/team/app")
    await home.at_rest()
    path = str(image.rootfs if table == "builds" else image.rootfs.relative_to(place))
    columns = {
        "builds": "(id, template, state, document, created_at) VALUES ('a', 't', 'ready', ?, 0)",
        "snapshots": "(id, kind, build_id, document, created_at) VALUES ('a', 'pause', 'a', ?, 0)",
        "sandboxes": "(id, state, template, document, started_at) VALUES ('a', 'running', 'a', ?, 0)",
    }
    with home.database.transaction() as cursor:
        cursor.execute("INSERT INTO templates (id, name, public, created_at) VALUES ('t', 't', 0, 0)")
        cursor.execute(f"INSERT INTO {table} {columns[table]}", (f'{{"disk": [{{"path": "{path}"}}]}}',))
    await home.images.evict(LATER)
    assert home.filesystems() == [image.rootfs]
    with home.database.transaction() as cursor:
        cursor.execute(f"DELETE FROM {table}")
    await home.images.evict(LATER)
    assert home.filesystems() == []


async def test_holds_and_leftovers_of_the_dead_count_for_nothing(place: Path, registry: Registry) -> None:
    home = Home(place, registry.host, image_cache_mib=0)
    image = await home.get(f"{registry.host}/team/app")
    await home.at_rest()
    scratch = home.settings.images_dir / ".image-dead"
    (scratch / "tree").mkdir(parents=True)
    home.ledger.record(image.digest, "image-hold", "x", pid=os.getpid(), started=1)
    home.ledger.record(image.digest, cache.KIND, str(scratch), blobs=[], pid=os.getpid(), started=1)
    assert cache.reap(home.ledger) == (str(scratch),)
    await home.images.evict(LATER)
    assert home.filesystems() == []
    assert home.ledger.entries() == []
    assert not scratch.exists()


def test_an_error_of_every_class_passes_between_processes() -> None:
    from agentenv.image.conversion import error_of

    def classes(root: type[AenvError]) -> Iterator[type[AenvError]]:
        yield root
        for each in root.__subclasses__():
            yield from classes(each)

    for kind in {each for each in classes(AenvError) if each.__module__ == "agentenv.errors"}:
        line = {"error": kind.__name__, "message": "m", "remedy": "r", "retry_after": 2.0}
        made = error_of(line)
        assert (type(made), made.message, made.remedy, made.retry_after) == (kind, "m", "r", 2.0)
