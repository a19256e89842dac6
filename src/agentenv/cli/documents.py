"""What commands print as JSON: a JSON Schema (draft 2020-12) each, by the words that call them.

What a node answers is named by the schemas of its OpenAPI document, to which `$ref` points.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}


def of(name: str) -> Schema:
    """An object of the API's."""
    return {"$ref": f"#/components/schemas/{name}"}


def many(item: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": item}


def record(needed: Mapping[str, Schema], more: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these fields and perhaps `more`, and no others."""
    return {
        "type": "object",
        "properties": {**needed, **(more or {})},
        "required": list(needed),
        "additionalProperties": False,
    }


SCHEMAS: dict[tuple[str, ...], Schema] = {
    ("auth", "list"): many(record({"name": TEXT, "url": TEXT, "key": TEXT, "used": FLAG})),
    ("auth", "show"): record({"url": TEXT, "key": TEXT}),
    ("config", "show"): many(record({"name": TEXT, "value": TEXT, "from": TEXT})),
    ("connect",): many(record({"shell": TEXT, "pid": WHOLE})),
    ("doctor",): record(
        {
            "able": FLAG,
            "capabilities": many(
                record(
                    {
                        "name": TEXT,
                        "status": {"enum": ["ok", "degraded", "missing"]},
                        "required": FLAG,
                        "detail": TEXT,
                        "why": TEXT,
                        "remedy": TEXT,
                    }
                )
            ),
        }
    ),
    ("events",): {
        "type": "object",
        "properties": {"id": TEXT, "kind": TEXT, "timestamp": TEXT, "sandboxID": TEXT, "buildID": TEXT},
    },
    ("fork",): many(of("SandboxAnswer")),
    ("fsck",): many(
        record(
            {
                "path": TEXT,
                "what": TEXT,
                "concerns": many(TEXT),
                "repairable": FLAG,
                "repaired": FLAG,
            }
        )
    ),
    ("key", "create"): of("NewKeyAnswer"),
    ("key", "list"): many(of("KeyAnswer")),
    ("key", "rotate"): of("NewKeyAnswer"),
    ("limits", "show"): {
        "type": "object",
        "properties": {
            "sandboxID": TEXT,
            "network": {"type": "object", "additionalProperties": WHOLE},
            "disk": {"type": "object", "additionalProperties": WHOLE},
        },
        "required": ["sandboxID"],
        "additionalProperties": False,
    },
    ("list",): many(of("ListedSandbox")),
    ("logs",): of("EntryAnswer"),
    ("metrics",): many(of("MetricAnswer")),
    ("network", "show"): {
        **of("NetworkConfig"),
        "properties": {"sandboxID": TEXT, "allowInternetAccess": {"type": ["boolean", "null"]}},
        "required": ["sandboxID", "allowInternetAccess"],
    },
    ("node", "status"): record(
        {"running": FLAG, "home": TEXT},
        {"url": TEXT, "pid": WHOLE, "service": MAYBE_TEXT, "log": TEXT, "sandboxes": WHOLE},
    ),
    ("operations",): many(of("OperationAnswer")),
    ("pull",): record(
        {"image": TEXT, "digest": TEXT, "disk_mib": WHOLE, "size_bytes": WHOLE, "rootfs": TEXT}
    ),
    ("show",): of("SandboxDetail"),
    ("snapshot", "create"): of("SnapshotAnswer"),
    ("snapshot", "list"): many(of("SnapshotAnswer")),
    ("snapshot", "show"): of("SnapshotDetail"),
    ("snapshot", "tree"): of("TreeAnswer"),
    ("template", "list"): many(of("TemplateAnswer")),
    ("template", "show"): of("TemplateAnswer"),
    ("version",): record(
        {
            "aenv": TEXT,
            "node": {"anyOf": [record({"url": TEXT, "version": MAYBE_TEXT}), {"type": "null"}]},
        }
    ),
}

LINES = frozenset({("events",), ("logs",)})
"""Those that print an object on each line, as it comes; so does `metrics --watch`."""
