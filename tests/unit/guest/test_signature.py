"""Signed URLs, against the client that makes them."""

from __future__ import annotations

import pytest
from e2b.sandbox.signature import get_signature
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest import signature

TOKEN = "secret"


def _refusal(**changed: object) -> str | None:
    arguments: dict[str, object] = {
        "token": TOKEN,
        "header": None,
        "path": "/a",
        "operation": "read",
        "user": None,
        "signature": None,
        "expiration": None,
    }
    return signature.refusal(**(arguments | changed))  # type: ignore[arg-type]


@given(path=st.text(st.characters(codec="utf-8")), user=st.none() | st.text("abcü"))
def test_signs_as_the_client_does(path: str, user: str | None) -> None:
    theirs = get_signature(path, "write", user, TOKEN)["signature"]
    assert signature.sign(path, "write", user or "", TOKEN) == theirs


def test_expiration_is_part_of_the_signature() -> None:
    theirs = get_signature("/a", "read", None, TOKEN, 60)
    until = theirs["expiration"]
    assert _refusal(signature=theirs["signature"], expiration=str(until)) is None
    assert _refusal(signature=theirs["signature"]) == "invalid signature"
    assert _refusal(signature=theirs["signature"], expiration=str(until), now=until) is None
    late = _refusal(signature=theirs["signature"], expiration=str(until), now=until + 1)  # type: ignore[operator]
    assert late == "signature is already expired"


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"token": None}, None),
        ({"header": TOKEN}, None),
        ({"header": "other"}, "access token present in header but does not match"),
        ({"header": "ö"}, "access token present in header but does not match"),
        ({}, "missing signature query parameter"),
        ({"signature": "v1_x"}, "invalid signature"),
        ({"signature": "ö"}, "invalid signature"),
        ({"signature": "v1_x", "expiration": "soon"}, "invalid signature"),
    ],
)
def test_refusals(changed: dict[str, object], refusal: str | None) -> None:
    assert _refusal(**changed) == refusal


@pytest.mark.parametrize("changed", [{"path": "/b"}, {"operation": "write"}, {"user": "root"}])
def test_a_signature_is_for_one_operation_of_one_user_on_one_path(changed: dict[str, object]) -> None:
    signed = signature.sign("/a", "read", "", TOKEN)
    assert _refusal(signature=signed) is None
    assert _refusal(signature=signed, **changed) == "invalid signature"
