"""What a new sandbox can be started from: a template, or a snapshot that somebody took."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.errors import NotFound
from agentenv.sandbox.parts import Template, Templates
from agentenv.sandbox.records import Origin
from agentenv.snapshot.records import GuestSettings, Resources, Snapshot
from agentenv.snapshot.store import Snapshots


@dataclass(frozen=True)
class Source:
    """What is started from. Without `snapshot` it is the template's first one, perhaps still to be made."""

    origin: Origin
    resources: Resources
    guest: GuestSettings
    template: Template | None = None
    snapshot: Snapshot | None = None


def settings_of(template: Template) -> GuestSettings:
    """What processes in a template's sandboxes start with."""
    return GuestSettings(dict(template.env), template.default_user, template.default_workdir, template.init)


def of_template(template: Template) -> Source:
    """A template as a source."""
    return Source(
        Origin(template.id, template.name, template.build_id),
        Resources(template.vcpus, template.memory_mib, template.disk_mib),
        settings_of(template),
        template=template,
    )


def of_snapshot(snapshot: Snapshot) -> Source:
    """A snapshot as a source."""
    descent = snapshot.template
    return Source(
        Origin(descent.id, descent.name, descent.build_id),
        snapshot.resources,
        snapshot.guest,
        snapshot=snapshot,
    )


def find(reference: str, templates: Templates, snapshots: Snapshots) -> Source:
    """The source of that id or name. Names of templates and snapshots are never the same.

    Raises:
        NotFound: there is neither a template nor a checkpoint of that name.
    """
    try:
        return of_template(templates.get(reference))
    except NotFound:
        snapshot = snapshots.find(reference)
        if snapshot is None or snapshot.kind != "checkpoint":
            raise
        return of_snapshot(snapshot)
