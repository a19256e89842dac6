"""Between our calls and E2B's classes: bodies of creates, objects of answers, and E2B's errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

import httpx
from e2b import ConnectionConfig, NotFoundException, SandboxNotFoundException
from e2b.api import api_exception_from_code, handle_api_exception
from e2b.api.client.models import NewSandboxV2, SandboxNetworkConfig, SandboxVolumeMount
from e2b.api.client.types import UNSET
from e2b.connection_config import ApiParams
from e2b.sandbox.main import SandboxOpts
from e2b.sandbox.sandbox_api import (
    McpServer,
    SandboxIamOpts,
    SandboxLifecycle,
    SandboxNetworkOpts,
    build_iam_config,
    build_lifecycle_config,
    build_network_config,
)
from packaging.version import Version

from agentenv.client.answers import Made, Refused
from agentenv.client.calls import Call, limits_body
from agentenv.limits import Limits

T = TypeVar("T")

Missing = Literal["sandbox", "snapshot"]
"""What a 404 is about."""


class Drive(TypedDict, total=False):
    """An image beside the root disk, with the API's names; `id` and `image` are needed, sizes in MiB."""

    id: str
    image: str
    readOnly: bool
    mountPath: str
    subPath: str
    diskSizeMB: int


class Wishes(ApiParams, total=False):
    """What a create takes beyond E2B's.

    `limits`: how fast network and disk may be. `cpu_count`, `memory_mb`, `disk_size_mb`: another size than
    the template's. `drives`: images beside the root disk. `paused_timeout`: seconds for which it is kept
    while it is paused, 0 for good.
    """

    limits: Limits | None
    cpu_count: int | None
    memory_mb: int | None
    disk_size_mb: int | None
    drives: Sequence[Drive] | None
    paused_timeout: int | None


_NAMES: Mapping[str, str] = {
    "limits": "limits",
    "cpu_count": "cpuCount",
    "memory_mb": "memoryMB",
    "disk_size_mb": "diskSizeMB",
    "drives": "attachedDrives",
    "paused_timeout": "pausedTimeout",
}


def split(wishes: Wishes) -> tuple[dict[str, Any], ApiParams]:
    """The body's additions to E2B's, with the API's names, and what is left: how the node is reached."""
    given: dict[str, Any] = dict(wishes)
    more = {_NAMES[name]: given.pop(name) for name in _NAMES if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in _NAMES}
    if "limits" in more:
        more["limits"] = limits_body(more["limits"])
    if "attachedDrives" in more:
        more["attachedDrives"] = list(more["attachedDrives"])
    return more, cast(ApiParams, rest)


def new_sandbox(
    template: str,
    more: Mapping[str, Any],
    *,
    timeout: int | None = None,
    metadata: Mapping[str, str] | None = None,
    envs: Mapping[str, str] | None = None,
    allow_internet_access: bool | None = None,
    mcp: McpServer | None = None,
    network: SandboxNetworkOpts | None = None,
    iam: SandboxIamOpts | None = None,
    lifecycle: SandboxLifecycle | None = None,
    volume_mounts: list[SandboxVolumeMount] | None = None,
) -> dict[str, Any]:
    """The body of a create: E2B's, by its own functions, and `more`."""
    life = build_lifecycle_config(lifecycle)
    tokens = build_iam_config(iam)
    rules = build_network_config(network, tokens)
    body = NewSandboxV2(
        template_id=template,
        auto_pause=life.auto_pause,
        auto_pause_memory=life.auto_pause_memory,
        auto_resume=life.auto_resume,
        metadata=cast(Any, dict(metadata or {})),
        timeout=timeout if timeout is not None else UNSET,
        env_vars=cast(Any, dict(envs or {})),
        mcp=cast(Any, mcp) or UNSET,
        allow_internet_access=allow_internet_access if allow_internet_access is not None else UNSET,
        network=SandboxNetworkConfig(**rules) if rules else UNSET,
        iam=tokens or UNSET,
        volume_mounts=volume_mounts or UNSET,
    )
    return {**body.to_dict(), **more}


def options(made: Made, params: ApiParams, logger: logging.Logger | None) -> SandboxOpts:
    """What the constructor of E2B's classes takes, for a sandbox that was started."""
    headers = {
        "E2b-Sandbox-Id": made.sandbox_id,
        "E2b-Sandbox-Port": str(ConnectionConfig.envd_port),
    }
    if made.access_token is not None:
        headers["X-Access-Token"] = made.access_token
    return SandboxOpts(
        sandbox_id=made.sandbox_id,
        sandbox_domain=made.domain,
        envd_version=Version(made.envd_version),
        envd_access_token=made.access_token,
        traffic_access_token=made.traffic_token,
        connection_config=config_of(params, logger, headers),
    )


def config_of(
    params: ApiParams, logger: logging.Logger | None, sandbox_headers: dict[str, str] | None = None
) -> ConnectionConfig:
    """How the node is reached. `params` of an instance name its logger already."""
    given: dict[str, Any] = {"logger": logger, **params}
    return ConnectionConfig(extra_sandbox_headers=sandbox_headers, **given)


def refusal(refused: Refused) -> Exception:
    """E2B's exception for one of many that was not started."""
    if refused.code == 404:
        return NotFoundException(f"{refused.code}: {refused.message}")
    return api_exception_from_code(refused.code, refused.message)


def arguments(call: Call[T]) -> dict[str, Any]:
    """A call as the arguments of a request of httpx."""
    return {
        "method": call.method,
        "url": call.path,
        "json": call.body,
        "headers": dict(call.headers),
    }


def answered(call: Call[T], response: httpx.Response, missing: Missing = "sandbox") -> T:
    """What the answer says.

    Raises:
        NotFoundException: there is no such sandbox (SandboxNotFoundException) or snapshot.
        Exception: of E2B's for the status.
    """
    if response.status_code == 404:
        kind = SandboxNotFoundException if missing == "sandbox" else NotFoundException
        raise kind(_message(response))
    if response.status_code >= 300:
        raise handle_api_exception(response)
    return call.read(response.json() if response.content else None)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return response.text or "not found"
