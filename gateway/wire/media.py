"""Media in prompts: an image's pixels from its first bytes, and sizes of payloads.

Images are counted by pixels, files by bytes, and neither as text: base64 counted as text makes a
one-megabyte picture seven hundred thousand tokens (BerriAI/litellm#32865). No payload is decoded
whole and nothing is fetched.
"""

from __future__ import annotations

import base64
import struct

from gateway.call import Part, PartKind

_SMALL_PREFIX = 1024
"""Base64 characters that hold the header of PNG, GIF, WebP and of most JPEGs."""

_LARGE_PREFIX = 128 * 1024
"""Base64 characters searched for a JPEG's frame header: cameras put previews before it."""

SHORTEST_LINE = 60
"""Characters of a line of wrapped base64: 64 (PEM) or 76 (MIME)."""

_MAX_SIDE = 1_000_000
"""Pixels; a header that says more is believed by nobody."""


def size_of_image(prefix: bytes) -> tuple[int, int]:
    """Width and height from the first bytes of a PNG, GIF, WebP or JPEG; (0, 0) where unknown."""
    try:
        if prefix.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height = struct.unpack_from(">II", prefix, 16)
        elif prefix.startswith((b"GIF87a", b"GIF89a")):
            width, height = struct.unpack_from("<HH", prefix, 6)
        elif prefix.startswith(b"RIFF") and prefix[8:12] == b"WEBP":
            width, height = _webp(prefix)
        elif prefix.startswith(b"\xff\xd8"):
            width, height = _jpeg(prefix)
        else:
            return 0, 0
    except struct.error:  # the prefix is cut short
        return 0, 0
    if not (0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE):
        return 0, 0
    return width, height


def _webp(prefix: bytes) -> tuple[int, int]:
    kind = prefix[12:16]
    if kind == b"VP8X":
        low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", prefix, 24)
        return 1 + (low_width | high_width << 16), 1 + (low_height | high_height << 16)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", prefix, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", prefix, 26)
    return width & 0x3FFF, height & 0x3FFF


def _jpeg(prefix: bytes) -> tuple[int, int]:
    """From segment to segment up to the frame header (SOF0 to SOF15 without DHT, JPG, DAC)."""
    at = 2
    while at + 9 <= len(prefix):
        if prefix[at] != 0xFF:
            return 0, 0
        marker = prefix[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", prefix, at + 5)
            return width, height
        (length,) = struct.unpack_from(">H", prefix, at + 2)
        at += 2 + max(2, length)
    return 0, 0


def payload_bytes(text: str) -> int:
    """Bytes that a base64 text, or the base64 of a data URL, decodes to."""
    return max(0, len(text) - _start(text)) * 3 // 4


def image(source: object, detail: object = "auto") -> Part:
    """The part of an image given as data URL, bare base64 or link. A link's size is unknown."""
    level = detail if isinstance(detail, str) and len(detail) <= 16 else "auto"
    width = height = 0
    if isinstance(source, str) and not source[:8].lower().startswith(("http:", "https:")):
        start = _start(source)
        width, height = size_of_image(_decoded(source[start : start + _SMALL_PREFIX]))
        if not width and _decoded(source[start : start + 4]).startswith(b"\xff\xd8"):
            width, height = size_of_image(_decoded(source[start : start + _LARGE_PREFIX]))
    return Part(PartKind.IMAGE, width=width, height=height, detail=level)


def audio(data: object) -> Part:
    """The part of an audio clip given as base64; `count` holds its bytes."""
    return Part(PartKind.AUDIO, count=payload_bytes(data) if isinstance(data, str) else 0)


def file(data: object) -> Part:
    """The part of a file given as base64 or data URL; a link or an id has 0 known bytes."""
    known = isinstance(data, str) and not data[:8].lower().startswith(("http:", "https:"))
    return Part(PartKind.FILE, count=payload_bytes(data) if known and isinstance(data, str) else 0)


def opaque(text: str) -> bool:
    """Whether a long text is a payload: a data URL, or letters and digits without any space.

    Base64 may be wrapped: then its lines are equally long, which those of no prose are.
    """
    if len(text) < 512:
        return False
    head = text[:512]
    if head[:5].lower() == "data:":
        return True
    lines = head.split("\n")
    if len(lines) > 1:
        width = len(lines[0])
        if width < SHORTEST_LINE or any(len(line) != width for line in lines[1:-1]):
            return False
        head = head.replace("\n", "").replace("\r", "")
    return head.isascii() and head.translate(_NO_MARKS).isalnum()


_NO_MARKS = {ord(mark): None for mark in "+/=-_"}


def _start(text: str) -> int:
    """Where the base64 of a data URL begins; 0 for bare base64."""
    if text[:5].lower() != "data:":
        return 0
    return text.find(",", 0, 512) + 1


def _decoded(text: str) -> bytes:
    """The bytes of a base64 prefix, white space ignored; b"" if it is none."""
    text = text.replace("\n", "").replace("\r", "").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text[: len(text) // 4 * 4])
    except ValueError:  # junk, padding within, or letters beyond ASCII
        return b""
