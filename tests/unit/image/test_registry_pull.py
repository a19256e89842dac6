"""Pulling from a real registry, and from one that refuses, stumbles, cuts and lies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import AenvError, Forbidden, InvalidRequest, NotFound, StoreCorrupt, Unreachable
from agentenv.image.blobs import BlobStore
from agentenv.image.credentials import Credentials
from agentenv.image.oci import Manifest
from agentenv.image.reference import parse
from agentenv.image.registry.access import Access
from agentenv.image.registry.client import Client
from agentenv.image.registry.pull import Puller
from support.archives import Layout, digest_of, file, gzipped, plain, tarball, zstandard
from support.registry import (
    PASSWORD,
    USER,
    Answer,
    Asked,
    Front,
    Registry,
    Spoil,
    Tokens,
    basic,
    credential_helper,
    docker_config,
    fronts,
)

LAYER = tarball(file("data", os.urandom(700_000)))
GOOD = Credentials(USER, PASSWORD)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    running = Registry(tmp_path_factory.mktemp("registry") / "open")
    yield running
    running.close()


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    running = Registry(tmp_path_factory.mktemp("registry") / "closed", users=True)
    yield running
    running.close()


@pytest.fixture(scope="module")
def pushed(registry: Registry, closed: Registry, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The image `team/app:latest` of one layer in both registries."""
    layout = Layout(tmp_path_factory.mktemp("layout") / "app")
    entry = layout.image([LAYER], packed=plain)
    for each in (registry, closed):
        each.push(layout, entry, "team/app")
    return entry


@pytest.fixture
def front(registry: Registry, pushed: dict[str, Any]) -> Iterator[Callable[..., Front]]:
    """Starts servers before the registry."""
    with fronts(registry) as start:
        yield start


class Pull:
    """Pulls into a store of its own; waits are noted and not waited for."""

    def __init__(self, directory: Path) -> None:
        self.blobs = BlobStore(directory / "blobs")
        self.waits: list[float] = []

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0)

    async def __call__(
        self, name: str, credentials: Credentials | None = None, *insecure: str, **access: Any
    ) -> Manifest:
        reference = parse(name)
        reach = Access(insecure=(reference.host, *insecure), **access)
        async with Client(reach, reference.repository, credentials, sleep=self._sleep) as client:
            puller = Puller(client, self.blobs, reference)
            manifest = await puller.resolve()
            for blob in (manifest.config, *manifest.layers):
                await puller.fetch(blob, lambda size: None)
            return manifest

    def files(self) -> list[str]:
        """What is in the store, whole or partial."""
        return sorted(str(path) for path in self.blobs.directory.rglob("*") if path.is_file())


@pytest.fixture
def pull(tmp_path: Path) -> Pull:
    return Pull(tmp_path)


def content(pull: Pull, manifest: Manifest) -> bytes:
    with pull.blobs.open(manifest.layers[0].digest) as file:
        return file.read()


async def test_an_image_arrives_whole(registry: Registry, pushed: dict[str, Any], pull: Pull) -> None:
    manifest = await pull(f"{registry.host}/team/app")
    assert manifest.digest == pushed["digest"]
    assert content(pull, manifest) == LAYER
    assert all(digest_of(Path(path).read_bytes()).endswith(Path(path).name) for path in pull.files())
    assert {Path(path).stat().st_mode & 0o777 for path in pull.files()} == {0o400}


async def test_by_digest_and_by_tag(registry: Registry, pushed: dict[str, Any], pull: Pull) -> None:
    by_digest = await pull(f"{registry.host}/team/app@{pushed['digest']}")
    assert by_digest == await pull(f"{registry.host}/team/app:latest")


async def test_what_is_here_is_not_fetched_again(front: Callable[..., Front], pull: Pull) -> None:
    server = front()
    await pull(f"{server.host}/team/app")
    before = len(server.asked)
    await pull(f"{server.host}/team/app")
    assert [each.path for each in server.asked[before:]] == ["/v2/team/app/manifests/latest"]


@pytest.mark.parametrize("packed", [plain, gzipped, zstandard])
async def test_every_kind_of_layer(
    registry: Registry, pull: Pull, tmp_path: Path, packed: Callable[[bytes], bytes]
) -> None:
    layout = Layout(tmp_path / "layout")
    name = registry.push(layout, layout.image([LAYER], packed=packed), f"packed/{packed.__name__}")
    assert content(pull, await pull(name)) == packed(LAYER)


async def test_dockers_media_types_and_the_platform_in_an_index(
    registry: Registry, pull: Pull, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "layout", docker=True)
    arm = layout.image(
        [tarball(file("arm"))], architecture="arm64", platform={"os": "linux", "architecture": "arm64"}
    )
    amd = layout.image([LAYER], platform={"os": "linux", "architecture": "amd64"})
    assert amd["mediaType"] == "application/vnd.docker.distribution.manifest.v2+json"
    name = registry.push(layout, layout.index([arm, amd]), "docker/index", "v1")
    manifest = await pull(name)
    assert manifest.digest == amd["digest"]
    assert not pull.blobs.has(arm["digest"])


async def test_an_index_without_this_platform(registry: Registry, pull: Pull, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    arm = layout.image([LAYER], architecture="arm64", platform={"os": "linux", "architecture": "arm64"})
    name = registry.push(layout, layout.index([arm]), "only/arm")
    with pytest.raises(InvalidRequest, match="linux/arm64"):
        await pull(name)


@pytest.mark.parametrize("name", ["team/none", "team/app:none", f"team/app@sha256:{'0' * 64}"])
async def test_what_a_registry_does_not_have(
    registry: Registry, pushed: dict[str, Any], pull: Pull, name: str
) -> None:
    with pytest.raises(NotFound, match="has no image"):
        await pull(f"{registry.host}/{name}")
    assert pull.files() == []


async def test_in_the_clear_only_where_it_is_allowed(registry: Registry, pull: Pull) -> None:
    reference = parse(f"{registry.host}/team/app")
    async with Client(Access(), reference.repository) as client:
        with pytest.raises(Unreachable):  # TLS it is, which nobody speaks there
            client._sleep = pull._sleep
            await Puller(client, pull.blobs, reference).resolve()


async def test_a_redirect_or_token_server_in_the_clear_is_not_followed(
    front: Callable[..., Front], registry: Registry, pull: Pull
) -> None:
    elsewhere = {"Location": f"http://{registry.host}/v2/team/app/manifests/latest"}
    server = front(lambda asked: Answer(307, elsewhere) if asked.is_manifest else None)
    with pytest.raises(InvalidRequest, match=f"{registry.host} would be asked by http"):
        await pull(f"{server.host}/team/app")
    assert (await pull(f"{server.host}/team/app", None, registry.host)).layers
    realm = {"WWW-Authenticate": f'Bearer realm="http://{registry.host}/token"'}
    server = front(lambda asked: Answer(401, realm))
    with pytest.raises(InvalidRequest, match=f"{registry.host} would be asked by http"):
        await pull(f"{server.host}/team/app", GOOD)


# Who asks


async def test_basic_authentication(closed: Registry, pushed: dict[str, Any], pull: Pull) -> None:
    with pytest.raises(Forbidden, match="without credentials"):
        await pull(f"{closed.host}/team/app")
    with pytest.raises(Forbidden, match="refuses the credentials given"):
        await pull(f"{closed.host}/team/app", Credentials(USER, "wrong"))
    assert pull.files() == []
    assert content(pull, await pull(f"{closed.host}/team/app", GOOD)) == LAYER
    with pytest.raises(NotFound):  # told apart from a wrong password
        await pull(f"{closed.host}/team/none", GOOD)


async def test_tokens_for_anybody_and_for_users(front: Callable[..., Front], pull: Pull) -> None:
    tokens = Tokens()
    assert (await pull(f"{front(tokens).host}/team/app")).layers
    assert tokens.given[0] == {"service": ["tests"], "scope": ["repository:team/app:pull"]}
    server = front(Tokens({USER: PASSWORD}))
    with pytest.raises(Forbidden, match="refuses the credentials given"):
        await pull(f"{server.host}/team/app", Credentials(USER, "wrong"))
    assert (await pull(f"{server.host}/team/app", GOOD)).layers
    asked_with = {each.headers.get("authorization") for each in server.asked if each.path.startswith("/v2/")}
    assert asked_with == {None, f"Bearer {Tokens.TOKEN}"}, "the password goes to the token server alone"


async def test_a_token_that_runs_out_meanwhile(front: Callable[..., Front], pull: Pull) -> None:
    tokens = Tokens(lifetime=1)
    assert content(pull, await pull(f"{front(tokens).host}/team/app")) == LAYER
    assert len(tokens.given) == 3


async def test_a_bearer_token_given(front: Callable[..., Front], pull: Pull) -> None:
    def guarded(asked: Asked) -> Answer | None:
        return None if asked.headers.get("authorization") == "Bearer mine" else Answer(401)

    server = front(guarded)
    assert (await pull(f"{server.host}/team/app", Credentials(token="mine"))).layers
    with pytest.raises(Forbidden, match="refuses"):
        await pull(f"{server.host}/team/app", Credentials(token="other"))


def _config(kind: str, host: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    auth = basic(USER, PASSWORD).removeprefix("Basic ")
    answer = json.dumps({"ServerURL": host, "Username": USER, "Secret": PASSWORD})
    script = f'read server; [ "$server" = {host} ] || exit 1; [ "$1" = get ] && echo \'{answer}\''
    credential_helper(directory / "bin", "tests", script)
    monkeypatch.setenv("PATH", f"{directory / 'bin'}:{os.environ['PATH']}")
    documents: dict[str, dict[str, Any]] = {
        "auths": {"auths": {host: {"auth": auth}}},
        "https": {"auths": {f"https://{host}/v2/": {"auth": auth}}},
        "helper": {"credHelpers": {host: "tests"}},
        "store": {"credsStore": "tests", "auths": {host: {}}},
        "identity": {"auths": {host: {"auth": "", "identitytoken": PASSWORD}}},
    }
    return docker_config(directory / "docker", documents[kind])


@pytest.mark.parametrize("kind", ["auths", "https", "helper", "store", "identity"])
async def test_what_docker_login_left(
    front: Callable[..., Front], pull: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    server = front(Tokens({USER: PASSWORD}))
    config = _config(kind, server.host, tmp_path, monkeypatch)
    assert (await pull(f"{server.host}/team/app", docker_config=config)).layers


async def test_a_wrong_password_in_dockers_configuration(
    closed: Registry, pull: Pull, tmp_path: Path
) -> None:
    auth = basic(USER, "old").removeprefix("Basic ")
    config = docker_config(tmp_path / "docker", {"auths": {closed.host: {"auth": auth}}})
    with pytest.raises(Forbidden, match=r"in Docker's config\.json"):
        await pull(f"{closed.host}/team/app", docker_config=config)
    assert (await pull(f"{closed.host}/team/app", GOOD, docker_config=config)).layers


async def test_credentials_go_to_the_registry_alone(
    front: Callable[..., Front], registry: Registry, pull: Pull
) -> None:
    """Neither to a mirror, nor to the server that a blob is redirected to."""
    storage = front()

    def redirected(asked: Asked) -> Answer | None:
        if asked.headers.get("authorization") != basic(USER, PASSWORD):
            return Answer(401, {"WWW-Authenticate": 'Basic realm="here"'})
        return Answer(307, {"Location": f"http://{storage.host}{asked.path}"}) if asked.is_blob else None

    origin = front(redirected)
    mirror = front(lambda asked: Answer(401, {"WWW-Authenticate": 'Basic realm="here"'}))
    insecure, mirrors = (storage.host, mirror.host), {origin.host: (mirror.host,)}
    assert (await pull(f"{origin.host}/team/app", GOOD, *insecure, mirrors=mirrors)).layers
    assert storage.count("/blobs/") == 2
    assert mirror.count("/manifests/") == 1
    assert all("authorization" not in each.headers for each in (*storage.asked, *mirror.asked))


async def test_credentials_are_in_no_log_and_no_message(
    front: Callable[..., Front], pull: Pull, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for rule in (Tokens({USER: PASSWORD}), Tokens({"nobody": "x"}), lambda asked: Answer(500)):
        try:
            await pull(f"{front(rule).host}/team/app", GOOD)
        except AenvError as error:
            assert PASSWORD not in f"{error} {error.__cause__!r}"
    secrets = (PASSWORD, basic(USER, PASSWORD).removeprefix("Basic "), Tokens.TOKEN)
    assert not any(secret in caplog.text for secret in secrets)
    assert PASSWORD not in repr(GOOD)


# Mirrors


async def test_mirrors_are_asked_first_and_the_registry_when_they_fail(
    front: Callable[..., Front], registry: Registry, pull: Pull
) -> None:
    gone, empty, origin = front(lambda asked: Answer(503)), front(lambda asked: Answer(404)), front()
    mirrors = {origin.host: (gone.host, empty.host, registry.host)}
    insecure = (gone.host, empty.host, registry.host)
    assert (await pull(f"{origin.host}/team/app", None, *insecure, mirrors=mirrors)).layers
    assert origin.asked == []
    origin_too = {origin.host: (empty.host,)}
    (pull.blobs.directory / "sha256").rename(pull.blobs.directory / "away")
    assert (await pull(f"{origin.host}/team/app", None, *insecure, mirrors=origin_too)).layers
    assert origin.count("/blobs/") == 2


async def test_a_mirror_that_lies_is_passed_over(front: Callable[..., Front], pull: Pull) -> None:
    origin = front()
    mirror = front(lambda asked: Spoil(lambda data: data[:-1] + b"!") if asked.is_blob else None)
    mirrors = {origin.host: (mirror.host,)}
    manifest = await pull(f"{origin.host}/team/app", None, mirror.host, mirrors=mirrors)
    assert content(pull, manifest) == LAYER


# Stumbling


async def test_retry_after_is_waited_for(front: Callable[..., Front], pull: Pull) -> None:
    def busy(asked: Asked) -> Answer | None:
        return Answer(429, {"Retry-After": "7"}) if asked.nth <= 2 else None

    assert (await pull(f"{front(busy).host}/team/app")).layers
    assert len(pull.waits) == 6
    assert all(7 <= wait < 8 for wait in pull.waits)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
async def test_a_registry_that_stays_busy(front: Callable[..., Front], pull: Pull, status: int) -> None:
    with pytest.raises(Unreachable, match=str(status)):
        await pull(f"{front(lambda asked: Answer(status)).host}/team/app")
    assert len(pull.waits) == 4
    assert pull.waits == sorted(pull.waits)


async def test_a_registry_that_asks_for_an_hour(front: Callable[..., Front], pull: Pull) -> None:
    with pytest.raises(Unreachable) as caught:
        await pull(f"{front(lambda asked: Answer(429, {'Retry-After': '3600'})).host}/team/app")
    assert (caught.value.retry_after, pull.waits) == (3600, [])


async def test_nobody_there(pull: Pull) -> None:
    from support.registry import free_port

    with pytest.raises(Unreachable, match="cannot be reached"):
        await pull(f"127.0.0.1:{free_port()}/team/app")


async def test_plain_http_that_nobody_allowed(registry: Registry, pull: Pull) -> None:
    async with Client(Access(), "team/app", sleep=pull._sleep) as client:
        reference = parse(f"{registry.host}/team/app")
        with pytest.raises(Unreachable, match="plain HTTP") as caught:
            await Puller(client, pull.blobs, reference).resolve()
    assert f"AENV_INSECURE_REGISTRIES='[\"{registry.host}\"]'" in str(caught.value.remedy)


async def test_a_cut_download_goes_on_where_it_was(front: Callable[..., Front], pull: Pull) -> None:
    def cutting(asked: Asked) -> Spoil | None:
        return Spoil(cut=200_000) if asked.is_blob and asked.nth <= 3 else None

    server = front(cutting)
    assert content(pull, await pull(f"{server.host}/team/app")) == LAYER
    layer = [each for each in server.asked if each.path.endswith(hashlib.sha256(LAYER).hexdigest())]
    begins = [each.headers.get("range", "bytes=0-") for each in layer]
    assert begins == ["bytes=0-", "bytes=200000-", "bytes=400000-", "bytes=600000-"]


async def test_a_manifest_that_is_cut_is_asked_for_again(front: Callable[..., Front], pull: Pull) -> None:
    server = front(lambda asked: Spoil(cut=50) if asked.is_manifest and asked.nth <= 2 else None)
    assert (await pull(f"{server.host}/team/app")).layers
    assert server.count("/manifests/") == 3
    broken = front(lambda asked: Spoil(cut=50) if asked.is_manifest else None)
    with pytest.raises(Unreachable):
        await pull(f"{broken.host}/team/app")


async def test_a_server_that_ignores_ranges(front: Callable[..., Front], pull: Pull) -> None:
    def cutting(asked: Asked) -> Spoil | None:
        asked.headers.pop("range", None)
        return Spoil(cut=200_000) if asked.is_blob and asked.nth <= 2 else None

    assert content(pull, await pull(f"{front(cutting).host}/team/app")) == LAYER


async def test_cut_for_good_and_gone_on_with_by_the_next_pull(
    front: Callable[..., Front], pull: Pull
) -> None:
    broken = front(lambda asked: Spoil(cut=200_000 if asked.nth == 1 else 0) if asked.is_blob else None)
    with pytest.raises(Unreachable):
        await pull(f"{broken.host}/team/app")
    server = front()
    assert content(pull, await pull(f"{server.host}/team/app")) == LAYER
    assert "bytes=200000-" in [each.headers.get("range") for each in server.asked]


# Lying


def _longer(data: bytes) -> bytes:
    return data + b"x"


def _shorter(data: bytes) -> bytes:
    return data[:-1]


def _other(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [_longer, _shorter, _other])
@pytest.mark.parametrize("part", ["/blobs/", "/manifests/"])
async def test_content_that_is_not_what_its_digest_says(
    front: Callable[..., Front], pull: Pull, part: str, change: Callable[[bytes], bytes]
) -> None:
    server = front(lambda asked: Spoil(change) if part in asked.path else None)
    with pytest.raises(StoreCorrupt):
        await pull(f"{server.host}/team/app")
    assert not any("partial" in path for path in pull.files())
    assert len(pull.files()) == (1 if part == "/blobs/" else 0)


async def test_a_body_of_no_stated_length(front: Callable[..., Front], pull: Pull) -> None:
    """It ends with the connection, too early, each time: that is no success."""

    def unstated(asked: Asked) -> Spoil | None:
        return Spoil(lambda data: data[:100_000]) if asked.is_blob and "range" not in asked.headers else None

    server = front(unstated)
    with pytest.raises(StoreCorrupt, match="bytes"):
        await pull(f"{server.host}/team/app")


async def test_a_manifest_of_dockers_first_format(front: Callable[..., Front], pull: Pull) -> None:
    old = json.dumps({"schemaVersion": 1, "fsLayers": []}).encode()
    server = front(lambda asked: Answer(200, {}, old) if asked.is_manifest else None)
    with pytest.raises(InvalidRequest, match="first manifest format"):
        await pull(f"{server.host}/team/app")


async def test_what_is_no_image(registry: Registry, pull: Pull, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    config = layout.blob(b"{}", "application/vnd.cncf.helm.config.v1+json")
    media = "application/vnd.oci.image.manifest.v1+json"
    chart = layout.document({"schemaVersion": 2, "mediaType": media, "config": config, "layers": []}, media)
    with pytest.raises(InvalidRequest, match="helm"):
        await pull(registry.push(layout, chart, "charts/one"))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"schemaVersion": 2}', b'{"manifests": [{}]}', b"\xff" * 99]
)
async def test_manifests_that_make_no_sense(front: Callable[..., Front], pull: Pull, body: bytes) -> None:
    server = front(lambda asked: Answer(200, {}, body) if asked.is_manifest else None)
    with pytest.raises(StoreCorrupt):
        await pull(f"{server.host}/team/app")
