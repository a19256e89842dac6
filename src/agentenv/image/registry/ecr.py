"""Credentials of Amazon's registries (ECR), which are got for keys with one signed request and hold 12 hours.

The request: https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_GetAuthorizationToken.html; its
signature, version 4: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from agentenv.errors import Forbidden, Unreachable
from agentenv.image.credentials import AwsKeys, Credentials
from agentenv.image.registry.access import Access
from agentenv.image.registry.client import CONNECT_LIMIT_S, tls_context, unreachable

SERVICE = "ecr"
LIMIT_S = 30.0
_ALGORITHM = "AWS4-HMAC-SHA256"
_BODY = b"{}"
_HEADERS = {
    "content-type": "application/x-amz-json-1.1",
    "x-amz-target": "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken",
}


def signed(
    url: str, keys: AwsKeys, now: float, headers: Mapping[str, str], body: bytes, service: str = SERVICE
) -> dict[str, str]:
    """The headers of a POST to `url` with its signature; those given are in small letters. `now`: seconds
    since the epoch, which AWS's clock must not differ from by more than five minutes."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{moment[:8]}/{keys.region}/{service}/aws4_request"
    sent = {**headers, "host": urlsplit(url).netloc, "x-amz-date": moment}
    names = ";".join(sorted(sent))
    lines = "".join(f"{name}:{value.strip()}\n" for name, value in sorted(sent.items()))
    path = urlsplit(url).path or "/"
    canonical = f"POST\n{path}\n\n{lines}\n{names}\n{hashlib.sha256(body).hexdigest()}"
    text = f"{_ALGORITHM}\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{keys.secret_access_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"{keys.access_key_id}/{scope}"
    sent["authorization"] = (
        f"{_ALGORITHM} Credential={credential}, SignedHeaders={names}, Signature={signature}"
    )
    return sent


async def login(keys: AwsKeys, access: Access) -> Credentials:
    """The credentials that the keys give right to.

    Raises:
        Forbidden: AWS refuses the keys. Unreachable: it does not answer, or makes no sense.
    """
    url = access.ecr_url or f"https://api.ecr.{keys.region}.amazonaws.com/"
    headers = signed(url, keys, time.time(), _HEADERS, _BODY)
    async with httpx.AsyncClient(
        verify=tls_context(access.ca_file), timeout=httpx.Timeout(LIMIT_S, connect=CONNECT_LIMIT_S)
    ) as http:
        try:
            answer = await http.post(url, headers=headers, content=_BODY)
        except httpx.TransportError as error:
            raise unreachable(error) from error
    document = _document(answer)
    if answer.status_code in (400, 401, 403):
        why = document.get("message") or document.get("Message") or answer.status_code
        raise Forbidden(
            f"AWS refuses the keys for {urlsplit(url).netloc}: {why}",
            remedy="see the keys, the region, and the right ecr:GetAuthorizationToken",
        )
    return _credentials(document, urlsplit(url).netloc, answer.status_code)


def _document(answer: httpx.Response) -> dict[str, Any]:
    try:
        document = answer.json()
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {}


def _credentials(document: Mapping[str, Any], host: str, status: int) -> Credentials:
    try:
        token = document["authorizationData"][0]["authorizationToken"]
        username, _, password = base64.b64decode(token, validate=True).decode().partition(":")
    except (KeyError, IndexError, TypeError, binascii.Error, UnicodeDecodeError):
        username = password = ""
    if not username or not password:
        raise Unreachable(f"{host} answers {status} and no credentials", remedy="try later")
    return Credentials(username, password)
