"""Responses that continue one which the provider remembers."""

from __future__ import annotations

import orjson
import pytest

from gateway.bodies import canonical
from gateway.resilience import loops
from gateway.wire import chained, turns
from gateway.wire.sse import Events
from gateway.wire.stream import Tap

OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "weather",
    "arguments": "{}",
}
RESPONSE = {"id": "resp_1", "status": "completed", "output": [{"type": "reasoning"}, CALL]}


def test_results_of_the_response_before_are_found_by_call():
    body = {"previous_response_id": "resp_1", "input": [OUTPUT, {**OUTPUT, "call_id": "c2"}]}
    assert chained.outputs(body) == {"c1": "rain", "c2": "rain"}


@pytest.mark.parametrize(
    "body",
    [
        {"input": [OUTPUT]},
        {"previous_response_id": "", "input": [OUTPUT]},
        {"previous_response_id": 7, "input": [OUTPUT]},
        {"previous_response_id": "resp_1", "input": "hello"},
        {"previous_response_id": "resp_1", "input": None},
        {"previous_response_id": "resp_1", "input": [OUTPUT, {"role": "user", "content": "no"}]},
        {
            "previous_response_id": "resp_1",
            "input": [None, 7, {"type": 7}, {**OUTPUT, "call_id": 7}],
        },
    ],
)
def test_a_person_or_no_response_before_means_no_results(body):
    assert chained.outputs(body) == {}


def test_results_after_a_persons_words_count():
    body = {"previous_response_id": "r", "input": [{"role": "user", "content": "x"}, OUTPUT]}
    assert chained.outputs(body) == {"c1": "rain"}


def test_answers_are_remembered_unless_the_client_says_no():
    assert chained.remembered({})
    assert chained.remembered({"store": None})
    assert not chained.remembered({"store": False})


def test_an_answer_names_its_id_and_the_calls_it_waits_for():
    built_in = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    name, calls = chained.asked({**RESPONSE, "output": [built_in, *RESPONSE["output"]]})
    assert name == "resp_1"
    assert [(call.id, call.name) for call in calls] == [("c1", "weather")]


@pytest.mark.parametrize(
    "response",
    [
        {},
        {**RESPONSE, "id": None},
        {**RESPONSE, "status": "failed"},
        {**RESPONSE, "status": None},
        {"error": {"message": "no"}},
    ],
)
def test_a_failed_answer_continues_nothing(response):
    assert chained.asked(response) == ("", ())


@pytest.mark.parametrize("output", [None, "x", [], [None, 7], [{"type": "message"}]])
def test_an_answer_without_calls_waits_for_nothing(output):
    assert chained.asked({**RESPONSE, "output": output}) == ("resp_1", ())


def read(stream, size):
    reader = chained.EndReader()
    tap = Tap(Events(), reader, orjson.loads)
    for at in range(0, len(stream), size):
        tap(stream[at : at + size])
    return reader.response


DELTA = b'{"type":"response.output_text.delta","delta":"\\"response.completed\\""}'
END = orjson.dumps({"type": "response.completed", "response": RESPONSE})


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("named", [True, False])
def test_the_terminal_event_is_read_at_any_chunk_boundary(size, named):
    def event(name, data):
        return (b"event: " + name + b"\n" if named else b"") + b"data: " + data + b"\n\n"

    stream = event(b"response.output_text.delta", DELTA) + event(b"response.completed", END)
    assert read(stream, size) == RESPONSE


@pytest.mark.parametrize("data", [b"{", b"7", b'{"response":7}', b"[DONE]"])
def test_a_malformed_end_is_none(data):
    assert read(b"event: response.completed\ndata: " + data + b"\n\n", 100) == {}


def test_an_end_beyond_the_bound_is_none():
    reader = chained.EndReader()
    Tap(Events(100), reader, orjson.loads)(b"event: response.completed\ndata: " + END + b"\n\n")
    assert reader.response == {}


def call(number, name="weather", arguments="{}"):
    return turns.ToolCall(id=f"c{number}", name=name, arguments=arguments)


def pending(*calls, exempt=lambda name: name == "poll"):
    return loops.unpacked(loops.packed(turns.pending_of(calls, canonical, exempt)))


def test_pending_calls_become_the_turn_that_a_history_would_have_shown():
    arguments = '{"day": 3, "city":"Ulm"}'
    turn = turns.answered_turn(pending(call(1, arguments=arguments)), {"c1": "rain"})
    whole = turns.ToolCall(
        id="c1", name="weather", arguments='{"city":"Ulm","day":3}', result="rain"
    )
    assert turn.calls == turns.turn_of(turns.Said("", (whole,)), canonical, lambda _: False).calls
    assert not turn.exempt


def test_polling_and_unknown_calls_are_an_iteration_only():
    waiting = pending(call(1, "poll"), call(2))
    assert turns.answered_turn(waiting, {"c1": "rain"}).exempt
    assert turns.answered_turn(waiting, {"c9": "rain"}).exempt
    both = turns.answered_turn(waiting, {"c1": "rain", "c2": "rain"})
    assert (len(both.calls), both.exempt) == (1, False)


def test_pending_calls_are_bounded_in_number_and_name():
    many = pending(*(call(number, "näme" * 50) for number in range(50)))
    assert len(many) == loops.MOST_PENDING
    assert all(len(one.name.encode()) <= loops.LONGEST_NAME for one in many)
    assert all("näme".startswith(one.name[:4]) for one in many)


def test_answers_with_the_same_calls_and_results_are_alike():
    def sketches(number, result):
        turn = turns.answered_turn(pending(call(number)), {f"c{number}": result})
        return [turn.sketch(half) for half in loops.Half]

    assert sketches(1, "rain") == sketches(2, "rain")
    assert sketches(1, "rain")[0] == sketches(2, "sun")[0]
    assert sketches(1, "rain")[1] != sketches(2, "sun")[1]
