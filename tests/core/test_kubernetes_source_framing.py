"""Bytes cut anywhere come out as they were sent, and what is no HTTP is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.apiclient.framing import (
    Body,
    ChunkedBody,
    Lines,
    ProtocolError,
    SizedBody,
    UnsizedBody,
    parse_head,
)

EXTENSIONS = st.sampled_from([b"", b";x", b' ; name="a;b"'])


@st.composite
def chunked(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A chunked body, and what is in it."""
    payload, wire = b"", b""
    for piece in draw(st.lists(st.binary(min_size=1, max_size=40) | st.just(b"\r\n0\r\n\r\n"), max_size=6)):
        size = draw(st.sampled_from([b"%x", b"%X", b"%04x"])) % len(piece)
        wire += size + draw(EXTENSIONS) + b"\r\n" + piece + b"\r\n"
        payload += piece
    return wire + b"0\r\n" + draw(st.sampled_from([b"", b"Trailer: x\r\n"])) + b"\r\n", payload


@st.composite
def pieces(draw: st.DrawFn, whole: bytes) -> list[bytes]:
    """*whole*, cut at any places."""
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@given(st.data())
def test_a_chunked_body_comes_out_whole(data: st.DataObject) -> None:
    wire, payload = data.draw(chunked())
    body = ChunkedBody()
    assert b"".join([body.feed(piece) for piece in data.draw(pieces(wire))]) == payload
    assert body.ended
    body.close()


@given(st.data())
def test_payload_is_never_held_back(data: st.DataObject) -> None:
    wire, payload = data.draw(chunked())
    cut = data.draw(st.integers(0, len(wire) - 1))
    body = ChunkedBody()
    early = body.feed(wire[:cut])
    assert payload.startswith(early)
    assert not body.ended
    late = body.feed(wire[cut:])
    assert early + late == payload
    with pytest.raises(ProtocolError, match="closed"):
        ChunkedBody().close()


@given(st.lists(st.binary(max_size=30)))
def test_garbage_is_refused_or_taken_but_never_a_crash(parts: list[bytes]) -> None:
    body = ChunkedBody()
    try:
        for part in parts:
            body.feed(part)
        body.close()
    except ProtocolError:
        pass


@pytest.mark.parametrize("wire", [
    b"x\r\n", b"\r\n", b"-1\r\na\r\n", b"+1\r\na\r\n", b"0x1\r\na\r\n", b"1_0\r\n", b" 1\r\na\r\n",
    b"1" * 17 + b"\r\n", b"1\r\nab\r\n", b"1\r\na\n0\r\n\r\n", b"0\r\n\r\nmore", b"1" * 5000,
    b"0\r\nTrailer: " + b"x" * 5000,
], ids=repr)
def test_a_broken_chunk_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        ChunkedBody().feed(wire)


@given(st.data())
def test_lines_come_out_whole(data: st.DataObject) -> None:
    whole = data.draw(st.lists(st.sampled_from([b"a", b"bc", b"\n", b'{"x":1}', b"\r"])).map(b"".join))
    lines = Lines()
    found = [line for piece in data.draw(pieces(whole)) for line in lines.feed(piece)]
    assert found == [line for line in whole.split(b"\n")[:-1] if line]
    assert not lines.take_too_long()


@given(st.data())
def test_a_line_that_is_too_long_is_left_out_and_counted(data: st.DataObject) -> None:
    whole = b"one\n" + b"x" * data.draw(st.integers(40, 200)) + b"\ntwo\n"
    parts = data.draw(pieces(whole + b"y" * 50))
    # A long line is recognised as such once more than the limit of it is held.
    short = [piece for part in parts for piece in re.findall(rb"(?s).{1,10}", part)]
    lines = Lines(limit=20)
    found = [line for piece in short for line in lines.feed(piece)]
    assert found == [b"one", b"two"]
    assert lines.take_too_long() == 2
    assert lines.take_too_long() == 0


HEADS: list[tuple[bytes, int, bool, type[Body]]] = [
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked", 200, True, ChunkedBody),
    (b"HTTP/1.1 200\r\ncontent-length: 7", 200, True, SizedBody),
    (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length:7\r\nConnection: Close", 429, False, SizedBody),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 7", 200, False, SizedBody),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\nConnection: keep-alive", 200, True, SizedBody),
    (b"HTTP/1.1 200 OK", 200, True, UnsizedBody),
    (b"HTTP/1.1 204 No Content", 204, True, SizedBody),
]


@pytest.mark.parametrize(("raw", "status", "persistent", "body"), HEADS)
def test_a_head_tells_the_framing_of_its_body(
    raw: bytes, status: int, persistent: bool, body: type[Body],
) -> None:
    head = parse_head(raw)
    assert (head.status, head.persistent, type(head.body())) == (status, persistent, body)


@pytest.mark.parametrize("raw", [
    b"", b"SSH-2.0-OpenSSH", b"HTTP/2 200", b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\nno colon",
    b"HTTP/1.1 200 OK\r\n: x", b"HTTP/1.1 200 OK\r\nName : x", b"HTTP/1.1 200 OK\r\nContent-Length: -1",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1x", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip",
], ids=repr)
def test_a_broken_head_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_head(raw).body()


def test_a_sized_body_is_neither_shorter_nor_longer() -> None:
    body = SizedBody(3)
    assert (body.feed(b"ab"), body.ended) == (b"ab", False)
    with pytest.raises(ProtocolError, match="too early"):
        body.close()
    assert (body.feed(b"c"), body.ended) == (b"c", True)
    with pytest.raises(ProtocolError, match="after the end"):
        body.feed(b"d")
