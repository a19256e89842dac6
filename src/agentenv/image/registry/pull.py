"""An image out of a registry: what its reference means, and its blobs into the store.

Each server that may have it (mirrors first) is asked in turn; the last one's failure is the answer. A
download that is cut goes on from where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar

import httpx

from agentenv.errors import Forbidden, NotFound, StoreCorrupt, Unreachable
from agentenv.image import oci
from agentenv.image.blobs import BlobStore, Partial, digest_of
from agentenv.image.config import DOCUMENT_LIMIT
from agentenv.image.oci import Descriptor, Manifest
from agentenv.image.reference import Reference
from agentenv.image.registry.access import Endpoint, endpoints
from agentenv.image.registry.client import Client, unreachable

log = logging.getLogger(__name__)

ACCEPT = ", ".join((*oci.MANIFEST_TYPES, *oci.INDEX_TYPES))
# What another server may do better: it has another state, other rules, another line.
_NEXT = (NotFound, Forbidden, Unreachable, StoreCorrupt)

T = TypeVar("T")


class Puller:
    """Gets one image's content into a store. `client` is for its repository."""

    def __init__(self, client: Client, blobs: BlobStore, reference: Reference) -> None:
        self._client, self._blobs, self._reference = client, blobs, reference
        self._endpoints = list(endpoints(reference, client.access))

    async def resolve(self) -> Manifest:
        """The image for this platform that the reference means now; its documents are in the store then.

        Raises:
            NotFound, Forbidden, Unreachable: no server has it, or gives it, or answers.
            InvalidRequest: not an image, or not for this platform.
            StoreCorrupt: a document is not what its digest says.
        """
        digest = await self._document(self._reference.wanted)
        for _ in range(oci.INDEX_DEPTH):
            with self._blobs.open(digest) as file:
                document = oci.parse_object(file.read(DOCUMENT_LIMIT), digest)
            if "manifests" not in document:
                return oci.manifest(document, digest)
            digest = await self._document(oci.for_platform(document).digest)
        raise StoreCorrupt(f"the indexes of {self._reference} are nested deeper than {oci.INDEX_DEPTH}")

    async def _document(self, wanted: str) -> str:
        """Have a manifest or index in the store; returns its digest."""
        is_digest = wanted.startswith("sha256:")
        if is_digest and self._blobs.has(wanted):
            return wanted
        data = await self._from_any(lambda endpoint: self._manifest(endpoint, wanted))
        return self._blobs.put(data)

    async def _manifest(self, endpoint: Endpoint, wanted: str) -> bytes:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._read_manifest(endpoint, wanted)
            except httpx.TransportError as error:
                if not await self._client.pause(attempt):
                    raise unreachable(error) from error

    async def _read_manifest(self, endpoint: Endpoint, wanted: str) -> bytes:
        async with self._client.get(endpoint, f"manifests/{wanted}", {"Accept": ACCEPT}) as response:
            data = b""
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > DOCUMENT_LIMIT:
                    raise StoreCorrupt(f"{endpoint.host} answers with a manifest without end")
            promised = response.headers.get("docker-content-digest", "")
        expected = wanted if wanted.startswith("sha256:") else promised
        if expected.startswith("sha256:") and digest_of(data) != expected:
            raise StoreCorrupt(
                f"{endpoint.host} answers with another manifest ({digest_of(data)}) than {expected}",
                remedy="try another mirror, or without one",
            )
        return data

    async def fetch(self, wanted: Descriptor, tell: Callable[[int], None]) -> None:
        """Have a blob in the store, its digest checked; `tell` gets the bytes that came, as they come.

        Raises:
            NotFound, Forbidden, Unreachable: no server has it, or gives it, or answers.
            StoreCorrupt: what came is not what its digest says.
            StoreFull: no space on the host.
        """
        if self._blobs.has(wanted.digest):
            tell(wanted.size)
            return
        with ExitStack() as stack:
            locking = self._blobs.fetching(wanted.digest, wanted.size)
            partial = await asyncio.to_thread(stack.enter_context, locking)  # may wait for another process
            if partial is None:
                tell(wanted.size)
                return
            await self._from_any(lambda endpoint: self._download(endpoint, wanted, partial, tell))

    async def _download(
        self, endpoint: Endpoint, wanted: Descriptor, partial: Partial, tell: Callable[[int], None]
    ) -> None:
        attempt = 0
        while partial.offset < wanted.size:
            before = partial.offset
            cut: httpx.TransportError | None = None
            try:
                await self._receive(endpoint, wanted, partial, tell)
            except httpx.TransportError as error:
                cut = error
            if partial.offset < wanted.size:
                attempt = 1 if partial.offset > before else attempt + 1
                if not await self._client.pause(attempt):
                    if cut is not None:
                        raise unreachable(cut) from cut
                    break  # it always ends early; what is missing is said by finish
        partial.finish()

    async def _receive(
        self, endpoint: Endpoint, wanted: Descriptor, partial: Partial, tell: Callable[[int], None]
    ) -> None:
        """Append what one request gives, from where the last one ended."""
        begin = partial.offset
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        async with self._client.get(endpoint, f"blobs/{wanted.digest}", headers) as response:
            if response.status_code == 416 or not _goes_on(response, begin):
                partial.restart()
                if response.status_code != 200:
                    return
            check_length(response, wanted, partial.offset)
            async for chunk in response.aiter_raw():
                partial.write(chunk)
                tell(len(chunk))

    async def _from_any(self, get: Callable[[Endpoint], Awaitable[T]]) -> T:
        """The first server's answer that is one; that server is asked first from then on."""
        servers = tuple(self._endpoints)
        for endpoint in servers[:-1]:
            try:
                answer = await get(endpoint)
            except _NEXT as error:
                log.info("%s does not have %s: %s", endpoint.host, self._reference, error.message)
                continue
            self._endpoints.remove(endpoint)
            self._endpoints.insert(0, endpoint)
            return answer
        return await get(servers[-1])


def _goes_on(response: httpx.Response, begin: int) -> bool:
    """Whether a body begins where it was asked to; a server may ignore ranges."""
    if response.status_code == 206:
        return bool(response.headers.get("content-range", "").startswith(f"bytes {begin}-"))
    return begin == 0


def check_length(response: httpx.Response, wanted: Descriptor, begin: int) -> None:
    """Refuse a body that says that it is longer or shorter than what is missing."""
    length = response.headers.get("content-length")
    if length is not None and length.isdecimal() and begin + int(length) != wanted.size:
        raise StoreCorrupt(
            f"{response.request.url.host} has the blob {wanted.digest} with {begin + int(length)} bytes, and"
            f" the manifest says {wanted.size}",
            remedy="the image was pushed wrongly, or something before the registry changes it",
        )
