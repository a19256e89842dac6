"""What of a node the caller's project sees, and under which names.

A project's names of templates and snapshots are in the namespace of its own name, which it need not write:
`app` of the project `blue` is `blue/app`. The names of the project `default` have no namespace, or one that
is no project's. What is another project's is answered as if it were not there; a published template is
everybody's to use.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fastapi import Request

from agentenv.errors import Forbidden, NotFound
from agentenv.identity.caller import CALLER
from agentenv.identity.keys import Keys
from agentenv.identity.records import DEFAULT
from agentenv.sandbox.requests import NewSandbox
from agentenv.sandbox.service import Sandboxes
from agentenv.template.records import Named


class Names(Protocol):
    """Where templates are found; see template.store.Templates."""

    def find_named(self, reference: str) -> Named | None:
        """The template of that id or name."""


class Projects:
    """The projects of a node."""

    def __init__(self, service: Sandboxes, templates: Names, keys: Keys) -> None:
        self._service = service
        self._templates = templates
        self._keys = keys

    @property
    def current(self) -> str:
        """The project that is acted for."""
        return CALLER.get().project

    @property
    def _several(self) -> bool:
        return len(self._keys.projects) > 1

    # Sandboxes

    async def guard(self, request: Request) -> None:
        """Let nobody near the sandbox in the path whose it is not; a dependency of all routes."""
        sandbox_id = request.path_params.get("sandbox_id")
        if sandbox_id is not None:
            self.require_sandbox(sandbox_id)

    def require_sandbox(self, sandbox_id: str) -> None:
        """Raise NotFound, as for one that there never was, where the sandbox is another project's."""
        owner = self._service.project_of(sandbox_id)
        if owner != self.current and (owner is not None or self._several):
            raise NotFound(f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it")

    def has_sandbox(self, sandbox_id: str) -> bool:
        """Whether it is this project's, or was."""
        return self._service.project_of(sandbox_id) == self.current

    def stamped(self, wanted: NewSandbox) -> NewSandbox:
        """The same sandbox, wanted by this caller, of a template that it may use.

        Raises:
            NotFound: there is no such template that it sees.
        """
        template = wanted.template if wanted.image else self.readable(wanted.template)
        return replace(wanted, template=template, project=self.current, key=CALLER.get().key_id)

    # Templates and snapshots

    def of_template(self, name: str) -> str:
        """The project that a template of that name belongs to."""
        namespace, slash, _ = name.partition("/")
        return namespace if slash and namespace in self._keys.projects else DEFAULT

    def of_build(self, template_id: str) -> str:
        """The project that a build's template belongs to."""
        found = self._templates.find_named(template_id)
        return DEFAULT if found is None else self.of_template(found.name)

    def sees(self, template: Named) -> bool:
        """Whether a template may be used."""
        return template.public or self.of_template(template.name) == self.current

    def readable(self, reference: str) -> str:
        """The reference, as the node knows it, of a template or snapshot that may be used.

        Raises:
            NotFound: there is none that this project sees.
        """
        return self._found(reference, mine=False)

    def own(self, reference: str) -> str:
        """The same of one that may be changed.

        Raises:
            NotFound: there is none of this project's.
        """
        return self._found(reference, mine=True)

    def new_name(self, name: str) -> str:
        """The name, as the node knows it, of something new.

        Raises:
            Forbidden: its namespace is another project's.
        """
        namespace, slash, _ = name.strip().lower().partition("/")
        if not slash:
            return name if self.current == DEFAULT else f"{self.current}/{name.strip()}"
        if namespace != self.current and (self.current != DEFAULT or namespace in self._keys.projects):
            raise Forbidden(
                f'the namespace "{namespace}" is not this project\'s', remedy="leave it away, or use your own"
            )
        return name

    def wanted_name(self, name: str) -> str:
        """A name, or an id, that a list of snapshots is asked for."""
        if self.current == DEFAULT or "/" in name:
            return name
        found = self._service.snapshots.find(name)
        return name if found is not None and found.project == self.current else f"{self.current}/{name}"

    def _found(self, reference: str, *, mine: bool) -> str:
        if not self._several:
            return reference
        for candidate in self._candidates(reference):
            template = self._templates.find_named(candidate)
            if template is not None:
                if self.of_template(template.name) == self.current or (template.public and not mine):
                    return candidate
                continue
            snapshot = self._service.snapshots.find(candidate)
            if snapshot is not None and snapshot.project == self.current:
                return candidate
        raise NotFound(f'template "{reference}" not found', remedy="`aenv template list` shows them")

    def _candidates(self, reference: str) -> tuple[str, ...]:
        if self.current == DEFAULT or "/" in reference:
            return (reference,)
        return f"{self.current}/{reference}", reference
