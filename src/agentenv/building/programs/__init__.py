"""Programs that a build runs inside the guest, on the tools drive's interpreter: nothing in the image is
relied on. Each is one file of the few modules that the drive has, handed over as text."""

from __future__ import annotations

from importlib import resources

from agentenv.guestimage.mounted import INTERPRETER


def argv(name: str, *arguments: str) -> tuple[str, ...]:
    """The words that start a program in the guest."""
    return (*INTERPRETER, resources.files(__package__).joinpath(f"{name}.py").read_text(), *arguments)
