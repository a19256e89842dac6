"""Which certificate is served, and what happens when its files change."""

from __future__ import annotations

import logging
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from agentenv.config import Settings
from agentenv.errors import InvalidRequest
from agentenv.tls import authority
from agentenv.tls.serving import CertificateUnusable, Given, Local, Served, source_of


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """A pair of files, as an ACME client would keep them."""
    pair = Given(tmp_path / "fullchain.pem", tmp_path / "privkey.pem")
    renew(pair, tmp_path)
    return pair


def renew(pair: Given, tmp_path: Path, domain: str = "box.test", *, half: bool = False) -> None:
    shutil.rmtree(tmp_path / "acme", ignore_errors=True)
    authority.establish(tmp_path / "acme", domain)
    pem = authority.leaf(tmp_path / "acme", domain, datetime.now(UTC))
    key, certificate = pem.split(b"-----BEGIN CERT")
    pair.certificate.write_bytes(b"-----BEGIN CERT" + certificate)
    if not half:
        pair.key.write_bytes(key)


def test_where_it_comes_from(tmp_path: Path, given: Given) -> None:
    home = tmp_path / "home"
    home.mkdir()
    settings = Settings(home=home, domain="Box.test:8443")
    assert source_of(settings) is None
    authority.establish(settings.tls_dir, settings.domain_name)
    assert source_of(settings) == Local(home / "tls", "box.test")
    both = Settings(home=home, domain="box.test", tls_cert=given.certificate, tls_key=given.key)
    assert source_of(both) == given
    with pytest.raises(InvalidRequest, match="go together"):
        source_of(Settings(home=home, tls_cert=given.certificate))


def test_a_new_pair_is_served_once_it_is_whole(
    tmp_path: Path, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(given, "box.test")
    context = served.context
    assert served.refresh() is False
    renew(given, tmp_path, half=True)
    for _ in range(3):
        assert served.refresh() is False
    assert caplog.text.count("KEY_VALUES_MISMATCH") == 1  # told once, not at every look
    renew(given, tmp_path)
    assert served.refresh() is True
    assert served.context is context  # servers that listen have it
    given.key.unlink()
    assert served.refresh() is False
    assert "privkey.pem: No such file" in caplog.text


def test_what_cannot_be_served_is_told_at_the_start(tmp_path: Path, given: Given) -> None:
    key = load_pem_private_key(given.key.read_bytes(), None)
    locked = BestAvailableEncryption(b"secret")
    given.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    with pytest.raises(CertificateUnusable, match="its key is encrypted"):
        Served(given, "box.test")
    given.key.write_bytes(b"nothing")
    with pytest.raises(CertificateUnusable, match="cannot be served"):
        Served(given, "box.test")
    with pytest.raises(CertificateUnusable, match=r"absent\.pem: No such file") as refusal:
        Served(Given(tmp_path / "absent.pem", given.key), "box.test")
    assert "AENV_TLS_CERT" in str(refusal.value)


def test_one_for_other_names_is_told(tmp_path: Path, given: Given, caplog: pytest.LogCaptureFixture) -> None:
    renew(given, tmp_path, "other.test")
    Served(given, "box.test")
    assert "is not for *.box.test" in caplog.text


def test_one_that_ends_soon_is_told(
    given: Given, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.tls.serving.NEAR", authority.LIFE * 2)
    Served(given, "box.test")
    assert "the TLS certificate ends at" in caplog.text


def test_the_local_one_is_renewed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority.establish(tmp_path / "tls", "box.test")
    served = Served(Local(tmp_path / "tls", "box.test"), "box.test")
    first = x509.load_pem_x509_certificate((tmp_path / "tls/node.pem").read_bytes())
    assert served.refresh() is False
    monkeypatch.setattr("agentenv.tls.authority.RENEWED_BEFORE_END", authority.LIFE)
    assert served.refresh() is True
    second = x509.load_pem_x509_certificate((tmp_path / "tls/node.pem").read_bytes())
    assert second.serial_number != first.serial_number
    assert "another TLS certificate is served" in caplog.text
