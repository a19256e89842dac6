"""Templates as answers of the API, which the command line gives as well where no node runs."""

from __future__ import annotations

from typing import Any

from agentenv.api.build_models import ConfigAnswer, ListedBuild
from agentenv.api.models import ENVD_VERSION, TemplateAnswer, rfc3339
from agentenv.config import Settings
from agentenv.template.records import Build, Named, Template
from agentenv.template.states import ENDS, SHOWN


def fields(named: Named, settings: Settings) -> dict[str, Any]:
    """A template, as it is listed; its size, where no build says it, is that of the settings."""
    shown = named.shown
    made = None if shown is None else shown.made
    return TemplateAnswer.model_validate(
        {
            "templateID": named.id,
            "buildID": shown.id if shown else "",
            "cpuCount": made.vcpus if made else (shown and shown.vcpus) or settings.vcpus,
            "memoryMB": made.memory_mib if made else (shown and shown.memory_mib) or settings.memory_mib,
            "diskSizeMB": made.disk_mib if made else settings.disk_mib,
            "public": named.public,
            "aliases": [named.name],
            "names": [named.name],
            "createdAt": rfc3339(named.created_at),
            "updatedAt": rfc3339(shown.updated_at if shown else named.created_at),
            "buildCount": len(named.builds),
            "buildStatus": SHOWN[shown.state] if shown else "error",
        }
    ).model_dump()


def _config(made: Template) -> ConfigAnswer:
    return ConfigAnswer(
        user=made.default_user,
        workdir=made.default_workdir,
        env=made.env,
        entrypoint=list(made.entrypoint),
        cmd=list(made.cmd),
        exposedPorts=list(made.exposed_ports),
        labels=made.labels,
        init=made.init,
        startCmd=made.start.command or None,
        readyCmd=made.start.ready or None,
    )


def build(named: Named, build: Build, settings: Settings) -> dict[str, Any]:
    """One of its builds."""
    made = build.made
    return ListedBuild.model_validate(
        {
            "buildID": build.id,
            "status": SHOWN[build.state],
            "createdAt": rfc3339(build.created_at),
            "updatedAt": rfc3339(build.updated_at),
            "finishedAt": rfc3339(build.updated_at) if build.state in ENDS else None,
            "cpuCount": made.vcpus if made else build.vcpus or settings.vcpus,
            "memoryMB": made.memory_mib if made else build.memory_mib or settings.memory_mib,
            "diskSizeMB": made.disk_mib if made else None,
            "envdVersion": ENVD_VERSION if made else None,
            "config": made and _config(made),
            "tags": [tag for tag, build_id in sorted(named.tags.items()) if build_id == build.id],
        }
    ).model_dump(exclude_none=True)
