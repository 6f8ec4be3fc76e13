"""The fault cases of pure codecs: each stream of the cases at every cut, each reset format.

The bytes come from `tests/cases`, read once while collecting; the tests touch nothing. The judge of
the events is the player's own parser, written apart from the gateway's.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.wire.ratelimit_headers import reset_in
from gateway.wire.sse import Events
from tests.cases import form, items, sse
from tests.cases.client import first

NOW = round(datetime(2031, 1, 1, tzinfo=UTC).timestamp() * 1_000_000)

VARIANTS = form.read_all()


def _streams() -> list[tuple[str, list[bytes]]]:
    """The event streams of all cases: name and writes."""
    found = []
    for variant in VARIANTS:
        names = items.Names({"model": variant.model, "fresh": "1", "rpc_id": "1"})
        for number, answer in enumerate(a for up in variant.upstreams for a in up["answers"]):
            headers = [(str(name), str(value)) for name, value in answer.get("headers", [])]
            plain = first(headers, "content-encoding") is None
            if plain and (first(headers, "content-type") or "") == "text/event-stream":
                writes = [step.data for step in items.steps(answer.get("chunks", []), names.fill)]
                found.append((f"{variant.name}/{number}", writes))
    return found


STREAMS = _streams()
DISTINCT = sorted(
    {b"".join(writes): name for name, writes in STREAMS}.items(), key=lambda one: one[1]
)


def _events(chunks: list[bytes]) -> list[tuple[str, str]]:
    parser = Events()
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return [(event.name.decode() or "message", event.data.decode()) for event in events]


def _by_the_book(body: bytes) -> list[tuple[str, str]]:
    return [(event.name, event.data) for event in sse.parse(body)]


def test_the_cases_hold_streams_of_every_dialect() -> None:
    text = b"".join(body for body, _ in DISTINCT)
    assert len(DISTINCT) > 30
    for mark in (b"[DONE]", b"message_stop", b"response.completed", b"\r\r", b"\r\n\r\n"):
        assert mark in text


@pytest.mark.parametrize(("name", "writes"), STREAMS, ids=[name for name, _ in STREAMS])
def test_written_as_the_case_writes_it_a_stream_gives_the_events_of_the_book(
    name: str, writes: list[bytes]
) -> None:
    assert _events(writes) == _by_the_book(b"".join(writes)), name


@pytest.mark.parametrize(("body", "name"), DISTINCT, ids=[name for _, name in DISTINCT])
def test_no_single_cut_changes_the_events_of_a_stream(body: bytes, name: str) -> None:
    expected = _by_the_book(body)
    # Long streams repeat themselves: every cut of the first and last 400 bytes covers their kinds.
    cuts = [at for at in range(len(body) + 1) if at < 400 or at > len(body) - 400]
    for at in cuts:
        assert _events([body[:at], body[at:]]) == expected, f"{name} cut at {at}"


@pytest.mark.parametrize(("body", "name"), DISTINCT, ids=[name for _, name in DISTINCT])
def test_one_byte_at_a_time_gives_the_same_events(body: bytes, name: str) -> None:
    assert _events([bytes((byte,)) for byte in body]) == _by_the_book(body), name


CODEC = [variant for variant in VARIANTS if "codec" in variant.expect]


@pytest.mark.parametrize("variant", CODEC, ids=lambda variant: variant.name)
def test_the_joined_data_are_what_the_case_says(variant: form.Variant) -> None:
    writes = next(w for name, w in STREAMS if name.startswith(f"{variant.name}/"))
    seen = [data for _, data in _events(writes)]
    expected = variant.expect["codec"]
    assert len(seen) == len(expected)
    for data, wanted in zip(seen, expected, strict=True):
        if wanted.startswith("...") and wanted.endswith("..."):
            words = wanted.strip(". ").replace('"', "").split()
            assert all(word in data for word in words), (data, wanted)
        else:
            assert data == wanted


ROWS = [
    (variant.name, row["value"], row["seconds"])
    for variant in VARIANTS
    if variant.unit_only
    for row in variant.rows
]


@pytest.mark.parametrize(("name", "value", "seconds"), ROWS, ids=[str(row[1]) for row in ROWS])
def test_a_reset_value_is_read_as_the_case_says(
    name: str, value: str, seconds: float | None
) -> None:
    wanted = None if seconds is None else round(seconds * 1_000_000)
    assert reset_in(value, now=NOW) == wanted, name
