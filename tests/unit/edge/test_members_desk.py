"""`serve --workers N`: approvals and effects are kept by the worker whose call they are of."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.desk import Unfit
from gateway.members import Desks, _Said


class Workers:
    """What each worker says to a path; None: it does not answer."""

    def __init__(self, *answers):
        self.answers = answers
        self.asked = []

    async def __call__(self, method, path, body=None):
        self.asked.append((method, path, body))
        return {
            number: None if said is None else _Said(said[0], orjson.dumps(said[1]))
            for number, said in enumerate(self.answers)
        }


UNKNOWN = (404, {"title": "unknown", "detail": "There is no 'a'."})


def refused(answer):
    with pytest.raises(Unfit) as wrong:
        asyncio.run(answer)
    return wrong.value.status


def test_the_approvals_of_all_workers_are_one_list_oldest_first():
    late, early = {"id": "b", "requested": 9}, {"id": "a", "requested": 3}
    workers = Workers((200, {"approvals": [late]}), (200, {"approvals": [early]}))
    found = asyncio.run(Desks(workers).approvals("pending", 0))
    assert found == {"approvals": [early, late]}
    assert workers.asked == [("GET", "/approvals?state=pending", None)]


def test_workers_count_apart_so_there_is_no_cursor():
    assert refused(Desks(Workers()).approvals("", 7)) == 400


def test_a_silent_worker_makes_a_list_incomplete_not_shorter():
    assert refused(Desks(Workers((200, {"effects": []}), None)).doubts()) == 503


def test_a_decision_reaches_the_worker_that_asked_the_question():
    workers = Workers(UNKNOWN, (200, {"id": "a", "state": "granted"}))
    said = asyncio.run(Desks(workers).decide("a/b", {"decision": "grant"}))
    assert said["state"] == "granted"
    assert workers.asked == [("POST", "/approvals/a%2Fb/decision", b'{"decision":"grant"}')]


def test_the_owner_s_refusal_counts_more_than_the_others_ignorance():
    forbidden = (403, {"title": "not an approver", "detail": "…"})
    assert refused(Desks(Workers(UNKNOWN, forbidden)).decide("a", {})) == 403


def test_what_no_worker_knows_is_unknown_unless_one_is_silent():
    assert refused(Desks(Workers(UNKNOWN, UNKNOWN)).approval("a")) == 404
    assert refused(Desks(Workers(UNKNOWN, None)).resolve("k", {})) == 503
