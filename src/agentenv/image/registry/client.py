"""Requests to registries: authenticated, retried, redirected, in the clear only where that is allowed.

httpx takes proxies from the environment, as every program does. Its own redirects are off, since each target
is checked here; so is its log, since addresses of blobs may carry signatures.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from urllib.parse import urljoin, urlsplit

import httpx

from agentenv import __version__
from agentenv.errors import InvalidRequest, NotFound, Unreachable
from agentenv.image.credentials import Credentials
from agentenv.image.registry import retry
from agentenv.image.registry.access import Access, Endpoint
from agentenv.image.registry.authority import Authority

REDIRECTS = 5
CONNECT_LIMIT_S = 15.0
SILENCE_LIMIT_S = 60.0

for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)

Sleep = Callable[[float], Awaitable[object]]

_NO_TLS = "WRONG_VERSION_NUMBER"  # OpenSSL's name for an answer that is no TLS


class Client:
    """Speaks to the servers that may have one image. To be entered; one per pull."""

    def __init__(
        self,
        access: Access,
        repository: str,
        credentials: Credentials | None = None,
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.access = access
        self._repository = repository
        self._credentials = credentials
        self._sleep = sleep
        self._authorities: dict[str, Authority] = {}
        self._http = httpx.AsyncClient(
            verify=tls_context(access.ca_file),
            timeout=httpx.Timeout(SILENCE_LIMIT_S, connect=CONNECT_LIMIT_S),
            headers={"User-Agent": f"agentenv/{__version__}", "Accept-Encoding": "identity"},
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def get(
        self, endpoint: Endpoint, path: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The answer to a GET below the repository (`manifests/…`, `blobs/…`), its body still to be read.

        Raises:
            NotFound, Forbidden, InvalidRequest: the registry says so.
            Unreachable: it does not answer, or is busy for longer than is waited for.
        """
        url = f"{endpoint.url}/v2/{self._repository}/{path}"
        response = await self._patiently(lambda: self._authorized(endpoint, url, headers or {}))
        try:
            await self._refused(response, endpoint, path)
            yield response
        finally:
            await response.aclose()

    async def pause(self, attempt: int, asked: float | None = None) -> bool:
        """Wait before the next attempt; False when there should be none."""
        seconds = retry.wait(attempt, asked, random.random())
        if seconds is not None:
            await self._sleep(seconds)
        return seconds is not None

    async def _patiently(self, request: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        """The first answer that is not a passing failure, or the last failure."""
        attempt = 0
        while True:
            attempt += 1
            try:
                response = await request()
            except httpx.TransportError as error:
                if not is_lasting(error) and await self.pause(attempt):
                    continue
                raise unreachable(error) from error
            if not retry.is_passing(response.status_code):
                return response
            asked = retry.asked_wait(response.headers, time.time())
            await response.aclose()
            if not await self.pause(attempt, asked):
                raise Unreachable(
                    f"{response.request.url.host} answers {response.status_code} again and again",
                    remedy="try later",
                    retry_after=asked,
                )

    async def _authorized(self, endpoint: Endpoint, url: str, headers: Mapping[str, str]) -> httpx.Response:
        authority = self._authority(endpoint)
        response = await self._followed(url, {**headers, **authority.headers})
        for _ in range(2):  # a token may have run out meanwhile, and then have been refused
            if response.status_code != 401:
                break
            wanted = response.headers.get_list("www-authenticate")
            await response.aclose()
            await authority.answer(wanted, self._token)
            response = await self._followed(url, {**headers, **authority.headers})
        return response

    def _authority(self, endpoint: Endpoint) -> Authority:
        if endpoint.host not in self._authorities:
            given = None if endpoint.is_mirror else self._credentials
            self._authorities[endpoint.host] = Authority(
                endpoint.host, self._repository, given, self.access.docker_config
            )
        return self._authorities[endpoint.host]

    async def _token(self, url: str, headers: Mapping[str, str], form: Mapping[str, str]) -> httpx.Response:
        """The answer of a token server, read."""

        async def ask() -> httpx.Response:
            request = self._request("POST" if form else "GET", url, headers, form)
            return await self._http.send(request)

        return await self._patiently(ask)

    async def _followed(self, url: str, headers: Mapping[str, str]) -> httpx.Response:
        """The answer at the end of redirects. Another server is not told who asks."""
        origin = urlsplit(url)[:2]
        for _ in range(REDIRECTS):
            told = headers if urlsplit(url)[:2] == origin else without_authorization(headers)
            response = await self._http.send(self._request("GET", url, told), stream=True)
            location = response.headers.get("location")
            if not response.is_redirect or location is None:
                return response
            await response.aclose()
            url = urljoin(url, location)
        raise Unreachable(f"{origin[1]} redirects more than {REDIRECTS} times")

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None = None
    ) -> httpx.Request:
        if not self.access.allows(url):
            parts = urlsplit(url)
            raise InvalidRequest(
                f"{parts.netloc} would be asked by {parts.scheme}, in the clear",
                remedy=f"if that is meant, AENV_INSECURE_REGISTRIES='[\"{parts.netloc}\"]'",
            )
        try:
            return self._http.build_request(method, url, headers=headers, data=form or None)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InvalidRequest(f"{urlsplit(url).netloc!r} is no address: {error}") from None

    async def _refused(self, response: httpx.Response, endpoint: Endpoint, path: str) -> None:
        """Raise what an answer other than success means."""
        status, host = response.status_code, endpoint.host
        if status in (200, 206, 416):
            return
        what = f"{host}/{self._repository}"
        if status in (401, 403):
            raise self._authority(endpoint).refusal(what)
        if status == 404:
            kind = "image" if path.startswith("manifests/") else "blob"
            raise NotFound(f"{host} has no {kind} {self._repository} {path.rpartition('/')[2]}")
        raise Unreachable(f"{host} answers {status} for {what}", remedy="see the registry's log")


@functools.lru_cache(maxsize=4)
def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """The system's certificates (or those of SSL_CERT_FILE, SSL_CERT_DIR), and the node's own besides, read
    once: it takes some 20 ms.

    Raises:
        InvalidRequest: the file in the settings cannot be used.
    """
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:  # ssl.SSLError is one
            raise InvalidRequest(
                f"settings: the certificates in {ca_file} cannot be used: {error.strerror or error}",
                remedy="AENV_CA_FILE names a PEM file",
            ) from error
    return context


def without_authorization(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that any server may see."""
    return {name: value for name, value in headers.items() if name.lower() != "authorization"}


def is_lasting(error: httpx.TransportError) -> bool:
    """Whether a connection fails the same way the next time."""
    return any(word in str(error) for word in (_NO_TLS, "CERTIFICATE_VERIFY_FAILED"))


def unreachable(error: httpx.TransportError) -> Unreachable:
    """What a failed connection means, without the path asked for."""
    try:
        host = error.request.url.netloc.decode()
    except RuntimeError:  # httpx raises it where there is no request
        host = "the registry"
    why = str(error) or type(error).__name__
    remedy = "see the network, the proxy variables, and the certificates (AENV_CA_FILE)"
    if _NO_TLS in why:
        why, remedy = (
            "it speaks plain HTTP there",
            f"""if that is meant, set AENV_INSECURE_REGISTRIES='["{host}"]' where the node runs""",
        )
    return Unreachable(f"{host} cannot be reached: {why}", remedy=remedy)
