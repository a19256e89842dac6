"""Form bodies, in every way in which the network can cut them."""

from __future__ import annotations

import email.message

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest.files_multipart import MultipartError, MultipartParser, Part, parameters


def _parse(body: bytes, boundary: str, sizes: list[int] | None = None) -> list[tuple[Part, bytes]]:
    parser = MultipartParser(boundary)
    parts: list[tuple[Part, bytes]] = []
    sizes = list(sizes or [])
    while body:
        size = max(1, sizes.pop(0)) if sizes else len(body)
        for item in parser.feed(body[:size]):
            if isinstance(item, Part):
                parts.append((item, b""))
            else:
                part, content = parts[-1]
                parts[-1] = (part, content + item)
        body = body[size:]
    assert parser.finished
    return parts


def _form(*files: tuple[str, bytes]) -> tuple[bytes, str]:
    """A body as the Python SDK's HTTP library makes it."""
    request = httpx.Request("POST", "http://x", files=[("file", (name, content)) for name, content in files])
    kind = request.headers["content-type"]
    return request.read(), kind.partition("boundary=")[2]


@given(
    contents=st.lists(
        st.binary(max_size=80) | st.sampled_from([b"\r\n", b"\r\n--", b"\r", b"--b\r\n"]), max_size=3
    ),
    sizes=st.lists(st.integers(1, 40), max_size=60),
)
def test_content_is_the_same_however_it_arrives(contents: list[bytes], sizes: list[int]) -> None:
    files = [(f"/dir/{number}", content) for number, content in enumerate(contents)]
    if not files:
        return
    body, boundary = _form(*files)
    parts = _parse(body, boundary, sizes)
    assert [(part.filename, content) for part, content in parts] == files
    assert {part.name for part, _ in parts} == {"file"}


@given(
    sizes=st.lists(st.integers(1, 5), max_size=80),
    near=st.sampled_from([b"\r\n--B", b"\r\n--", b"\r\n-", b"\r\n--Bx\r\n"]),
)
def test_what_only_looks_like_a_delimiter_is_content(sizes: list[int], near: bytes) -> None:
    content = b"x" + near + b"y" + near
    body = b'--BB\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + content + b"\r\n--BB--\r\n"
    assert _parse(body, "BB", sizes)[0][1] == content


def test_a_delimiter_followed_by_something_else_is_content() -> None:
    body = b"--B\r\n\r\na\r\n--Bx\r\nb\r\n--B \t\r\n\r\nc\r\n--B--trailing"
    assert [content for _, content in _parse(body, "B")] == [b"a\r\n--Bx\r\nb", b"c"]


def test_preamble_and_epilogue_are_nobodys() -> None:
    head = b"Content-Disposition: form-data; name=file"
    body = b"before\r\n--B\r\n" + head + b"\r\n\r\nin\r\n--B--\r\nafter\r\n--B\r\n\r\nx"
    parts = _parse(body, "B", [3, 4, 5, 6])
    assert [(part.name, content) for part, content in parts] == [("file", b"in")]


def test_an_empty_part() -> None:
    assert [content for _, content in _parse(b"--B\r\nA: b\r\n\r\n\r\n--B--", "B")] == [b""]


def test_a_form_cut_short_is_not_finished() -> None:
    body, boundary = _form(("a", b"content"))
    parser = MultipartParser(boundary)
    list(parser.feed(body[:-6]))
    assert not parser.finished


@pytest.mark.parametrize("boundary", ["", "b" * 300])
def test_unusable_boundaries(boundary: str) -> None:
    with pytest.raises(MultipartError):
        MultipartParser(boundary)


def test_a_head_without_end_is_refused_in_bounded_memory() -> None:
    parser = MultipartParser("B")
    list(parser.feed(b"--B\r\n"))
    with pytest.raises(MultipartError, match="head is larger"):
        for _ in range(100):
            list(parser.feed(b"X: " + b"y" * 1000))


def test_content_does_not_pile_up() -> None:
    parser = MultipartParser("B")
    list(parser.feed(b"--B\r\n\r\n"))
    for _ in range(10):
        given_back = b"".join(item for item in parser.feed(b"z" * 10000) if isinstance(item, bytes))
        assert len(given_back) == 10000


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('form-data; name="file"; filename="/a/b c.txt"', {"name": "file", "filename": "/a/b c.txt"}),
        ("form-data;name=file;filename=x", {"name": "file", "filename": "x"}),
        (r'form-data; filename="a\"b\\c"', {"filename": 'a"b\\c'}),
        (r'form-data; filename="C:\dir\file"', {"filename": r"C:\dir\file"}),
        ("form-data; filename=\"x\"; filename*=utf-8''%C3%BC%20y", {"filename": "ü y"}),
        ('form-data; filename="semi;colon=1"; name="f"', {"filename": "semi;colon=1", "name": "f"}),
        ("form-data", {}),
        ("form-data; lonely", {}),
    ],
)
def test_parameters(header: str, expected: dict[str, str]) -> None:
    assert parameters(header) == ("form-data", expected)


@given(st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1))
def test_quoted_values_are_read_as_the_standard_library_writes_them(value: str) -> None:
    message = email.message.Message()
    message.add_header("X", "form-data", name=value)
    written = message["X"]
    if '"' in written:
        assert parameters(written)[1]["name"] == value


def test_an_endless_quotation_is_refused() -> None:
    with pytest.raises(MultipartError):
        parameters('form-data; name="x')
