"""`serve --workers N`: approvals and effects are in one file; any worker answers for all."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.desk import Unfit
from gateway.members import Desks, _Said


class Worker:
    """What the first worker that answers says; None: none does."""

    def __init__(self, *answer):
        self.answer = answer
        self.asked = []

    async def __call__(self, method, path, body):
        self.asked.append((method, path, body))
        return _Said(self.answer[0], orjson.dumps(self.answer[1])) if self.answer else None


def refused(answer):
    with pytest.raises(Unfit) as wrong:
        asyncio.run(answer)
    return wrong.value.status, wrong.value.title


def test_a_list_is_asked_for_with_its_state_and_cursor():
    worker = Worker(200, {"approvals": [], "next": 9})
    assert asyncio.run(Desks(worker).approvals("pending", 7)) == {"approvals": [], "next": 9}
    assert worker.asked == [("GET", "/approvals?state=pending&after=7", None)]


def test_a_decision_is_passed_on_as_it_was_signed():
    worker = Worker(200, {"id": "a", "state": "granted"})
    said = asyncio.run(Desks(worker).decide("a/b", {"decision": "grant"}))
    assert said["state"] == "granted"
    assert worker.asked == [("POST", "/approvals/a%2Fb/decision", b'{"decision":"grant"}')]


def test_a_worker_s_refusal_is_the_answer():
    forbidden = Worker(403, {"title": "not an approver", "detail": "…"})
    assert refused(Desks(forbidden).decide("a", {})) == (403, "not an approver")
    unknown = Worker(404, {"title": "unknown", "detail": "…"})
    assert refused(Desks(unknown).approval("a")) == (404, "unknown")


def test_nothing_is_said_where_no_worker_answers():
    assert refused(Desks(Worker()).doubts())[0] == 503
    assert refused(Desks(Worker()).resolve("k", {"outcome": "done"}))[0] == 503
