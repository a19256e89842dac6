"""What is particular about each language: its kernel, and how its environment variables are set."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

DEFAULT = "python"
_ALIASES = {"js": "javascript", "ts": "typescript", "py": "python", "sh": "bash"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Variables = Mapping[str, str | None]
"""Environment variables by name; None for one that is to go."""


@dataclass(frozen=True)
class Language:
    """A language.

    Attributes:
        kernels: the names under which Jupyter may know its kernel, the best first.
        assign: makes code that sets variables.
        late: whether the kernel may say that it is idle before it has told all output (Deno does).
        prepare: code for a kernel that goes into a snapshot, so that it has done what takes long.
        rehearse: code that does in short what a first execution does.
        inherit: code for a kernel that came out of a snapshot, so that it is no twin of its siblings.
    """

    kernels: tuple[str, ...]
    assign: Callable[[Variables], str]
    late: bool = False
    prepare: str = ""
    rehearse: str = ""
    inherit: str = ""


def canonical(language: str | None) -> str:
    """The name of a language as contexts have it; Python when none is given."""
    name = (language or DEFAULT).strip().lower()
    return _ALIASES.get(name, name)


def of(name: str) -> Language:
    """The language of that canonical name; one that is not known is taken for a kernel's name."""
    return LANGUAGES.get(name) or Language((name,), lambda variables: "")


def kernel_for(name: str, installed: Iterable[str]) -> str | None:
    """The installed kernel for a language, or None."""
    there = set(installed)
    return next((kernel for kernel in of(name).kernels if kernel in there), None)


def _python(variables: Variables) -> str:
    # No name is left behind, and any value is a literal.
    return (
        "(lambda e, v: (e.update({k: x for k, x in v.items() if x is not None}),"
        " [e.pop(k, None) for k, x in v.items() if x is None]))"
        f"(__import__('os').environ, {dict(variables)!r}) and None"
    )


def _javascript(variables: Variables) -> str:
    return (
        f"for (const [k, v] of Object.entries({json.dumps(variables)}))"
        " { if (v === null) delete process.env[k]; else process.env[k] = v; }"
    )


def _bash(variables: Variables) -> str:
    named = {name: value for name, value in variables.items() if _NAME.fullmatch(name)}
    return "\n".join(
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in named.items()
    )


def _r(variables: Variables) -> str:
    return "\n".join(
        f"Sys.unsetenv({json.dumps(name)})"
        if value is None
        else f"do.call(Sys.setenv, setNames(list({json.dumps(value)}), {json.dumps(name)}))"
        for name, value in variables.items()
    )


def _java(variables: Variables) -> str:
    return "\n".join(
        f"System.clearProperty({json.dumps(name)});"
        if value is None
        else f"System.setProperty({json.dumps(name)}, {json.dumps(value)});"
        for name, value in variables.items()
    )


def _rehearsal(function: str) -> str:
    return f"__import__('agentenv.interpreter.rehearsal', fromlist=('*',)).{function}()"


_SUM = "[1, 2].map((n) => n + 1)"

LANGUAGES: Mapping[str, Language] = {
    "python": Language(
        ("python3", "python"),
        _python,
        prepare=_rehearsal("prepare"),
        rehearse=_rehearsal("rehearse"),
        inherit=_rehearsal("inherit"),
    ),
    "javascript": Language(("deno", "javascript"), _javascript, late=True, prepare=_SUM, rehearse=_SUM),
    "typescript": Language(
        ("deno", "typescript", "javascript"), _javascript, late=True, prepare=_SUM, rehearse=_SUM
    ),
    "bash": Language(("bash",), _bash, prepare="true", rehearse="true"),
    "r": Language(("r", "ir"), _r),
    "java": Language(("java",), _java),
}
