"""The reference of endpoints, from the OpenAPI document of the control plane."""

from __future__ import annotations

from typing import Any, cast

from agentenv.api.app import create_app
from agentenv.config import Settings
from from_code import markdown

Schema = dict[str, Any]

_METHODS = ("get", "post", "put", "patch", "delete")


class _Absent:
    """Stands for parts of a node that are used only when a request comes: here none does."""

    def __getattr__(self, name: str) -> _Absent:
        return self

    def __call__(self, *_: object) -> _Absent:
        return self


def document() -> dict[str, Any]:
    """The OpenAPI document of a node that has all its parts."""
    absent = cast("Any", _Absent())
    app = create_app(
        absent, absent, Settings.model_construct(), keys=absent, port=0, builder=absent, observation=absent
    )
    return app.openapi()


def text() -> str:
    """A section for each tag with its calls, then one for all bodies."""
    spec = document()
    tags: dict[str, list[str]] = {}
    for path, calls in spec["paths"].items():
        for method in _METHODS:
            if method in calls:
                tags.setdefault(calls[method]["tags"][0], []).append(_call(method, path, calls[method]))
    parts = [markdown.heading(2, tag.capitalize()) + "".join(calls) for tag, calls in sorted(tags.items())]
    schemas = spec["components"]["schemas"]
    bodies = [_body(name, schemas[name]) for name in sorted(schemas) if name not in _FRAMEWORKS]
    return "".join(parts) + markdown.heading(2, "Bodies") + "".join(bodies)


# What the framework adds to every document; our answers to such requests are `Fault`s.
_FRAMEWORKS = frozenset({"HTTPValidationError", "ValidationError"})


def _call(method: str, path: str, call: Schema) -> str:
    parameters = [
        (
            markdown.code(each["name"]),
            each["in"],
            kind(each["schema"]) + (", required" if each.get("required") and each["in"] != "path" else ""),
        )
        for each in call.get("parameters", [])
    ]
    return (
        markdown.heading(3, markdown.code(f"{method.upper()} {path}"))
        + markdown.prose(call.get("description", ""))
        + "\n\n"
        + markdown.table(("parameter", "in", "value"), parameters)
        + _exchange(call)
    )


def _exchange(call: Schema) -> str:
    """What goes in and comes out."""
    lines = []
    if "requestBody" in call:
        needed = "" if call["requestBody"].get("required") else ", optional"
        lines.append(f"- Body: {_content(call['requestBody'])}{needed}")
    for status, answer in call["responses"].items():
        if status != "default" and status != "422":  # errors, which are told of once for all
            lines.append(f"- {status}: {_content(answer) or 'no body'}")
    return "\n".join(lines) + "\n\n"


def _content(message: Schema) -> str:
    """The kinds of bodies that a message may have."""
    return " or ".join(
        kind(each["schema"]) if each.get("schema") else markdown.code(media)
        for media, each in message.get("content", {}).items()
    )


def _body(name: str, schema: Schema) -> str:
    needed = schema.get("required", [])
    rows = [
        (markdown.code(field), kind(given), "required" if field in needed else _default(given))
        for field, given in schema.get("properties", {}).items()
    ]
    return (
        markdown.heading(3, _short(name), _target(name))
        + markdown.prose(schema.get("description", ""))
        + "\n\n"
        + markdown.table(("field", "value", "default"), rows)
    )


def _target(name: str) -> str:
    return f"body-{name.lower().replace('_', '-')}"


def _short(name: str) -> str:
    """The name of a body without the module that the framework puts before those that two modules have."""
    return name.rpartition("__")[2]


def _default(schema: Schema) -> str:
    return "" if schema.get("default") is None else markdown.code(schema["default"])


def kind(schema: Schema) -> str:
    """What a value may be, in words; bodies are linked."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{_short(name)}](#{_target(name)})"
    if "anyOf" in schema:
        return " or ".join(kind(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "const" in schema:
        return markdown.code(schema["const"])
    if "enum" in schema:
        return ", ".join(markdown.code(each) for each in schema["enum"])
    match schema.get("type"):
        case "array":
            return f"list of {kind(schema.get('items', {}))}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {kind(schema['additionalProperties'])}"
        case None:
            return "anything"
        case name:
            return str(name) + _bounds(schema)


def _bounds(schema: Schema) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "minLength": "length at least",
        "maxLength": "length at most",
    }
    return "".join(f", {said} {schema[name]:g}" for name, said in words.items() if name in schema)
