"""The local authority: what it issues is believed for its domain, and for nothing else."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from agentenv.config import Settings
from agentenv.errors import InvalidRequest, StoreCorrupt
from agentenv.tls import authority, trust
from agentenv.tls.authority import CERTIFICATE, KEY, LEAF

DOMAIN = "sandbox.test"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    authority.establish(tmp_path / "tls", DOMAIN)
    return tmp_path / "tls"


def shake_hands(pem: bytes, trusted: Path, name: str, tmp_path: Path) -> None:
    """A handshake in memory, of a client that trusts one authority and asks for `name`."""
    (tmp_path / "served.pem").write_bytes(pem)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(tmp_path / "served.pem")
    client_context = ssl.create_default_context(cafile=trusted)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(back, there, server_hostname=name)
    server = server_context.wrap_bio(there, back, server_side=True)
    steps: list[Callable[[], None]] = [client.do_handshake, server.do_handshake]
    for step in steps * 3:
        try:
            step()
        except ssl.SSLWantReadError:
            continue
    assert client.cipher() is not None


@pytest.mark.parametrize(
    "name", ["49983-iabc.sandbox.test", "api.sandbox.test", "sandbox.test", "localhost", "127.0.0.1", "::1"]
)
def test_a_client_that_trusts_it_believes_the_nodes_names(directory: Path, tmp_path: Path, name: str) -> None:
    pem = authority.leaf(directory, DOMAIN, datetime.now(UTC))
    shake_hands(pem, directory / CERTIFICATE, name, tmp_path)


@pytest.mark.parametrize("name", ["sandbox.test.evil", "a.b.sandbox.test", "example.com", "127.0.0.2"])
def test_other_names_are_not_believed(directory: Path, tmp_path: Path, name: str) -> None:
    pem = authority.leaf(directory, DOMAIN, datetime.now(UTC))
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(pem, directory / CERTIFICATE, name, tmp_path)


def test_a_stolen_key_is_good_for_its_domain_alone(directory: Path, tmp_path: Path) -> None:
    stolen = authority.load(directory)
    forged = authority.issue(
        authority.Authority(stolen.certificate, stolen.key, "bank.example"), datetime.now(UTC)
    )
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
        shake_hands(forged, directory / CERTIFICATE, "www.bank.example", tmp_path)


def test_files_have_their_modes_and_a_second_time_changes_nothing(directory: Path) -> None:
    authority.leaf(directory, DOMAIN, datetime.now(UTC))
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert modes == {CERTIFICATE: 0o644, KEY: 0o600, LEAF: 0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert authority.establish(directory, DOMAIN) is False
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_the_same_certificate_until_it_ends_soon(directory: Path) -> None:
    now = datetime.now(UTC)
    first = authority.leaf(directory, DOMAIN, now)
    certificate = x509.load_pem_x509_certificate(first)
    assert certificate.not_valid_before_utc < now - timedelta(minutes=30)
    assert certificate.not_valid_after_utc <= now + authority.LIFE
    assert authority.leaf(directory, DOMAIN, now + timedelta(days=19)) == first
    later = now + timedelta(days=21)
    second = authority.leaf(directory, DOMAIN, later)
    assert second != first
    assert authority.leaf(directory, DOMAIN, later) == second
    assert authority.leaf(directory, DOMAIN, now - timedelta(days=1)) != second  # a clock that was set back


def test_another_domain_needs_another_authority(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"is for sandbox\.test, and the node's domain is other\.test"):
        authority.leaf(directory, "other.test", datetime.now(UTC))
    old = (directory / CERTIFICATE).read_bytes()
    authority.leaf(directory, DOMAIN, datetime.now(UTC))
    assert authority.establish(directory, "other.test") is True
    assert (directory / CERTIFICATE).read_bytes() != old
    pem = authority.leaf(directory, "other.test", datetime.now(UTC))
    shake_hands(pem, directory / CERTIFICATE, "1-x.other.test", tmp_path)


@pytest.mark.parametrize(
    "domain", ["localhost", "", "-a.test", "a..test", "*.a.test", "A.test", "a.test:1", "ü.de"]
)
def test_a_domain_that_no_wildcard_can_be_for(tmp_path: Path, domain: str) -> None:
    with pytest.raises(InvalidRequest, match="no wildcard certificate") as refusal:
        authority.establish(tmp_path / "tls", domain)
    assert "AENV_DOMAIN" in str(refusal.value)
    assert not (tmp_path / "tls").exists()


@pytest.mark.parametrize("spoiled", [CERTIFICATE, KEY])
def test_spoiled_files_are_told_and_made_anew(directory: Path, tmp_path: Path, spoiled: str) -> None:
    authority.establish(tmp_path / "other", DOMAIN)
    for content in (b"", (tmp_path / "other" / spoiled).read_bytes()):  # nothing, and another one's
        (directory / spoiled).write_bytes(content)
        with pytest.raises(StoreCorrupt) as refusal:
            authority.load(directory)
        assert "setup --local-ca" in str(refusal.value)
        assert authority.establish(directory, DOMAIN) is True
        authority.load(directory)


def test_how_to_trust_it_is_told(tmp_path: Path) -> None:
    told = trust.advice(Settings(home=tmp_path, domain="sandbox.test"))
    for part in (
        f"SSL_CERT_FILE={tmp_path}/tls/ca.pem",
        "NODE_EXTRA_CA_CERTS",
        "update-ca-certificates",
        "address=/sandbox.test/",
        "AENV_DOMAIN=sandbox.test:8443",
    ):
        assert part in told
    assert "set AENV_DOMAIN" not in trust.advice(Settings(home=tmp_path, domain="sandbox.test:8443"))
