"""The certificate that the node serves: where it comes from, and its replacement while connections go on."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from agentenv.config import Settings
from agentenv.errors import AenvError, InvalidRequest

log = logging.getLogger(__name__)

NEAR = timedelta(days=7)


class CertificateUnusable(InvalidRequest):
    """The certificate or its key cannot be served."""

    code = "certificate"


class Source(Protocol):
    """Where the certificate comes from."""

    def read(self) -> bytes:
        """Key and certificate chain in force now (PEM).

        Raises:
            AenvError: there is none to be had; the message says why.
        """


@dataclass(frozen=True)
class Given:
    """Files that somebody else keeps, such as an ACME client."""

    certificate: Path
    key: Path

    def read(self) -> bytes:
        """See `Source.read`."""
        try:
            return self.key.read_bytes() + b"\n" + self.certificate.read_bytes()
        except OSError as error:
            raise CertificateUnusable(
                f"the certificate cannot be read: {error.filename}: {error.strerror}",
                remedy="AENV_TLS_CERT, AENV_TLS_KEY",
            ) from error


@dataclass(frozen=True)
class Local:
    """The authority that `aenv setup --local-ca` made."""

    directory: Path
    domain: str

    def read(self) -> bytes:
        """See `Source.read`. A certificate that ends soon is replaced by a new one."""
        from agentenv.tls import authority

        return authority.leaf(self.directory, self.domain, datetime.now(UTC))


def source_of(settings: Settings) -> Source | None:
    """Where the node's certificate comes from; None when it has none and speaks no TLS.

    Raises:
        InvalidRequest: only one of certificate and key is given.
    """
    if settings.tls_cert is not None and settings.tls_key is not None:
        return Given(settings.tls_cert, settings.tls_key)
    if settings.tls_cert is not None or settings.tls_key is not None:
        raise CertificateUnusable("certificate and key go together", remedy="AENV_TLS_CERT, AENV_TLS_KEY")
    if (settings.tls_dir / "ca.key").exists():
        return Local(settings.tls_dir, settings.domain_name)
    return None


class Served:
    """A context for servers that goes on with new certificates; connections under way keep theirs.

    Args:
        source: where they come from.
        domain: that they should be for.

    Raises:
        AenvError: the first one cannot be served.
    """

    def __init__(self, source: Source, domain: str) -> None:
        self._source = source
        self._domain = domain
        self._refused = b""
        self._pem = source.read()
        self.context = _context()
        _load(self.context, self._pem)
        self._look_at()

    def refresh(self) -> bool:
        """Serve another certificate if there is one; true if so. One that cannot be served is told in
        the log, and the last one stays."""
        try:
            pem = self._source.read()
            if pem in (self._pem, self._refused):
                return False
            self._refused = pem
            _load(_context(), pem)  # half a pair must not get into the context that serves
            _load(self.context, pem)
        except AenvError as error:
            log.warning("the TLS certificate stays as it was: %s", error)
            return False
        self._pem, self._refused = pem, b""
        log.info("another TLS certificate is served from now on")
        self._look_at()
        return True

    def _look_at(self) -> None:
        from agentenv.tls import authority

        try:
            end = authority.end_of(self._pem)
            covers = authority.covers(self._pem, self._domain)
        except ValueError as error:  # OpenSSL, which serves it, is less strict
            log.warning("the TLS certificate cannot be looked at: %s", error)
            return
        if end - datetime.now(UTC) < NEAR:
            log.warning("the TLS certificate ends at %s", end.isoformat())
        if not covers:
            log.warning(
                "the TLS certificate is not for *.%s: clients will refuse sandboxes' names", self._domain
            )


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Have a context serve this key and chain.

    Raises:
        CertificateUnusable: they are no such, or do not belong together.
    """
    try:
        with _as_file(pem) as path:
            context.load_cert_chain(path, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise CertificateUnusable(f"the TLS certificate cannot be served: {reason}") from error


def _no_password() -> str:
    raise ValueError("its key is encrypted")


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path under which OpenSSL, which takes nothing else, reads these bytes; no file is made."""
    descriptor = os.memfd_create("certificate")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
