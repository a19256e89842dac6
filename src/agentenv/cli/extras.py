"""What a client's installation lacks: the packages of a node, which are an extra of the distribution."""

from __future__ import annotations

from agentenv.errors import HostIncapable

# The names under which the packages of the extra `server` are imported.
SERVER = frozenset(
    {
        "cryptography",
        "dns",
        "fastapi",
        "h11",
        "httptools",
        "idna",
        "numpy",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "starlette",
        "uvicorn",
        "uvloop",
    }
)


def lacking(error: ModuleNotFoundError) -> HostIncapable | None:
    """What to tell of a module that is not there; None where no extra has it, so that it is a bug."""
    package = (error.name or "").partition(".")[0]
    if package not in SERVER:
        return None
    return HostIncapable(
        f"this needs what a node needs, and here is only the client ({package} is not installed)",
        remedy="pip install 'agentenv-server[server]', or --url and --api-key of a node elsewhere",
    )
