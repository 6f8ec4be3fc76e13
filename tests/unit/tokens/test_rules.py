"""gateway/tokens.py: the pure rules: estimates, cuts, media."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import tokens
from gateway.call import Family, Part, PartKind
from gateway.tokens import cut, guess, guess_bytes, image, media, slices
from tests.unit.tokens.ground import SMALL, vocabulary

BLANKS = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2028", "\x1c", ".\n", "{\n", "=/\n"]
MARKS = ["/", "!", "?!", "'s", "'", "<", ">endoftext", "12", "1234", "\N{ARABIC-INDIC DIGIT THREE}"]
LETTERS = ["the", "The", "end", "é", "漢字", "\u0301", "a" * 9, "🙂"]
PIECES = st.lists(st.sampled_from(BLANKS + MARKS + LETTERS), max_size=120)


@pytest.mark.parametrize("encoding", list(SMALL))
@given(pieces=PIECES)
def test_where_a_harmless_cut_exists_the_slices_add_up_to_the_whole(encoding, pieces):
    text = "".join(pieces)
    encode = SMALL[encoding].encode_ordinary
    at = harmless(text, 0)
    while at:
        assert [*encode(text[:at]), *encode(text[at:])] == encode(text)
        at = harmless(text, at)


def harmless(text: str, after: int) -> int:
    """The next place that the docstring of `cut` calls harmless, written down a second time."""
    for at in range(after + 1, len(text)):
        before_blank = text[at] == " " and not text[at - 1].isspace()
        after_line = text[at - 1] == "\n" and not text[at].isspace() and text[at] != "/"
        if before_blank or after_line:
            return at
    return 0


@given(pieces=PIECES.filter(bool), size=st.integers(2, 60))
def test_slices_are_short_and_together_are_the_text(pieces, size):
    text = "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "SLICE", size)
        patch.setattr(tokens, "LOOKBACK", size // 2)
        found = list(slices(text))
    assert "".join(found) == text
    assert all(0 < len(piece) <= size for piece in found)


@given(pieces=PIECES.filter(bool), size=st.integers(2, 60))
def test_every_cut_is_harmless_or_there_was_no_harmless_place(pieces, size):
    text = "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "SLICE", size)
        patch.setattr(tokens, "LOOKBACK", size)
        end = cut(text, 0)
    if end == size < len(text) and harmless(text, end - 1) != end:
        assert harmless_blanks(text[: end + 1]) == []


def harmless_blanks(text: str) -> list[int]:
    return [at for at in range(1, len(text) - 1) if text[at] == " " and not text[at - 1].isspace()]


@pytest.mark.parametrize("encoding", list(SMALL))
@pytest.mark.parametrize(
    "line",
    [
        "the end and the text 123 !\n",
        "\tif (a) { // the\n\n    return '12';\n",
        "漢字 and 漢字。\r\n",
    ],
)
def test_a_long_document_counts_the_same_in_slices(encoding, line, monkeypatch):
    monkeypatch.setattr(tokens, "SLICE", 500)
    monkeypatch.setattr(tokens, "LOOKBACK", 200)
    encode = SMALL[encoding].encode_ordinary
    text = line * 300
    assert len(list(slices(text))) > 5
    assert sum(len(encode(piece)) for piece in slices(text)) == len(encode(text))


def test_a_letter_repeated_without_end_is_cut_blindly_and_counts_nearly_the_same():
    encode = SMALL["o200k_base"].encode_ordinary
    text = "a" * (tokens.SLICE * 2 + 5)
    pieces = list(slices(text))
    assert [len(piece) for piece in pieces] == [tokens.SLICE, tokens.SLICE, 5]
    assert 0 <= sum(len(encode(piece)) for piece in pieces) - len(encode(text)) <= 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", 0), ("a", 1), ("a" * 34, 10), ("a" * 35, 11), ("é" * 13, 10), ("漢" * 13, 15)],
)
def test_an_estimate_is_bytes_divided_and_rounded_up(text, wanted):
    assert guess(text) == wanted


def test_nine_ascii_characters_in_ten_make_a_text_ascii():
    assert guess("a" * 90 + "é" * 10) == guess_bytes(110)
    assert guess("a" * 89 + "é" * 11) == guess_bytes(111, ascii_share=0.5)


def test_an_estimate_takes_surrogates():
    assert guess("\ud83d" * 13) == 15


def test_a_huge_text_is_estimated_from_a_sample(monkeypatch):
    text = "漢字 and words, " * 4000
    whole = guess(text)
    monkeypatch.setattr(tokens, "SAMPLE", 1000)
    assert abs(guess(text) - whole) <= whole // 20


@pytest.mark.parametrize(
    ("width", "height", "detail", "wanted"),
    [
        (1024, 1024, "high", 765),
        (2048, 4096, "high", 1105),
        (4096, 8192, "low", 85),
        (0, 0, "low", 85),
        (0, 0, "auto", 765),
        (512, 512, "high", 85 + 170),
        (1, 100_000, "auto", 85 + 170 * 4),
    ],
)
def test_an_openai_image_counts_its_tiles(width, height, detail, wanted):
    assert image(width, height, detail, Family.OPENAI) == wanted


@pytest.mark.parametrize(
    ("width", "height", "wanted"),
    [(200, 200, 53), (1000, 1000, 1333), (8000, 8000, 1600), (0, 0, 1600), (1, 1, 1)],
)
def test_an_anthropic_image_counts_its_pixels(width, height, wanted):
    assert image(width, height, "auto", Family.ANTHROPIC) == wanted


@given(
    width=st.integers(0, 10**9), height=st.integers(0, 10**9), family=st.sampled_from(list(Family))
)
def test_no_image_is_free_or_endless(width, height, family):
    assert 1 <= image(width, height, "high", family) <= 1600


@pytest.mark.parametrize("kind", [PartKind.AUDIO, PartKind.FILE])
@given(size=st.integers(0, 10**12))
def test_a_mebibyte_of_audio_or_document_fits_a_hundred_thousand_tokens(kind, size):
    counted = media(Part(kind, count=size), Family.OPENAI)
    assert 500 <= counted <= 200_000
    if size <= 1024 * 1024:
        assert counted < 50_000


def test_a_negative_overhead_takes_nothing_back():
    assert media(Part(PartKind.OVERHEAD, count=-5), Family.OPENAI) == 0


@pytest.mark.parametrize("bad", [b"no rank", b"!!! 1", b"YQ== one", b"YQ== 1 2"])
def test_a_file_of_another_form_is_no_vocabulary(bad):
    with pytest.raises(ValueError, match=r".+"):
        tokens.encoder("x", tokens.PINNED["o200k_base"].pattern, vocabulary() + bad)
