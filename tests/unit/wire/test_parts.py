"""Everything the provider counts is counted, once, and media never as text."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from gateway.call import Dialect, Part, PartKind, Piece
from gateway.wire import content, media
from gateway.wire.codec import CODECS

PNG = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 640, 480) + b"\x08\x02" * 400
).decode()
URL = "data:image/png;base64," + PNG


def parts(dialect: Dialect, **body: Any) -> list[Piece]:
    return list(CODECS[dialect].parts(body))


def texts(found: list[Piece]) -> str:
    return " | ".join(part for part in found if isinstance(part, str))


def of(kind: PartKind, found: list[Piece]) -> list[Part]:
    return [part for part in found if isinstance(part, Part) and part.kind is kind]


def test_chat_counts_every_text_a_model_reads() -> None:
    found = parts(
        Dialect.CHAT,
        messages=[
            {"role": "system", "content": "SYSTEM"},
            {"role": "user", "name": "NAME", "content": [{"type": "text", "text": "TEXT"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": "REFUSAL",
                "reasoning_content": "REASON",
                "tool_calls": [
                    {"id": "t", "function": {"name": "CALL", "arguments": '{"a":"ARGS"}'}},
                    {"id": "u", "custom": {"name": "CUSTOM", "input": "FREE"}},
                ],
            },
            {"role": "assistant", "function_call": {"name": "OLD", "arguments": "OLDARGS"}},
            {"role": "tool", "tool_call_id": "t", "content": "RESULT"},
        ],
        tools=[{"type": "function", "function": {"name": "TOOL", "parameters": {"x": "PARAM"}}}],
        functions=[{"name": "FUNCTION"}],
        response_format={"type": "json_schema", "json_schema": {"schema": {"p": "SCHEMA"}}},
        prediction={"type": "content", "content": "PREDICTED"},
    )
    counted = texts(found)
    for word in (
        "SYSTEM", "NAME", "TEXT", "REFUSAL", "REASON", "CALL", "ARGS", "CUSTOM", "FREE", "OLD",
        "OLDARGS", "RESULT", "TOOL", "PARAM", "FUNCTION", "SCHEMA", "PREDICTED",
    ):  # fmt: skip
        assert word in counted, word
    overhead = sum(part.count for part in of(PartKind.OVERHEAD, found))
    assert overhead == 5 * 3 + 1 + 3


def test_messages_counts_every_text_a_model_reads() -> None:
    found = parts(
        Dialect.MESSAGES,
        system=[{"type": "text", "text": "SYSTEM"}],
        messages=[
            {"role": "user", "content": "TEXT"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "THOUGHT", "signature": "SIGNATURE"},
                    {"type": "tool_use", "id": "t", "name": "CALL", "input": {"a": ["ARGS"]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "content": [{"type": "text", "text": "RESULT"}]},
                    {"type": "tool_result", "content": "PLAIN"},
                    {
                        "type": "document",
                        "title": "TITLE",
                        "source": {"type": "text", "data": "DOCUMENT"},
                    },
                    {
                        "type": "document",
                        "source": {"type": "content", "content": [{"type": "text", "text": "IN"}]},
                    },
                ],
            },
        ],
        tools=[{"name": "TOOL", "input_schema": {"x": "PARAM"}}],
        output_config={"format": {"type": "json_schema", "schema": {"p": "SCHEMA"}}},
    )
    counted = texts(found)
    for word in (
        "SYSTEM", "TEXT", "THOUGHT", "CALL", "ARGS", "RESULT", "PLAIN", "TITLE", "DOCUMENT", "IN",
        "TOOL", "PARAM", "SCHEMA",
    ):  # fmt: skip
        assert word in counted, word
    assert "SIGNATURE" not in counted
    assert sum(part.count for part in of(PartKind.OVERHEAD, found)) == 3 * 3 + 3 + 346


def test_responses_counts_every_text_a_model_reads() -> None:
    found = parts(
        Dialect.RESPONSES,
        instructions="INSTRUCTIONS",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "TEXT"}]},
            {"type": "message", "role": "assistant", "content": "PLAIN"},
            {"type": "function_call", "name": "CALL", "arguments": '"ARGS"'},
            {"type": "function_call_output", "call_id": "c", "output": "RESULT"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "SUMMARY"}]},
            {"type": "from_the_future", "note": "UNKNOWN"},
            "BARE",
        ],
        tools=[{"type": "namespace", "tools": [{"name": "NESTED"}]}],
        text={"format": {"type": "json_schema", "schema": {"p": "SCHEMA"}}},
        prompt={"id": "p", "variables": {"v": "VARIABLE"}},
    )
    counted = texts(found)
    for word in (
        "INSTRUCTIONS", "TEXT", "PLAIN", "CALL", "ARGS", "RESULT", "SUMMARY", "UNKNOWN", "BARE",
        "NESTED", "SCHEMA", "VARIABLE",
    ):  # fmt: skip
        assert word in counted, word
    assert "hi" in texts(parts(Dialect.RESPONSES, input="hi"))


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (Dialect.CHAT, {"messages": [{"content": [
            {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}]}]}),
        (Dialect.RESPONSES, {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": URL, "detail": "high"}]}]}),
        (Dialect.RESPONSES, {"input": [{"type": "function_call_output", "output": [
            {"type": "input_image", "image_url": URL, "detail": "high"}]}]}),
    ],
)  # fmt: skip
def test_an_image_counts_by_its_pixels_and_detail(dialect: Dialect, body: dict[str, Any]) -> None:
    found = parts(dialect, **body)
    assert of(PartKind.IMAGE, found) == [Part(PartKind.IMAGE, width=640, height=480, detail="high")]
    assert PNG[:40] not in texts(found)


@pytest.mark.parametrize("nested", [False, True])
def test_a_base64_block_of_messages_counts_by_its_pixels(nested: bool) -> None:
    block: dict[str, Any] = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": PNG},
    }
    if nested:
        block = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    found = parts(Dialect.MESSAGES, messages=[{"role": "user", "content": [block]}])
    [image] = of(PartKind.IMAGE, found)
    assert (image.width, image.height) == (640, 480)
    assert PNG[:40] not in texts(found)


@pytest.mark.parametrize("wrap", [0, 64, 76])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("dialect", "wrapped_in"),
    [
        (Dialect.RESPONSES, lambda data: {"input": [
            {"type": "image_generation_call", "result": data}]}),
        (Dialect.MESSAGES, lambda data: {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "content": [
                {"type": "resource", "resource": {"blob": data}}]}]}]}),
        (Dialect.CHAT, lambda data: {"messages": [{"content": [
            {"type": "video_url", "video_url": {"url": "DATA:video/mp4;base64," + data}}]}]}),
        (Dialect.EMBEDDINGS, lambda data: {"input": [{"image": data}]}),
    ],
)  # fmt: skip
def test_a_payload_in_a_block_of_unknown_type_is_no_text(
    dialect: Dialect, wrapped_in: Any, wrap: int, ending: str
) -> None:
    data = "iVBORw0KGgo" * 400
    if wrap:
        data = ending.join(data[at : at + wrap] for at in range(0, len(data), wrap))
    found = parts(dialect, **wrapped_in(data))
    assert "iVBOR" not in texts(found)
    assert len(of(PartKind.FILE, found)) == 1


@pytest.mark.parametrize(
    "prose",
    ["word\n" * 200, "\n".join("x" * (60 + n % 3) for n in range(30)), "ab cd\n" + "e" * 600],
)
def test_words_on_lines_of_their_own_are_text(prose: str) -> None:
    found = parts(Dialect.CHAT, messages=[{"content": [{"type": "new", "note": prose}]}])
    assert prose in texts(found)


@pytest.mark.parametrize(
    "thoughts",
    [{"reasoning": "THOUGHT"}, {"reasoning_content": "THOUGHT"},
     {"reasoning_details": [{"type": "reasoning.text", "text": "THOUGHT"}]},
     {"reasoning": "THOUGHT", "reasoning_details": [{"text": "THOUGHT"}]}],
)  # fmt: skip
def test_replayed_reasoning_is_counted_once_in_every_spelling(thoughts: dict[str, Any]) -> None:
    found = parts(Dialect.CHAT, messages=[{"role": "assistant", "content": "x", **thoughts}])
    assert texts(found).count("THOUGHT") == 1


def test_files_and_clips_count_by_their_bytes() -> None:
    found = parts(
        Dialect.CHAT,
        messages=[
            {
                "content": [
                    {"type": "file", "file": {"file_data": "data:application/pdf;base64,QUJD"}},
                    {"type": "file", "file": {"file_id": "f"}},
                    {"type": "refusal", "refusal": "NO"},
                    {"type": "input_audio", "input_audio": {"data": "QUJDQUJD", "format": "wav"}},
                ]
            }
        ],
    )
    assert [part.count for part in of(PartKind.FILE, found)] == [3, 0]
    assert [part.count for part in of(PartKind.AUDIO, found)] == [6]
    assert texts(found) == "NO"
    document = {"type": "document", "source": {"type": "base64", "data": "QUJD"}}
    linked = {"type": "document", "source": {"type": "url", "url": "https://x.test/a.pdf"}}
    found = parts(
        Dialect.MESSAGES, messages=[{"content": [document, linked, {"type": "document"}]}]
    )
    assert [part.count for part in of(PartKind.FILE, found)] == [3, 0, 0]


def test_a_payload_in_a_block_of_unknown_type_is_a_file_and_no_text() -> None:
    block = {
        "type": "hologram",
        "cells": PNG * 4,
        "link": "data:x," + "é" * 600,
        "caption": "CAPTION",
        "n": [1, 2.5, None],
    }
    found = parts(Dialect.CHAT, messages=[{"role": "user", "content": [block]}])
    assert "CAPTION" in texts(found)
    assert PNG[:40] not in texts(found)
    assert [part.count for part in of(PartKind.FILE, found)] == [len(PNG * 4) * 3 // 4, 450]


def test_sealed_reasoning_counts_by_its_bytes() -> None:
    found = parts(
        Dialect.RESPONSES,
        input=[{"type": "reasoning", "summary": [], "encrypted_content": "QUJD" * 10}],
    )
    assert [part.count for part in of(PartKind.FILE, found)] == [30]


@pytest.mark.parametrize(
    ("given", "ids", "words"),
    [
        ([1234567] * 900, [900], []),
        ([[1, 2, 3], [4]], [3, 1], []),
        (["a", "b"], [], ["a", "b"]),
        ("a", [], ["a"]),
        ([[1, 2], "a"], [2], ["a"]),
        ([True, False], [], []),
        ([], [], []),
    ],
)
@pytest.mark.parametrize(
    ("dialect", "key"), [(Dialect.EMBEDDINGS, "input"), (Dialect.COMPLETIONS, "prompt")]
)
def test_a_token_id_counts_one_and_each_text_by_itself(
    dialect: Dialect, key: str, given: Any, ids: list[int], words: list[str]
) -> None:
    found = parts(dialect, **{key: given})
    assert [part.count for part in of(PartKind.TOKEN_IDS, found)] == ids
    assert [part for part in found if isinstance(part, str)] == words


def test_a_rendering_is_compact_and_reads_like_json() -> None:
    rendered = content.render({"type": "object", "n": [1, 2.5, None], "q": "é"})
    assert rendered == '{"type":"object","n":[1,2.5,None],"q":"é"}'
    assert content.render("plain") == "plain"


def test_a_value_too_deep_or_too_long_to_render_is_flattened() -> None:
    deep: Any = "BOTTOM"
    for _ in range(5000):
        deep = [deep]
    assert content.render({"k": deep}) == "k BOTTOM"
    assert content.render([10**5000]).startswith("0x")


def test_blocks_nested_beyond_reason_still_count_as_text() -> None:
    block: Any = {"type": "text", "text": "BOTTOM"}
    for _ in range(200):
        block = {"type": "tool_result", "content": [block]}
    found = parts(Dialect.MESSAGES, messages=[{"content": [block]}])
    assert "BOTTOM" in texts(found)
    assert content.kinds([block]) == {"tool_result"}
    lists: Any = "BOTTOM"
    for _ in range(3000):
        lists = [lists]
    found = parts(Dialect.MESSAGES, messages=[{"content": lists}])
    assert "BOTTOM" in texts(found)


JPEG = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF" + b"\0" * 10 + b"\xff\xff\xc2\x00\x11\x08"
    + struct.pack(">HH", 300, 400) + b"\x03" * 20
)  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        (base64.b64decode(PNG), (640, 480)),
        (b"GIF89a" + struct.pack("<HH", 10, 20), (10, 20)),
        (JPEG, (400, 300)),
        (b"RIFF\0\0\0\0WEBPVP8X" + b"\0" * 8 + b"\x7f\x02\0\xdf\x01\0", (640, 480)),
        (b"RIFF\0\0\0\0WEBPVP8L" + b"\0" * 5 + struct.pack("<I", 639 | 479 << 14), (640, 480)),
        (b"RIFF\0\0\0\0WEBPVP8 " + b"\0" * 10 + struct.pack("<HH", 640, 480), (640, 480)),
        (b"BM", (0, 0)),
        (b"", (0, 0)),
        (b"\x89PNG\r\n\x1a\n", (0, 0)),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 20, (0, 0)),
        (b"\xff\xd8\xff\xe0\x00\x10", (0, 0)),
        (b"\xff\xd8" + b"\0" * 20, (0, 0)),
        (b"\xff\xd8" + b"\xff" * 20, (0, 0)),
        (b"RIFF\0\0\0\0WEBPVP8L", (0, 0)),
    ],
)
def test_pixels_stand_in_the_first_bytes_of_each_format(raw: bytes, size: tuple[int, int]) -> None:
    assert media.size_of_image(raw) == size


def test_a_jpeg_with_a_large_preview_in_front_is_measured() -> None:
    preview = b"\xff\xe1" + struct.pack(">H", 60_000) + b"\0" * 59_998
    data = base64.b64encode(JPEG[:20] + preview + JPEG[20:]).decode()
    assert (media.image(data).width, media.image(data).height) == (400, 300)


@pytest.mark.parametrize(
    "source", ["https://x.test/a.png", "data:image/png;base64,????", "é" * 40, None, 7, ""]
)
def test_an_image_that_cannot_be_measured_has_no_size(source: Any) -> None:
    image = media.image(source, "low")
    assert (image.kind, image.width, image.height, image.detail) == (PartKind.IMAGE, 0, 0, "low")


def test_a_detail_of_the_wrong_type_is_auto() -> None:
    assert media.image(None, {"x": 1}).detail == "auto"
