"""What every guest is given of the network that the node is in: proxies, variables, certificates.

Where a host reaches the world through a proxy, or a proxy opens TLS with a certificate authority of its own,
guests could not install a package without the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentenv.config import Settings
from agentenv.errors import InvalidRequest
from agentenv.network.opened import guest_proxies
from agentenv.sandbox.agent import Identity


@dataclass(frozen=True)
class Surroundings:
    """`env` are variables that a guest's own ones win over; `ca_bundle` is PEM text; `ipv6`
    says whether guests have IPv6, None that they keep what they have."""

    env: Mapping[str, str] = field(default_factory=dict)
    ca_bundle: str | None = None
    ipv6: bool | None = None

    @classmethod
    def of(
        cls, settings: Settings, environment: Mapping[str, str] = os.environ, *, ipv6: bool | None = None
    ) -> Surroundings:
        """Those of a node whose process has that environment.

        Raises:
            InvalidRequest: the certificates of the settings cannot be read.
        """
        env = {**guest_proxies(settings, environment), **settings.guest_env}
        return cls(env, _certificates(settings), ipv6)

    def around(self, identity: Identity) -> Identity:
        """What a guest is told in these surroundings. One that is not told all knows it already, but for
        what may be another on this start of the node."""
        identity = replace(identity, ipv6=self.ipv6)
        if identity.env is None:
            return identity
        return replace(identity, env={**self.env, **identity.env}, ca_bundle=self.ca_bundle)


def _certificates(settings: Settings) -> str | None:
    if settings.ca_file is None:
        return None
    try:
        text = settings.ca_file.read_text()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"settings: ca_file {settings.ca_file} cannot be read: {error}") from error
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise InvalidRequest(
            f"settings: there is no certificate in {settings.ca_file}", remedy="give certificates as PEM"
        )
    return text
