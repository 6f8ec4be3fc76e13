"""Compressed answers unpacked as they come: cuts, false labels, bombs; and their first event."""

from __future__ import annotations

import gzip
import zlib
from collections import deque
from collections.abc import AsyncIterator

import brotli
import pytest
import zstandard

from gateway.errors import UpstreamMalformed
from gateway.inflating import MOST_SWOLLEN, Inflating
from gateway.opening import read_opening
from tests.sim.loop import run

TEXT = "".join(f'data: {{"n":{n},"t":"é京🌍"}}\n\n' for n in range(40)).encode()


def _bare(text: bytes) -> bytes:
    flate = zlib.compressobj(wbits=-15)
    return flate.compress(text) + flate.flush()


PACKED = {
    "gzip": gzip.compress(TEXT),
    "gzip of two members": gzip.compress(TEXT[:500]) + gzip.compress(TEXT[500:]),
    "x-gzip": gzip.compress(TEXT),
    "deflate": zlib.compress(TEXT),
    "deflate without a wrapper": _bare(TEXT),
    "br": brotli.compress(TEXT),
    "zstd": zstandard.compress(TEXT),
    "zstd of two frames": zstandard.compress(TEXT[:500]) + zstandard.compress(TEXT[500:]),
}


@pytest.mark.parametrize("name", PACKED)
def test_whatever_the_cuts_the_text_comes_out_whole(name: str) -> None:
    packed = PACKED[name]
    for size in (1, 2, 7, 64, len(packed)):
        inflating = Inflating(name.split()[0])
        pieces = [packed[at : at + size] for at in range(0, len(packed), size)]
        assert b"".join(inflating.feed(piece) for piece in pieces) == TEXT
        assert inflating.readable


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_a_false_label_is_unreadable_and_raises_nothing(coding: str) -> None:
    inflating = Inflating(coding)
    for _ in range(3):
        assert inflating.feed(b"\xffdata: {}\n\n" * 100) == b""
    assert not inflating.readable


@pytest.mark.parametrize("coding", ["gzip, br", "compress", "lzma"])
def test_an_unknown_coding_is_unreadable_from_the_start(coding: str) -> None:
    inflating = Inflating(coding)
    assert not inflating.readable
    assert inflating.feed(b"x") == b""


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd"])
def test_a_piece_that_swells_beyond_the_bound_ends_the_reading(coding: str) -> None:
    pack = {"gzip": gzip.compress, "br": brotli.compress, "zstd": zstandard.compress}[coding]
    inflating = Inflating(coding)
    assert inflating.feed(pack(b" " * (MOST_SWOLLEN + 1))) == b""
    assert not inflating.readable


@pytest.mark.parametrize(
    "sent", [[], [b": hi\n\n"], [b"retry: 5\n\n", b": x\n"], [b"\xef\xbb\xbf"]]
)
def test_a_stream_that_ends_before_any_event_is_no_answer(sent: list[bytes]) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in sent:
            yield piece

    async def main() -> None:
        with pytest.raises(UpstreamMalformed) as found:
            await read_opening(deque(), chunks())
        assert found.value.code == "empty_stream"

    run(main())


def test_an_only_event_without_its_blank_line_is_passed_on() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'data: {"choices":[]}'

    async def main() -> None:
        first: deque[bytes] = deque()
        assert await read_opening(first, chunks()) is None
        assert list(first) == [b'data: {"choices":[]}']

    run(main())


@pytest.mark.parametrize(
    ("coding", "sent", "taken", "said"),
    [
        ("gzip", [gzip.compress(b'data: {"error":{"message":"busy"}}\n\n'), b""], 1, True),
        ("br", [brotli.compress(b'data: {"choices":[]}\n\n'), b"later"], 1, False),
        ("zstd", [b"no zstd at all", b"later"], 1, False),
        ("lzma", [b"unknown", b"later"], 0, False),
    ],
)
def test_the_first_event_of_a_compressed_stream_is_read_and_no_more(
    coding: str, sent: list[bytes], taken: int, said: bool
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in sent:
            yield piece

    async def main() -> None:
        first: deque[bytes] = deque()
        error = await read_opening(first, chunks(), coding)
        assert list(first) == sent[:taken]
        assert (error is not None) is said

    run(main())
