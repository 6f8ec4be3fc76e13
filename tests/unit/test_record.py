"""The end of a call as log and `explain` hold it: what a refused caller was told is found again."""

from __future__ import annotations

from gateway.call import Call, Dialect, Family
from gateway.clock import LoopClock
from gateway.errors import LoopDetected, QueueFull, Unauthenticated
from gateway.record import MOST_REFUSALS, Recorder, Refusals
from gateway.snapshot import Place, Snapshot
from gateway.telemetry.decisions import Decisions
from gateway.telemetry.logs import Redactor
from tests.sim.loop import run
from tests.sim.world import sim_clock

PLACES = {"agents.lab.limits.rpm": Place(file="tidegate.yaml", line=12)}


class Lines:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []

    def info(self, event: str, **fields: object) -> None:
        self.events.append({"event": event, **fields})

    def write(self, line: bytes, *, plain: bool) -> None:
        self.events.append({"line": line, "plain": plain})

    def stamp(self) -> str:
        return "2026-11-29T10:00:00.000Z"


def made(clock: LoopClock) -> Call:
    return Call(
        id="c1", dialect=Dialect.CHAT, family=Family.OPENAI, method="POST",
        path="/v1/chat/completions", target=b"/v1/chat/completions", headers=[],
        snapshot=Snapshot(revision=1, digest="", places=PLACES), received=clock.now(),
    )  # fmt: skip


def test_explain_knows_a_request_that_was_refused_before_the_pipeline():
    log, decisions = Lines(), Decisions(Redactor())
    refusals = Refusals(log, decisions, lambda: PLACES)
    refusals(
        "c1", Unauthenticated("This gateway does not know that API key.", because="issuers.spire")
    )
    shown = decisions.explain("c1")
    assert (shown["status"], shown["code"]) == (401, "invalid_api_key")
    assert shown["error"] == "This gateway does not know that API key."
    (line,) = log.events
    assert (line["event"], line["because"]) == ("refused_early", "issuers.spire")


def test_strangers_push_only_each_other_out():
    decisions = Decisions(Redactor(), most_calls=MOST_REFUSALS)
    refusals = Refusals(Lines(), decisions, dict)
    for number in range(MOST_REFUSALS + 10):
        refusals(f"c{number}", Unauthenticated("No API key."))
    assert len(decisions) == MOST_REFUSALS
    assert decisions.explain("c0") is None


def test_a_refused_call_is_explained_in_the_words_its_caller_read():
    async def main():
        decisions, clock = Decisions(Redactor()), sim_clock()
        told = QueueFull("agent:lab cannot serve this call.", because="agents.lab.limits.rpm")
        Recorder(Lines(), decisions, clock)(made(clock), 429, "refused", told)
        shown = decisions.explain("c1")
        assert shown["error"] == told.message
        assert (shown["file"], shown["line"]) == ("tidegate.yaml", 12)

    run(main())


def test_a_message_that_quotes_a_key_is_not_taken_for_plain_text():
    async def main():
        log, clock = Lines(), sim_clock()
        told = QueueFull("no tier 'sk-abcdefghijklmnopqrst'")
        Recorder(log, Decisions(Redactor()), clock)(made(clock), 429, "refused", told)
        assert log.events[0]["plain"] is False

    run(main())


def test_a_message_that_may_quote_the_prompt_is_for_its_caller_alone():
    async def main():
        log, clock = Lines(), sim_clock()
        told = LoopDetected("search(what nobody may read) was called 4 times", because="loops")
        Recorder(log, Decisions(Redactor()), clock)(made(clock), 429, "refused", told)
        assert b"nobody may read" not in log.events[0]["line"]
        assert b"loop_detected" in log.events[0]["line"]

    run(main())
