"""A certificate authority of this node's own, and the certificate that it issues for the node's domain.

The authority is good for that domain and this host's own names alone (RFC 5280, 4.2.1.10): whoever trusts
it trusts it for nothing else, even if its key is stolen. Imported only where it is used: `cryptography`
takes 50 ms.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agentenv.errors import HostFault, InvalidRequest, StoreCorrupt

AUTHORITY_LIFE = timedelta(days=3650)
LIFE = timedelta(days=30)
RENEWED_BEFORE_END = timedelta(days=10)
BACKDATED = timedelta(hours=1)  # for clients whose clock is behind

CERTIFICATE, KEY, LEAF = "ca.pem", "ca.key", "node.pem"

_LABEL = r"(?!-)[a-z0-9-]{1,63}(?<!-)"
# OpenSSL takes `*.localhost` for no wildcard: two labels must follow the star.
_DOMAIN = re.compile(rf"(?=.{{1,180}}$){_LABEL}(?:\.{_LABEL})+")


@dataclass(frozen=True)
class Authority:
    """The authority of a directory: its certificate, its key, and the domain that it is for."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    domain: str


def establish(directory: Path, domain: str) -> bool:
    """Make the authority for a domain, unless the directory has one that is good; true when it was made.

    One for another domain is replaced, since it cannot be used: clients must trust the new one.

    Raises:
        InvalidRequest: no wildcard certificate can be had for that domain.
        HostFault: the files cannot be written.
    """
    if _DOMAIN.fullmatch(domain) is None:
        raise InvalidRequest(
            f"there is no wildcard certificate for {domain}: clients want a name with a dot in lower case",
            remedy="set AENV_DOMAIN, or domain in aenv.toml, to one such as sandbox.test:8443",
        )
    try:
        if load(directory).domain == domain:
            return False
    except (FileNotFoundError, StoreCorrupt):
        pass
    now = datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"AgentENV {domain}")
    authority = (
        _builder(name, name, key, now, AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(x509.NameConstraints(_permitted(domain), None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        _give_to_owner(directory, directory)
        (directory / LEAF).unlink(missing_ok=True)
        _write(directory / KEY, _private(key), 0o600)
        _write(directory / CERTIFICATE, authority.public_bytes(Encoding.PEM), 0o644)
    except OSError as error:
        raise HostFault(f"cannot write the authority into {directory}: {error.strerror}") from error
    return True


def load(directory: Path) -> Authority:
    """The authority of a directory.

    Raises:
        FileNotFoundError: there is none.
        StoreCorrupt: its files are not what they should be.
    """
    try:
        certificate = x509.load_pem_x509_certificate((directory / CERTIFICATE).read_bytes())
        key = load_pem_private_key((directory / KEY).read_bytes(), None)
        allowed = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
        domain = next(
            name.value for name in allowed.permitted_subtrees or () if isinstance(name, x509.DNSName)
        )
    except (ValueError, TypeError, x509.ExtensionNotFound, StopIteration) as error:
        raise StoreCorrupt(
            f"the authority in {directory} cannot be read: {error}",
            remedy="aenv setup --local-ca makes a new one",
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise StoreCorrupt(
            f"key and certificate of the authority in {directory} do not belong together",
            remedy="aenv setup --local-ca makes a new one",
        )
    return Authority(certificate, key, domain)


def issue(authority: Authority, now: datetime) -> bytes:
    """A new key and a certificate for the authority's domain and all names below it (PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    domain = authority.domain
    certificate = (
        _builder(_name(domain), authority.certificate.subject, key, now, LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_names(domain)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    return _private(key) + certificate.public_bytes(Encoding.PEM)


def leaf(directory: Path, domain: str, now: datetime) -> bytes:
    """The node's key and certificate (PEM): the last ones while they are good, else new ones, which are kept.

    Raises:
        FileNotFoundError: there is no authority.
        StoreCorrupt: the authority cannot be used; InvalidRequest: it is for another domain.
        HostFault: a new certificate cannot be written.
    """
    path = directory / LEAF
    try:
        pem = path.read_bytes()
        if not due(x509.load_pem_x509_certificate(pem), now) and covers(pem, domain):
            return pem
    except (FileNotFoundError, ValueError):
        pass
    authority = load(directory)
    if authority.domain != domain:
        raise InvalidRequest(
            f"the authority in {directory} is for {authority.domain}, and the node's domain is {domain}",
            remedy="aenv setup --local-ca makes one for it, which clients have to trust anew",
        )
    pem = issue(authority, now)
    try:
        _write(path, pem, 0o600)
    except OSError as error:
        raise HostFault(f"cannot write {path}: {error.strerror}") from error
    return pem


def due(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether a certificate is to be replaced: it ends soon, or its time has not come."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return not begin <= now < end - RENEWED_BEFORE_END


def covers(pem: bytes, domain: str) -> bool:
    """Whether the first certificate is for all names just below a domain."""
    try:
        names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return False
    return f"*.{domain}" in (name.lower() for name in names.value.get_values_for_type(x509.DNSName))


def end_of(pem: bytes) -> datetime:
    """When the first certificate ends."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
    )


def _permitted(domain: str) -> list[x509.GeneralName]:
    """A name permits all below it as well."""
    return [
        x509.DNSName(domain),
        x509.DNSName("localhost"),
        x509.IPAddress(IPv4Network("127.0.0.0/8")),
        x509.IPAddress(IPv6Network("::1/128")),
    ]


def _names(domain: str) -> list[x509.GeneralName]:
    return [
        x509.DNSName(f"*.{domain}"),
        x509.DNSName(domain),
        x509.DNSName("localhost"),
        x509.IPAddress(IPv4Address("127.0.0.1")),
        x509.IPAddress(IPv6Address("::1")),
    ]


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write in one step, never readable for more than the mode says; it belongs to the directory's owner."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(descriptor, mode)
        _give_to_owner(descriptor, path.parent)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)


def _give_to_owner(file: int | Path, directory: Path) -> None:
    """Root makes files for the owner of the data directory, which is above that of the authority."""
    if os.geteuid() == 0:
        owner = directory.parent.stat()
        os.chown(file, owner.st_uid, owner.st_gid)
