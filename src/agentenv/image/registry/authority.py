"""Who one registry is told to be asking: nobody at first, then what its answers want (basic or token)."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agentenv.errors import Forbidden, Unreachable
from agentenv.image.credentials import Credentials
from agentenv.image.registry import docker_config
from agentenv.image.registry.challenge import challenges, token_url
from agentenv.image.registry.docker_config import Login


class Answer(Protocol):
    """A token server's answer."""

    @property
    def status_code(self) -> int: ...
    def json(self) -> object: ...


# Asks a token server: address, headers, form (empty: a GET).
AskToken = Callable[[str, Mapping[str, str], Mapping[str, str]], Awaitable[Answer]]


class Authority:
    """What goes into requests to `host`, for a repository. Given credentials go before those of Docker's
    configuration, and are for this host alone."""

    def __init__(
        self, host: str, repository: str, given: Credentials | None, docker_directory: Path | None
    ) -> None:
        self._host, self._repository = host, repository
        self._given = given
        self._docker_directory = docker_directory
        self._login: Login | None = Login(given) if given else None
        self._looked = given is not None
        self.headers: dict[str, str] = {}
        if given and given.token:
            self.headers = {"Authorization": f"Bearer {given.token}"}

    async def answer(self, headers: Sequence[str], ask: AskToken) -> None:
        """Take what a 401 wants; the request can then be made again.

        Raises:
            Forbidden: there is nothing else to offer, or the token server refuses what is.
            Unreachable: the token server makes no sense.
        """
        login = await self._known()
        if login and login.credentials and login.credentials.token:
            if "Authorization" in self.headers:
                raise self.refusal(f"{self._host}/{self._repository}")
            self.headers = {"Authorization": f"Bearer {login.credentials.token}"}
            return
        offered = {each.scheme: each for each in challenges(headers)}
        if (bearer := offered.get("bearer")) and (url := token_url(bearer, self._repository)):
            service = bearer.parameters.get("service", self._host)
            self.headers = {"Authorization": f"Bearer {await self._token(url, login, service, ask)}"}
        elif login and login.credentials and "basic" in offered and "Authorization" not in self.headers:
            self.headers = {"Authorization": basic(login.credentials)}
        else:
            raise self.refusal(f"{self._host}/{self._repository}")

    async def _known(self) -> Login | None:
        if not self._looked:
            self._login = await docker_config.login(self._docker_directory, self._host)
            self._looked = True
        return self._login

    async def _token(self, url: str, login: Login | None, service: str, ask: AskToken) -> str:
        headers: dict[str, str] = {}
        form: dict[str, str] = {}
        if login and login.identity_token:
            url = url.partition("?")[0]
            form = {
                "grant_type": "refresh_token",
                "service": service,
                "client_id": "agentenv",
                "scope": f"repository:{self._repository}:pull",
                "refresh_token": login.identity_token,
            }
        elif login and login.credentials:
            headers = {"Authorization": basic(login.credentials)}
        response = await ask(url, headers, form)
        if response.status_code in (400, 401, 403):
            raise self.refusal(f"{self._host}/{self._repository}")
        try:
            document = response.json() if response.status_code == 200 else None
        except ValueError:
            document = None
        token = (
            (document.get("token") or document.get("access_token")) if isinstance(document, dict) else None
        )
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise Unreachable(f"the token server of {self._host} answers {response.status_code} and no token")
        return token

    def refusal(self, what: str) -> Forbidden:
        """The error that says whether credentials were wrong or missing."""
        if self._login is not None:
            whose = "given" if self._given else "in Docker's config.json"
            return Forbidden(
                f"{self._host} refuses the credentials {whose} for {what}",
                remedy="see user name, password and rights there",
            )
        return Forbidden(
            f"{self._host} lets nobody have {what} without credentials, or has no such image",
            remedy="see the name; give credentials, or docker login",
        )


def _token(response: Answer) -> str | None:
    try:
        document = response.json()
    except ValueError:
        return None
    found = isinstance(document, dict) and (document.get("token") or document.get("access_token"))
    return found if isinstance(found, str) and found.isascii() and found.isprintable() else None


def basic(credentials: Credentials) -> str:
    """The value of an Authorization header (RFC 7617)."""
    pair = f"{credentials.username}:{credentials.password}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"
