"""The operator's word to conversations that were stopped."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.admin import AdminView, admin


def asked(method, query):
    """Status and body of one request, and what the process was told."""
    told: list[str] = []

    def reset(session):
        told.append(session)
        return 3

    def nothing(*_):
        raise AssertionError("not asked")

    view = AdminView(
        status=nothing,
        ready=nothing,
        metrics=nothing,
        explain=nothing,
        reload=nothing,
        reset_loops=reset,
        revoke=nothing,
        desk=nothing,
    )
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": "/loops/reset", "query_string": query,
        "headers": [], "root_path": "", "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    asyncio.run(admin(view)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"], told


@pytest.mark.parametrize(("query", "session"), [(b"session=one%20two", "one two"), (b"all=1", "")])
def test_a_session_or_all_begin_anew(query, session):
    status, body, told = asked("POST", query)
    assert (status, orjson.loads(body), told) == (200, {"reset": 3}, [session])


@pytest.mark.parametrize("query", [b"", b"session=", b"all=0", b"session=x&all=1"])
def test_whose_loops_must_be_said(query):
    status, body, told = asked("POST", query)
    assert (status, told) == (400, [])
    assert "session=NAME" in orjson.loads(body)["detail"]


def test_reading_resets_nothing():
    status, _, told = asked("GET", b"all=1")
    assert (status, told) == (405, [])
