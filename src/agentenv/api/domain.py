"""Which domain an answer names. Clients build `{port}-{id}.{domain}` with it, over their own."""

from __future__ import annotations

from agentenv.config import Settings

LOCAL = "localhost"


def advertised(settings: Settings, host: str, port: int) -> str | None:
    """The domain to tell a client that reached the API as `host`.

    A configured domain is always told. Without one, a client that came to `api.DOMAIN` knows its
    domain and is told none; every other is told `localhost:PORT`, which is right on this host
    (curl and browsers resolve `*.localhost` themselves) and keeps it from falling back on E2B's own.
    """
    if settings.domain != LOCAL:
        return settings.domain
    if host.lower().startswith("api."):
        return None
    return f"{LOCAL}:{port}"
