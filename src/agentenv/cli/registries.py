"""Credentials for the registries of a Dockerfile's base images, which go to the node with each build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from agentenv.dockerfile.plan import Image, Plan, Stage
from agentenv.errors import InvalidRequest
from agentenv.image import reference

if TYPE_CHECKING:
    from agentenv.image.credentials import Credentials

Logins = Mapping[str, "Credentials"]
"""Credentials by the registry that they are for."""


def registry_of(stage: Stage) -> str | None:
    """The registry of a stage's base, or of the first image that it copies from: the one that its build may
    have credentials for. None where there is none."""
    sources = [stage.base] if isinstance(stage.base, Image) else [step.origin for step in stage.steps]
    images = [source for source in sources if isinstance(source, Image)]
    return reference.parse(images[0].reference).host if images else None


def registries(plan: Plan) -> tuple[str, ...]:
    """Those of all stages."""
    found = (registry_of(stage) for stage in plan.stages)
    return tuple(dict.fromkeys(host for host in found if host is not None))


def from_options(plan: Plan, given: Credentials | None, registry: str | None) -> Logins:
    """Those that the command line gives, for the registry that it names or the only one.

    Raises:
        InvalidRequest: it is not clear for which, or that one is not asked.
    """
    if given is None:
        return {}
    known = registries(plan)
    if registry is None and len(known) == 1:
        registry = known[0]
    if registry is None or registry not in known:
        raise InvalidRequest(
            f"the Dockerfile's images are of {', '.join(known) or 'no registry'}",
            remedy="say with --registry for which of them the credentials are",
        )
    return {registry: given}


def from_docker(plan: Plan) -> Logins:
    """Those that `docker login` left here, or its credential helpers know.

    Raises:
        InvalidRequest: the configuration cannot be read, or has an identity token, which cannot be sent on.
        HostFault: a helper fails.
    """
    import asyncio  # which takes 50 ms, and a build without this does without

    return asyncio.run(_from_docker(registries(plan)))


async def _from_docker(hosts: tuple[str, ...]) -> Logins:
    from agentenv.config import default_docker_config
    from agentenv.image.registry.docker_config import login

    found = {}
    for host in hosts:
        known = await login(default_docker_config(), host)
        if known is not None and known.identity_token:
            raise InvalidRequest(
                f"Docker has an identity token for {host}, which the build API has no word for",
                remedy="give --username and --password-stdin, or log in on the node",
            )
        if known is not None and known.credentials is not None and known.credentials.username:
            found[host] = known.credentials
    return found


def field(logins: Logins, stage: Stage) -> dict[str, dict[str, str]]:
    """What the body of a stage's build has of them."""
    given = logins.get(registry_of(stage) or "")
    if given is None:
        return {}
    asked = {"type": "registry", "username": given.username, "password": given.password}
    return {"fromImageRegistry": asked}
