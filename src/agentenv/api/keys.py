"""Routes of API keys, with E2B's names; for admins."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from agentenv.api import answers
from agentenv.api.models import Asked, Given, rfc3339
from agentenv.identity.keys import FIRST, Keys
from agentenv.identity.records import DEFAULT, Key, Quota, Rate, Scope

Count = Annotated[int | None, Field(ge=0)]


class QuotaBody(Asked):
    sandboxes: Count = None
    vcpus: Count = None
    memoryMB: Count = None
    diskSizeMB: Count = None


class RateBody(Asked):
    perSecond: Annotated[float, Field(gt=0, le=1e6)]
    burst: Annotated[int | None, Field(ge=1, le=1_000_000)] = None


class KeyBody(Asked):
    name: str
    project: str = DEFAULT
    scopes: list[Scope] = Field(default_factory=lambda: list[Scope](["use"]))
    quota: QuotaBody | None = None
    rateLimit: RateBody | None = None


class RenameBody(Asked):
    name: str


class Mask(Given):
    """How a key is shown: E2B's fields."""

    prefix: str
    valueLength: int
    maskedValuePrefix: str
    maskedValueSuffix: str = ""


class KeyAnswer(Given):
    id: str
    name: str
    project: str
    scopes: list[str]
    mask: Mask
    createdAt: str | None = None
    quota: QuotaBody | None = None
    rateLimit: RateBody | None = None


class NewKeyAnswer(KeyAnswer):
    key: str


def routes(keys: Keys) -> APIRouter:
    """All routes of API keys; that only admins come here is the gate's to see to."""
    router = APIRouter(tags=["keys"])

    @router.get("/api-keys", response_model=list[KeyAnswer])
    async def listed() -> Response:
        """List the API keys that hold; none is shown whole."""
        return answers.json([KeyAnswer.model_validate(_fields(key)) for key in keys.list()])

    @router.post("/api-keys", status_code=201, response_model=NewKeyAnswer)
    async def create(body: KeyBody) -> Response:
        """Make an API key. It is in this answer and nowhere else."""
        key, secret = keys.create(
            body.name,
            body.project,
            tuple(dict.fromkeys(body.scopes)),
            _quota(body.quota),
            _rate(body.rateLimit),
        )
        return answers.json(NewKeyAnswer.model_validate({**_fields(key), "key": secret}), 201)

    @router.patch("/api-keys/{key_id}", response_model=KeyAnswer)
    async def rename(key_id: str, body: RenameBody) -> Response:
        """Give an API key another name."""
        return answers.json(KeyAnswer.model_validate(_fields(keys.rename(key_id, body.name))))

    @router.post("/api-keys/{key_id}/rotate", response_model=NewKeyAnswer)
    async def rotate(key_id: str) -> Response:
        """Give an API key another secret; the one before does not hold from now on."""
        key, secret = keys.rotate(key_id)
        return answers.json(NewKeyAnswer.model_validate({**_fields(key), "key": secret}))

    @router.delete("/api-keys/{key_id}", status_code=204)
    async def revoke(key_id: str) -> Response:
        """Let an API key hold no longer, from now on; event streams that it opened end."""
        keys.revoke(key_id)
        return Response(status_code=204)

    return router


def _quota(given: QuotaBody | None) -> Quota:
    if given is None:
        return Quota()
    return Quota(given.sandboxes, given.vcpus, given.memoryMB, given.diskSizeMB)


def _rate(given: RateBody | None) -> Rate | None:
    if given is None:
        return None
    return Rate(given.perSecond, given.burst or max(1, round(given.perSecond)))


def _fields(key: Key) -> dict[str, Any]:
    prefix, _, rest = key.shown.partition("_")
    quota = key.quota
    return {
        "id": key.id,
        "name": key.name,
        "project": key.project,
        "scopes": list(key.scopes),
        "mask": Mask(prefix=f"{prefix}_", valueLength=40, maskedValuePrefix=rest),
        "createdAt": None if key.id == FIRST else rfc3339(key.created_at),
        "quota": QuotaBody(
            sandboxes=quota.sandboxes,
            vcpus=quota.vcpus,
            memoryMB=quota.memory_mib,
            diskSizeMB=quota.disk_mib,
        )
        if quota
        else None,
        "rateLimit": RateBody(perSecond=key.rate.per_second, burst=key.rate.burst) if key.rate else None,
    }
