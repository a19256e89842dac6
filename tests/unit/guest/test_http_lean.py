"""JSON through the C halves of the standard module says and reads what the module does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest import lean

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_writing_and_reading(value: Any) -> None:
    data = lean.dump_json(value)
    assert data == json.dumps(value, separators=(",", ":")).encode()
    assert lean.load_json(data) == value
    assert lean.load_json(b" \r\n\t" + data + b"\n") == value


@given(st.binary(max_size=30) | st.text('{}[]",:0123456789.eE+-truefalsn\\u \n', max_size=20).map(str.encode))
def test_anything_is_read_or_refused_as_by_the_module(data: bytes) -> None:
    try:
        expected = json.loads(data.decode())
    except ValueError:
        with pytest.raises(ValueError):
            lean.load_json(data)
    else:
        assert repr(lean.load_json(data)) == repr(expected)


def test_constants_and_depth() -> None:
    assert math.isnan(lean.load_json(b"NaN"))
    with pytest.raises(RecursionError):
        lean.load_json(b"[" * 100_000)
    with pytest.raises(TypeError, match="object has no form in JSON"):
        lean.dump_json([object()])
