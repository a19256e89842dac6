"""What there is to do on clients, so that they reach sandboxes by name and trust the local authority."""

from __future__ import annotations

from agentenv.config import Settings

HTTPS = 443


def advice(settings: Settings) -> str:
    """The steps, as a text for people; docs/guides/tls.md says more."""
    path = settings.tls_dir / "ca.pem"
    domain = settings.domain_name
    store = "/usr/local/share/ca-certificates/aenv.crt"
    lines = [
        f"The node serves https from its next start on. For {domain} and all names below it, trust {path}:",
        f"  system, Debian and Ubuntu   cp {path} {store}; update-ca-certificates",
        f"  one Python program          SSL_CERT_FILE={path}",
        f"  one Node program            NODE_EXTRA_CA_CERTS={path}",
        f"All names below {domain} must lead to this host: a wildcard record, or dnsmasq with",
        f"  address=/{domain}/ADDRESS",
    ]
    if settings.tls_port not in (0, HTTPS) and ":" not in settings.domain:
        lines.append(f"Clients learn the port from the domain: set AENV_DOMAIN={domain}:{settings.tls_port}.")
    return "\n".join(lines)
