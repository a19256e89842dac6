"""Which hosts services may be told."""

from __future__ import annotations

import pytest

from agentenv.errors import InvalidRequest
from agentenv.sandbox.masking import check, masked


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        ("localhost", b"localhost"),
        ("localhost:${PORT}", b"localhost:8080"),
        ("port-${PORT}.example.com:443", b"port-8080.example.com:443"),
        ("[::1]:${PORT}", b"[::1]:8080"),
        ("127.0.0.1:3000", b"127.0.0.1:3000"),
    ],
)
def test_names_and_addresses(mask: str, told: bytes) -> None:
    check(mask)
    assert masked(mask, 8080) == told


@pytest.mark.parametrize(
    "mask",
    [
        "-https://abcd",
        "a b",
        "a\r\nX: y",
        "a\n",
        "a\x00",
        "a/b",
        "user@host",
        "bücher.example",
        ":80",
        "a:b",
        "a:123456",
        "a:80:80",
        "${port}",
        "${PORT",
        "[::1",
        ".",
        "a" * 300,
    ],
)
def test_nonsense(mask: str) -> None:
    with pytest.raises(InvalidRequest, match="maskRequestHost"):
        check(mask)
