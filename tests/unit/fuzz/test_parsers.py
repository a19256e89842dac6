"""Readers of what guests, clients, registries and files say: any bytes give a value or their own error.

Texts are made of what their grammars are made of, so that more than the first check is reached.
AENV_FUZZ_EXAMPLES, a number for each, makes it longer and different each time.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import subprocess
import tarfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import AenvError, InvalidRequest, StoreCorrupt
from agentenv.guest import connect, files_multipart, http
from agentenv.guest.connect import ConnectError
from agentenv.guest.files_multipart import MultipartError
from agentenv.guest.http import HttpError
from agentenv.image import container, oci, streams
from agentenv.network import messages
from agentenv.proxy import head as heads
from agentenv.proxy import routing
from agentenv.proxy.framing import Malformed
from agentenv.sandbox import records
from agentenv.vmm import layer
from agentenv.vmm.pagemap import Identity, segments_in

EXAMPLES = int(os.environ.get("AENV_FUZZ_EXAMPLES", "0"))
budget = settings(max_examples=EXAMPLES or 150, derandomize=not EXAMPLES, database=None)


def text_of(*words: bytes, most: int = 24) -> st.SearchStrategy[bytes]:
    """Bytes of words of a grammar and some of none."""
    return st.lists(st.sampled_from(words) | st.binary(max_size=4), max_size=most).map(b"".join)


HEADS = text_of(
    *(b"GET", b"POST", b"CONNECT", b"OPTIONS", b" ", b"/", b"*", b"http://a/", b"?x=%zz&y", b"HTTP/1.1"),
    *(b"\r\n", b"\n", b": ", b":", b"\t", b"Host: 49983-abc.localhost\r\n", b"Content-Length", b"0"),
    *(b"Transfer-Encoding: chunked\r\n", b"Connection: close, x\r\n", b"X: y\r\n", b"HTTP/1.", b"101"),
    *(b"E2b-Sandbox-Id: abc\r\n", b"E2b-Sandbox-Port: 80\r\n", b"200 OK", b"/proxy/abc/80/"),
    b"Content-Length: " + b"9" * 5000 + b"\r\n",
)
REQUESTS = HEADS | HEADS.map(lambda rest: b"POST /files HTTP/1.1\r\nHost: x\r\n" + rest + b"\r\n")
ANSWERS = HEADS | HEADS.map(lambda rest: b"HTTP/1.1 200 OK\r\n" + rest + b"\r\n")
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
MULTIPART = text_of(
    *(b"--b", b"--b--", b"\r\n", b"\r\n\r\n", b"Content-Disposition: form-data; ", b'name="file"', b";"),
    *(b'filename="a', b'\\"', b"Content-Type: x", b": ", b"--", b"-", b"data" * 9),
)
MESSAGES = text_of(
    *(b"{", b"}", b"[" * 3000, b'"process"', b":", b",", b"1e999", b"null", b'"\\ud800"', b"9" * 5000)
)
DOCUMENTS = JSON.map(lambda value: repr(value).encode()) | text_of(
    *(b"[", b"{", b'"Config"', b":", b'"Layers"', b"]", b"[" * 3000, b"9" * 5000)
)
DNS = st.binary(max_size=64) | st.builds(
    lambda start, labels, end: start + labels + end,
    st.binary(min_size=12, max_size=12),
    st.lists(st.sampled_from([b"\x01a", b"\x3f", b"\xc0\x0c", b"\x00", b"\x03a.b", b"\xff"])).map(b"".join),
    st.binary(max_size=8),
)


@budget
@given(REQUESTS)
def test_heads_of_requests_at_the_front(raw: bytes) -> None:
    try:
        head = heads.parse_request(raw)
        heads.request_body(head)
        routing.decide(head, "localhost:8000")
    except InvalidRequest:
        return
    assert head.path.startswith(b"/") or head.path == b"*"
    assert not {b"\r", b"\n", b" "} & {head.path[at : at + 1] for at in range(len(head.path))}


@budget
@given(ANSWERS)
def test_heads_of_answers_at_the_front(raw: bytes) -> None:
    try:
        heads.answer_body(heads.parse_answer(raw), b"GET")
    except Malformed:
        pass


@budget
@given(REQUESTS)
def test_heads_at_the_agent(raw: bytes) -> None:
    try:
        request = http.parse_head(raw.rstrip(b"\r\n"))
        http.body_framing(request.headers)
        _ = request.path, request.query
        connect.keepalive_interval(request)
        connect.timeout_of(request)
    except (HttpError, ConnectError):
        pass


@budget
@given(MESSAGES)
def test_messages_at_the_agent(raw: bytes) -> None:
    try:
        assert isinstance(connect.parse_message(raw), dict)
    except ConnectError:
        pass


@budget
@given(st.dictionaries(st.sampled_from(["name", "aName", "a_name"]), JSON | st.just("9" * 5000)))
def test_fields_of_messages_at_the_agent(message: dict[str, Any]) -> None:
    readers: list[Callable[[dict[str, Any], str], object]] = [
        connect.text_field,
        connect.flag_field,
        connect.int_field,
        connect.object_field,
        connect.bytes_field,
    ]
    for read in readers:
        for name in ("name", "aName"):
            try:
                read(message, name)
            except ConnectError:
                pass


@budget
@given(MULTIPART, st.integers(1, 40))
def test_uploads_of_forms_at_the_agent(body: bytes, step: int) -> None:
    parser = files_multipart.MultipartParser("b")
    given_back = 0
    try:
        for at in range(0, len(body), step):
            given_back += sum(
                len(each) for each in parser.feed(body[at : at + step]) if isinstance(each, bytes)
            )
    except MultipartError:
        pass
    assert given_back <= len(body)


@budget
@given(DNS)
def test_questions_and_answers_of_names(raw: bytes) -> None:
    if len(raw) >= messages.HEADER:
        messages.asked(raw)
        assert len(messages.failure(raw, 2)) >= messages.HEADER
        messages.forbidden(raw)
        messages.answers(raw, raw)


@cache
def tarball() -> bytes:
    """One with members of many kinds."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("f" * 120, tarfile.REGTYPE), ("l", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "d" if kind == tarfile.SYMTYPE else ""
            member.size = 700 if kind == tarfile.REGTYPE else 0
            member.pax_headers = {"SCHILY.xattr.user.x": "1", "GNU.sparse.map": "0,1,600,100"}
            tar.addfile(member, io.BytesIO(bytes(700)))
    return file.getvalue()


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-c"], input=data, capture_output=True, check=True).stdout


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstd": zstd,
}


def damaged(data: bytes, seed: int) -> bytes:
    """The bytes with some changed, doubled or cut."""
    chance = random.Random(seed)
    found = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(found))
        match chance.randrange(4):
            case 0:
                found[at] = chance.randrange(256)
            case 1:
                found[at : at + 8] = bytes(chance.choices(b"0127\xff\x80 ", k=8))
            case 2:
                found[at:at] = found[at : at + chance.randrange(600)]
            case _:
                del found[max(1, at) :]
    return bytes(found)


def read_whole(data: bytes) -> None:
    with (
        streams.read_faults("the layer"),
        streams.decompressed(io.BytesIO(data)) as plain,
        streams.tar_stream(plain) as tar,
    ):
        for member in streams.members(tar):
            while member.isfile() and streams.content(tar, member).read(65536):
                pass


@pytest.mark.parametrize("packing", PACKINGS)
def test_layers_of_images(packing: str) -> None:
    whole = PACKINGS[packing](tarball())
    for seed in range(EXAMPLES or (12 if packing == "zstd" else 80)):
        try:
            read_whole(damaged(whole, seed))
        except AenvError:
            pass


@budget
@given(DOCUMENTS)
def test_documents_of_images(raw: bytes) -> None:
    for read in (container.saved_entries, lambda data: oci.parse_object(data, "it")):
        try:
            read(raw)
        except AenvError:
            pass


@budget
@given(JSON)
def test_descriptors_of_images(value: Any) -> None:
    for read in (oci.descriptor, lambda each: oci.manifest({"layers": each, "config": each}, "sha256:0")):
        try:
            read(value)
        except AenvError:
            pass


@budget
@given(st.integers(0, 10**6))
def test_maps_of_memory(seed: int) -> None:
    whole = layer.encode_map(np.arange(3, 90, 2, dtype=np.uint32), 100)
    try:
        pages, total = layer.decode_map(damaged(whole, seed))
    except ValueError:
        return
    assert total == 100 and len(pages) <= total


@budget
@given(text_of(b"7f00-7f10 r--p 0000 fe:00 12 /x\n", b"-", b" ", b"0", b"\n", b"fe:00", b"\xff"))
def test_maps_of_processes(raw: bytes) -> None:
    segments_in(raw.decode(errors="replace"), Identity(0, 12))


@budget
@given(text_of(b"{", b"}", b'"id"', b":", b",", b"[" * 3000, b"null", b'"state"'))
def test_records_of_sandboxes(raw: bytes) -> None:
    try:
        records.decode(raw.decode(errors="replace"))
    except StoreCorrupt:
        pass
