"""Host calls: local ones are answered, effects wait, everything else is an error reply."""

from __future__ import annotations

import json

import pytest

from runtime import abi
from runtime.abi import Request, State


def ask(op: str, args: object = None, state: State | None = None, outbox: list | None = None):
    raw = json.dumps({"v": 1, "op": op, "args": {} if args is None else args}).encode()
    out = [] if outbox is None else outbox
    answer = abi.serve(raw, state if state is not None else State(argv=[]), out)
    return answer if isinstance(answer, Request) else json.loads(answer)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("llm.chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("llm.raw", {"dialect": "anthropic", "body": {}}),
        ("tool.call", {"name": "t"}),
        ("memory.get", {"key": "k"}),
        ("memory.put", {"key": "k", "value": None}),
        ("checkpoint", {"label": "here"}),
        ("sleep", {"ms": 5}),
        ("lock.acquire", {"name": "l", "ttl_ms": 1000}),
        ("lock.release", {"name": "l", "token": 1}),
        ("batch", {"calls": [{"op": "memory.get", "args": {"key": "k"}}]}),
    ],
)
def test_an_effect_waits_and_takes_an_ordinal(op, args):
    state = State(argv=[], next_ordinal=7)
    wanted = ask(op, args, state)
    assert (wanted.op, wanted.ordinal, state.next_ordinal) == (op, 7, 8)


def test_each_call_of_a_batch_has_its_own_ordinal():
    state = State(argv=[], next_ordinal=3)
    calls = [{"op": "memory.get", "args": {"key": str(n)}} for n in range(3)]
    wanted = ask("batch", {"calls": calls}, state)
    assert [one.ordinal for one in wanted.calls] == [3, 4, 5]
    assert state.next_ordinal == 6


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "bad_request"),
        (b"{", "bad_request"),
        (b"[]", "bad_request"),
        (b'{"v":2,"op":"now"}', "bad_request"),
        (b'{"v":1,"op":7}', "bad_request"),
        (b'{"v":1,"op":"now","args":[]}', "bad_request"),
        (b'{"v":1,"op":"fork"}', "bad_request"),
        (b"[" * 100_000, "bad_request"),
        (b" " * (abi.MAX_REQUEST + 1), "too_large"),
        (b'{"v":1,"op":"\xff"}', "bad_request"),
    ],
)
def test_what_is_no_request_is_an_error_reply(raw, code):
    reply = json.loads(abi.serve(raw, State(argv=[]), []))
    assert reply["error"]["code"] == code


@pytest.mark.parametrize(
    ("op", "args", "named"),
    [
        ("llm.chat", {}, "messages"),
        ("llm.chat", {"messages": [1]}, "messages"),
        ("llm.raw", {"dialect": "x", "body": 1}, "body"),
        ("tool.call", {"name": ""}, "name"),
        ("tool.call", {"name": "t", "args": []}, "args"),
        ("memory.get", {"key": "k" * 513}, "key"),
        ("memory.put", {"key": "k"}, "value"),
        ("sleep", {"ms": -1}, "ms"),
        ("sleep", {"ms": abi.MAX_SLEEP_MS + 1}, "ms"),
        ("sleep", {"ms": True}, "ms"),
        ("random", {"bytes": 5000}, "bytes"),
        ("batch", {"calls": []}, "calls"),
        ("batch", {"calls": [{"op": "sleep", "args": {"ms": 1}}]}, "calls"),
        ("batch", {"calls": [{"op": "memory.get", "args": {"key": "k"}}] * 33}, "calls"),
        ("batch", {"calls": [7]}, "calls"),
    ],
)
def test_a_wrong_argument_is_named_and_takes_no_ordinal(op, args, named):
    state = State(argv=[])
    reply = ask(op, args, state)
    assert reply["error"]["code"] == "bad_request"
    assert named in reply["error"]["message"]
    assert state.next_ordinal == 0


def test_time_is_logical_and_moves_with_each_reading():
    state = State(argv=[], clock_ns=1_000_000)
    assert [ask("now", state=state)["ok"] for _ in range(3)] == [1_001_000, 1_002_000, 1_003_000]


def test_random_bytes_follow_the_seed_and_the_counter():
    one, two, other = (State(argv=[], seed=seed * 32) for seed in ("5a", "5a", "5b"))
    first = [ask("random", {"bytes": 40}, one)["ok"] for _ in range(2)]
    assert first[0] != first[1]
    assert first == [ask("random", {"bytes": 40}, two)["ok"] for _ in range(2)]
    assert ask("random", {"bytes": 40}, other)["ok"] not in first


def test_output_is_numbered_and_bounded():
    state, outbox = State(argv=[]), []
    assert ask("emit", {"data": {"a": 1}}, state, outbox)["ok"] == 1
    assert ask("log", {"level": "info", "message": "m", "fields": {}}, state, outbox)["ok"] == 2
    assert [(r.kind, r.sequence) for r in outbox] == [("emit", 1), ("log", 2)]
    big = ask("emit", {"data": "x" * (abi.MAX_EMIT + 1)}, state, outbox)
    assert big["error"]["code"] == "too_large"
    state.written = abi.MAX_OUTPUT
    assert ask("emit", {"data": 1}, state, outbox)["error"]["code"] == "too_large"
    assert len(outbox) == 2


def test_a_guest_that_ignores_spent_output_is_ended():
    state = State(argv=[], written=abi.MAX_OUTPUT - 5)
    assert not abi.room_for_output(6, state)
    assert abi.room_for_output(5, state), "what fits is still taken"
    refusals = [abi.room_for_output(1, state) for _ in range(abi.MAX_REFUSED - 1)]
    assert not any(refusals)
    with pytest.raises(abi.BudgetGone, match="output are spent"):
        abi.room_for_output(1, state)
    assert State.from_json(state.to_json(), files={}, request=b"", inbox=b"") == state


def test_effects_end_with_a_warning_and_then_the_task():
    state = State(argv=[], next_ordinal=abi.MAX_EFFECTS)
    assert ask("memory.get", {"key": "k"}, state)["error"]["code"] == "budget"
    with pytest.raises(abi.BudgetGone):
        ask("memory.get", {"key": "k"}, state)
    assert "ok" in ask("now", state=state), "local operations go on"


def test_a_request_is_known_again_by_its_digest():
    same = [
        abi.request("tool.call", args, 1).digest for args in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    ]
    assert same[0] == same[1]
    assert abi.request("tool.call", {"a": 1, "b": 3}, 1).digest != same[0]


def test_a_reply_that_is_too_large_becomes_an_error():
    reply = json.loads(abi.seal({"ok": "x" * abi.MAX_REPLY}, 4, 9))
    assert reply["error"]["code"] == "too_large"
    assert (reply["n"], reply["at"]) == (4, 9)


def test_reading_on_is_told_from_talking_about_it():
    assert abi.reads_rest(b'{"v":1,"op":"reply.rest","args":{"offset":3}}')
    assert not abi.reads_rest(b'{"v":1,"op":"log","args":{"message":"reply.rest"}}')
    assert not abi.reads_rest(b'{"v":1,"op":"reply.rest"')
    state = State(argv=[], inbox=b"0123456789")
    assert ask("reply.rest", {"offset": 4}, state) == {"ok": "NDU2Nzg5", "left": 6, "at": 0}


def test_the_state_survives_its_json():
    state = State(
        argv=["a"],
        files={"/x": b"1"},
        fds={4: ["/x", 7]},
        request=b"\xff",
        inbox=b"r",
        local={"m": 1},
    )
    row = json.loads(json.dumps(state.to_json()))
    again = State.from_json(row, files=state.files, request=b"\xff", inbox=b"r")
    assert again == state
