"""The chain of because, from a call to the line of the policy that decided."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import orjson
import pytest

from gateway.admission.profiles import Usage
from gateway.call import VerdictNote
from gateway.snapshot import Place
from gateway.telemetry.decisions import (
    MOST_GROUPS,
    MOST_NOTES,
    MOST_QUOTES,
    Decisions,
    Quotes,
    Record,
    Who,
    place_of,
)
from gateway.telemetry.logs import LONGEST, Redactor

PLACES = {
    "pools.gpt.limits": Place(file="policy.yaml", line=12),
    "tiers.batch.max_wait": Place(file="tiers.yaml", line=3),
}


def record(**changes):
    fields = {
        "ts": "2026-11-29T10:00:00.000Z", "call": "c1", "received": 5_000_000, "dialect": "chat",
        "method": "POST", "path": "/v1/chat/completions", "status": 200, "outcome": "ok",
    } | changes  # fmt: skip
    names = {key: fields.pop(key) for key in Who._fields if key in fields}
    return Record(names=Quotes().names(Who(**names)), **fields)


def note(layer="admit", verdict="admit", because="pools.gpt.limits.tpm", at=5_002_500, detail=""):
    return VerdictNote(layer, verdict, because, at, detail)


def test_a_line_is_json_with_the_chain_and_the_usage():
    made = record(notes=[note()], usage=Usage(input=9, output=0), waited_us=2_500)
    line = orjson.loads(made.line())
    assert (line["event"], line["call"], line["waited_us"]) == ("call", "c1", 2_500)
    assert line["usage"]["input"] == 9
    assert line["notes"][0]["because"] == "pools.gpt.limits.tpm"


def test_a_line_has_every_figure_of_the_usage():
    usage = Usage(
        input=1, output=2, cache_read=3, cache_write=4, reasoning=5, estimated=True, money=6
    )
    for spent in (usage, Usage()):
        assert orjson.loads(record(usage=spent).line())["usage"] == asdict(spent)


def test_explain_names_rule_file_and_line_and_leaves_out_what_is_empty():
    decisions = Decisions(Redactor())
    made = record(
        notes=[note(detail="cost 1200"), note(layer="retry", because="nowhere.at.all")],
        usage=Usage(input=9, output=0, estimated=True),
        waited_us=2_500, because="tiers.batch.max_wait", code="queue_full", status=429,
    )  # fmt: skip
    decisions.add("c1", made.line(), PLACES)
    shown = decisions.explain("c1")
    assert shown["notes"] == [
        {
            "layer": "admit", "verdict": "admit", "because": "pools.gpt.limits.tpm",
            "detail": "cost 1200", "at_ms": 2.5, "file": "policy.yaml", "line": 12,
        },
        {"layer": "retry", "verdict": "admit", "because": "nowhere.at.all", "detail": "",
         "at_ms": 2.5},
    ]  # fmt: skip
    assert (shown["file"], shown["line"]) == ("tiers.yaml", 3)
    assert shown["waited_ms"] == 2.5
    assert shown["usage"] == {"input": 9, "output": 0, "estimated": True, "money": 0}
    assert "tenant" not in shown


def test_a_status_of_zero_is_shown():
    decisions = Decisions(Redactor())
    decisions.add("c1", record(status=0).line(), {})
    assert decisions.explain("c1")["status"] == 0


def test_an_unknown_call_is_none():
    assert Decisions(Redactor()).explain("c1") is None


def test_the_oldest_call_is_forgotten_first_by_number_and_by_bytes():
    by_number = Decisions(Redactor(), most_calls=3)
    by_bytes = Decisions(Redactor(), most_bytes=3 * len(record().line()))
    for decisions in (by_number, by_bytes):
        for number in range(5):
            decisions.add(f"c{number}", record(call=f"c{number}").line(), {})
        assert len(decisions) == 3
        assert decisions.explain("c1") is None
        assert decisions.explain("c2")["call"] == "c2"


def test_a_repeated_id_is_remembered_once_and_its_bytes_counted_once():
    line = record().line()
    decisions = Decisions(Redactor(), most_bytes=2 * len(line))
    for _ in range(10):
        decisions.add("c1", line, {})
    decisions.add("c2", line, {})
    assert len(decisions) == 2


def test_a_record_too_large_for_the_whole_memory_is_not_kept():
    decisions = Decisions(Redactor(), most_bytes=10)
    decisions.add("c1", record().line(), {})
    assert len(decisions) == 0


def test_a_chain_without_end_keeps_its_first_and_last_links():
    notes = [note(layer=f"l{n}", detail="d" * 1_000) for n in range(500)]
    line = record(notes=notes).line()
    assert len(line) <= LONGEST
    kept = [link["layer"] for link in orjson.loads(line)["notes"]]
    assert len(kept) == MOST_NOTES
    assert (kept[0], kept[-1]) == ("l0", "l499")


def test_texts_remembered_as_json_are_bounded():
    quote = Quotes()
    for number in range(2 * MOST_QUOTES):
        quote(f"text {number}")
        quote.names(Who("chat", "POST", f"/v1/{number}"))
        quote.notes([note(because=f"rules.{number}")])
    assert len(quote._known) <= MOST_QUOTES
    assert len(quote._groups) <= MOST_GROUPS
    assert len(quote._links) <= MOST_GROUPS
    assert orjson.loads(quote('a "quoted" word')) == 'a "quoted" word'


def test_a_name_with_a_lone_surrogate_is_still_a_line():
    line = record(model="\ud83d", notes=[note()]).line()
    assert orjson.loads(line)["model"] == "\\ud83d"


@pytest.mark.parametrize("field", ["path", "model", "session"])
def test_a_name_that_may_be_a_key_makes_the_line_one_to_be_searched(field):
    assert record(model="gpt").plain
    assert not record(**{field: "sk-proj-0123456789abcdef"}).plain


def test_explain_hides_secrets_even_of_digits():
    decisions = Decisions(Redactor(["s3cr3t-value", "5000000"]))
    decisions.add("c1", record(received=1, model="s3cr3t-value").line(), {})
    assert decisions.explain("c1")["model"] == "***"
    decisions.add("c2", record(call="c2").line(), {})
    assert "cannot be shown" in decisions.explain("c2")["error"]


def test_a_rule_without_a_place_has_its_parents():
    assert place_of("pools.gpt.limits.tpm.depth", PLACES) is PLACES["pools.gpt.limits"]
    assert place_of("", PLACES) is None
    assert place_of("tiers", PLACES) is None


def test_any_object_with_a_file_and_a_line_is_a_place():
    decisions = Decisions(Redactor())
    decisions.add("c1", record(because="x").line(), {"x": SimpleNamespace(file="f", line=1)})
    assert decisions.explain("c1")["file"] == "f"
