"""Turns of three dialects, and what makes two calls the same."""

from __future__ import annotations

import pytest

from gateway.bodies import canonical
from gateway.call import Dialect
from gateway.resilience.loops import SKETCH, Half
from gateway.wire import turns

CHAT, MESSAGES, RESPONSES = Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES


def chat_turn(id_, name, arguments, result=None, words=None):
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    made = [{"role": "assistant", "content": words, "tool_calls": [call]}]
    if result is not None:
        made.append({"role": "tool", "tool_call_id": id_, "content": result})
    return made


def claude_turn(id_, name, arguments, result=None, *, beside=()):
    use = {"type": "tool_use", "id": id_, "name": name, "input": arguments}
    made = [{"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]}]
    if result is not None:
        block = {"type": "tool_result", "tool_use_id": id_, "content": result}
        made.append({"role": "user", "content": [block, *beside]})
    return made


def item_turn(id_, name, arguments, result=None):
    made = [
        {"type": "reasoning", "id": f"rs_{id_}", "summary": []},
        {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments},
    ]
    if result is not None:
        made.append({"type": "function_call_output", "call_id": id_, "output": result})
    return made


PERSON = {"role": "user", "content": "find it"}

HISTORIES = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "be good"},
            PERSON,
            *chat_turn("c1", "search", '{"a":1}', "none"),
            *chat_turn("c2", "read", '{"b":2}', "text"),
        ]
    },
    MESSAGES: {
        "messages": [
            PERSON,
            *claude_turn("c1", "search", {"a": 1}, "none"),
            *claude_turn("c2", "read", {"b": 2}, [{"type": "text", "text": "text"}]),
        ]
    },
    RESPONSES: {
        "input": [
            PERSON,
            *item_turn("c1", "search", '{"a":1}', "none"),
            *item_turn("c2", "read", '{"b":2}', "text"),
        ]
    },
}


def spoken(dialect, body):
    return list(turns.of(dialect, body))


@pytest.mark.parametrize("dialect", HISTORIES)
def test_turns_come_newest_first_with_their_results(dialect):
    newest, first = spoken(dialect, HISTORIES[dialect])
    assert [(call.id, call.name) for call in (*newest.calls, *first.calls)] == [
        ("c2", "read"),
        ("c1", "search"),
    ]
    assert turns.result_text(newest.calls[0].result) == "text"
    assert turns.result_text(first.calls[0].result) == "none"


@pytest.mark.parametrize("dialect", HISTORIES)
def test_reading_stops_at_what_a_person_said(dialect):
    key = "input" if dialect is RESPONSES else "messages"
    history = HISTORIES[dialect][key]
    assert spoken(dialect, {key: [*history, {"role": "user", "content": "stop"}]}) == []
    assert len(spoken(dialect, {key: [*history, PERSON, *history[1:]]})) == 2


@pytest.mark.parametrize("dialect", HISTORIES)
def test_the_opening_and_the_length_are_those_of_the_history(dialect):
    body = HISTORIES[dialect]
    assert turns.opening(dialect, body) == "find it"
    assert turns.length(dialect, body) == len(next(iter(body.values())))
    assert turns.answered(dialect, body)
    assert not turns.answered(dialect, {key: [PERSON] for key in body})


def test_a_text_as_input_is_a_person_speaking():
    assert spoken(RESPONSES, {"input": "hello"}) == []
    assert turns.opening(RESPONSES, {"input": "hello"}) == "hello"
    assert turns.length(RESPONSES, {"input": "hello"}) == 0


def test_a_response_that_follows_another_is_no_beginning():
    assert turns.answered(RESPONSES, {"input": "hello", "previous_response_id": "resp_1"})


def test_reminders_beside_results_are_no_person():
    reminder = {"type": "text", "text": " <system-reminder>tests fail</system-reminder>\n"}
    image = {"type": "image", "source": {"type": "base64", "data": "AA"}}
    body = {
        "messages": [PERSON, *claude_turn("c1", "look", {}, "seen", beside=(reminder, image, ""))]
    }
    assert len(spoken(MESSAGES, body)) == 1


def test_words_beside_results_are_a_person():
    words = {"type": "text", "text": "no, the other file"}
    body = {"messages": [PERSON, *claude_turn("c1", "look", {}, "seen", beside=(words,))]}
    assert spoken(MESSAGES, body) == []
    plain = {"messages": [PERSON, *claude_turn("c1", "look", {}, "seen", beside=("no!",))]}
    assert spoken(MESSAGES, plain) == []


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:,"}}],
        [{"type": "input_audio", "input_audio": {}}],
        "go on",
    ],
)
def test_a_picture_alone_is_a_person_too(content):
    history = HISTORIES[CHAT]["messages"]
    assert spoken(CHAT, {"messages": [*history, {"role": "user", "content": content}]}) == []


@pytest.mark.parametrize(
    "content", ["", "  ", None, [], [{"type": "text", "text": ""}], 7, [7, ""]]
)
def test_a_message_without_words_is_no_person(content):
    history = HISTORIES[CHAT]["messages"]
    body = {"messages": [*history, {"role": "user", "content": content}]}
    assert len(spoken(CHAT, body)) == 2


def test_system_messages_between_are_looked_through():
    history = HISTORIES[CHAT]["messages"]
    body = {"messages": [*history, {"role": "system", "content": "time is short"}]}
    assert len(spoken(CHAT, body)) == 2


@pytest.mark.parametrize("dialect", HISTORIES)
def test_a_prefill_after_a_person_leaves_it_the_persons_turn(dialect):
    key = "input" if dialect is RESPONSES else "messages"
    prefill = {"role": "assistant", "content": "{"}
    assert spoken(dialect, {key: [*HISTORIES[dialect][key], PERSON, prefill]}) == []
    assert len(spoken(dialect, {key: [*HISTORIES[dialect][key], prefill]})) == 2


def test_words_without_a_call_are_a_turn_of_their_own():
    said = {"role": "assistant", "content": "Thinking."}
    history = [PERSON, said, said, *chat_turn("c1", "search", "{}", "none")]
    assert [turn.text for turn in spoken(CHAT, {"messages": history})] == [
        "", "Thinking.", "Thinking.",
    ]  # fmt: skip
    items = [
        PERSON,
        {"role": "assistant", "content": [{"type": "output_text", "text": "Thinking."}]},
        *item_turn("c1", "search", "{}", "none"),
        {"role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c2", "name": "read", "arguments": "{}"},
    ]
    assert [(turn.text, len(turn.calls)) for turn in spoken(RESPONSES, {"input": items})] == [
        ("So.", 1),
        ("Thinking.", 1),
    ]


def test_parallel_calls_are_one_turn_and_keep_their_order():
    items = [
        PERSON,
        {"type": "function_call", "call_id": "c1", "name": "a", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "b", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
    ]
    (turn,) = spoken(RESPONSES, {"input": items})
    assert [(call.name, call.result) for call in turn.calls] == [("a", "1"), ("b", "2")]


def test_custom_legacy_and_built_in_calls_are_calls():
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    body = {
        "messages": [
            PERSON,
            {"role": "assistant", "content": None, "tool_calls": [custom, 7, {"id": "x"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
            {"role": "assistant", "content": None,
             "function_call": {"name": "old", "arguments": "{}"}},
            {"role": "function", "name": "old", "content": "done"},
        ]
    }  # fmt: skip
    legacy, modern = spoken(CHAT, body)
    assert (legacy.calls[0].name, legacy.calls[0].result) == ("old", "done")
    assert (modern.calls[0].name, modern.calls[0].arguments) == ("patch", "*** Begin")
    items = [
        {"type": "local_shell_call", "call_id": "c1", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c1", "output": "a"},
        {"type": "mcp_call", "id": "m1", "name": "ask", "arguments": "{}", "output": "b"},
    ]
    mcp, shell = spoken(RESPONSES, {"input": items})
    assert (shell.calls[0].name, shell.calls[0].result) == ("local_shell_call", "a")
    assert shell.calls[0].arguments == {"command": ["ls"]}
    assert (mcp.calls[0].name, mcp.calls[0].result) == ("ask", "b")
    served = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": "found"},
    ]
    (turn,) = spoken(MESSAGES, {"messages": [PERSON, {"role": "assistant", "content": served}]})
    assert (turn.calls[0].name, turn.calls[0].result) == ("web_search", "found")


@pytest.mark.parametrize("dialect", [*HISTORIES, Dialect.EMBEDDINGS])
@pytest.mark.parametrize(
    "junk",
    [
        None,
        7,
        {},
        [None, 7, "x", [], {}],
        [{"role": "assistant", "tool_calls": 7, "content": 7}],
        [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": 2}}]}],
        [{"role": "assistant", "content": [7, {"type": "tool_use"}, {"type": 7}]}],
        [{"role": "tool", "tool_call_id": 3, "content": 9}, {"role": "tool"}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": []}]}],
        [{"type": "function_call"}, {"type": "function_call_output"}, {"type": 3}],
        [{"type": "x_call", "call_id": 3, "arguments": [float("nan")]}],
    ],
)
def test_no_shape_of_a_history_raises(dialect, junk):
    body = {"messages": junk, "input": junk}
    for said in turns.of(dialect, body):
        turn = turns.turn_of(said, canonical, lambda _: False)
        assert all(isinstance(turn.sketch(half), bytes) for half in Half)
        turns.mark(said, 1, lambda: turns.opening(dialect, body))
    turns.answered(dialect, body)
    turns.length(dialect, body)


# --- fingerprints ---------------------------------------------------------------------------------


def call(arguments, result="none", name="search", id_="call_0123456789"):
    return turns.ToolCall(id=id_, name=name, arguments=arguments, result=result)


def prints(*calls, exempt=lambda _: False):
    return turns.turn_of(turns.Said("", calls), canonical, exempt)


def exact(arguments):
    return prints(call(arguments)).calls[0][0]


def like(arguments, result="none"):
    return prints(call(arguments, result)).calls[0][1]


@pytest.mark.parametrize(
    "spelling",
    [
        '{"b":{"d":[3],"c":"x y"},"a":1}',
        '{ "a" : 1 , "b" : { "c" : "x y", "d" : [ 3 ] } }',
        '{"a":1,"b":{"c":" x \\t\\n y ","d":[3]}}',
        '{"a":1,"b":{"c":"\\u0078\\u00a0\\u2003y","d":[3]}}',
        '{"a":1,"b":{"c":"x\\u000by","d":[3]}}',
        {"b": {"d": [3], "c": "x  y"}, "a": 1},
    ],
)
def test_spellings_of_one_meaning_are_one_call(spelling):
    assert exact(spelling) == exact('{"a":1,"b":{"c":"x y","d":[3]}}')


@pytest.mark.parametrize(
    "other",
    ['{"a":2}', '{"a":"1"}', '{"a":1,"b":null}', '{"b":1}', "{}", "", None, '{"a":1', "[1]"],
)
def test_other_arguments_are_another_call(other):
    assert exact(other) != exact('{"a":1}')


def test_words_are_never_joined_by_folding():
    assert exact('{"cmd":"rm -rf a b"}') != exact('{"cmd":"rm -rf ab"}')


def test_text_that_is_no_json_folds_its_white_space():
    assert exact("*** Begin\n  Patch\t") == exact("*** Begin Patch")
    assert exact('{"a":  1') == exact('{"a": 1')


def test_arguments_nested_deeper_than_an_encoder_writes_still_count():
    deep = "[" * 400 + "]" * 400
    assert exact(deep) == exact(deep.replace("[", "[ "))
    assert exact(deep) != exact("[" + deep + "]")


def test_the_same_arguments_for_another_tool_are_another_call():
    one, other = prints(call("{}", name="a"), call("{}", name="b")).calls
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"page":1}', '{"page":10}'),
        ('{"at":"2026-11-29T17:30:00Z"}', '{"at":"2025-01-02T03:04:05Z"}'),
        ('{"at":"29 Nov 2026"}', '{"at":"3 May 2026"}'),
        ('{"at":"29 Nov 2026, 5 pm"}', '{"at":"3 May 2026, 11 am"}'),
        ('{"id":"3f2a91c0-7b1e-4f7a-9d2e-0a1b2c3d4e5f"}',
         '{"id":"b7e0c2d4-1111-4abc-8def-9f8e7d6c5b4a"}'),
        ('{"id":"deadbeefcafe0123"}', '{"id":"0123deadbeefcafe9"}'),
        ('{"at":"Nov 29, 2026"}', '{"at":"January 1, 1999"}'),
        ('{"try":1,"a":1.5}', '{"a":22.75,"try":7}'),
    ],
)  # fmt: skip
def test_numbers_dates_and_ids_are_masked(one, other):
    assert exact(one) != exact(other)
    assert like(one) == like(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"q":"face"}', '{"q":"dead"}'),
        ('{"q":"may"}', '{"q":"march"}'),
        ('{"q":"a1"}', '{"q":"b1"}'),
        ('{"page":1}', '{"pages":1}'),
    ],
)
def test_words_are_not_masked(one, other):
    assert like(one) != like(other)


def test_paging_is_no_loop_because_results_differ():
    assert like('{"page":1}', "items a to m") != like('{"page":2}', "items n to z")


def test_a_call_without_a_result_has_no_masked_print():
    assert like('{"page":1}', None) == 0


def test_blocks_of_a_result_are_its_text():
    blocks = [{"type": "text", "text": "no"}, {"type": "text", "text": "ne"}]
    assert like("{}", blocks) == like("{}", "no\nne")
    assert like("{}", [{"type": "image", "source": {"data": "AA"}}]) != like("{}", [])
    assert like("{}", {"b": 1}) != like("{}", {"b": 2})


def test_long_results_are_told_apart_by_length_and_ends():
    long = "x" * 20_000
    assert like("{}", long) == like("{}", long)
    assert (
        len({like("{}", text) for text in (long, long + "x", "y" + long[1:], long[1:] + "y")}) == 4
    )


def test_exempt_tools_leave_no_prints():
    polling = prints(call("{}", name="poll"), exempt=lambda name: name == "poll")
    assert polling.exempt
    assert polling.calls == ()
    both = prints(call("{}", name="poll"), call("{}"), exempt=lambda name: name == "poll")
    assert not both.exempt
    assert len(both.calls) == 1


def test_words_alone_are_not_exempt():
    assert not turns.turn_of(turns.Said("hm", ()), canonical, lambda _: True).exempt


def test_a_sketch_of_much_text_stays_small():
    words = " ".join(f"w{number}" for number in range(100_000))
    turn = prints(call(words, words))
    assert all(0 < len(turn.sketch(half)) <= 4 * SKETCH for half in Half)


def mark(*calls, text="", scope=1, opening="find it"):
    return turns.mark(turns.Said(text, calls), scope, lambda: opening)


def test_long_ids_name_a_turn_by_themselves():
    assert mark(call("{}")) == mark(call("{}"), opening="other")
    assert mark(call("{}")) != mark(call("{}", id_="call_9876543210"))
    assert mark(call("{}")) != mark(call("{}"), scope=2)
    assert mark(call("{}"), call("{}")) == mark(call("{}"), call("{}"), opening="other")


def test_short_ids_need_the_opening_of_the_conversation():
    assert mark(call("{}", id_="call_0")) != mark(call("{}", id_="call_0"), opening="other")


def test_short_words_name_no_turn_and_long_ones_do():
    assert mark(text="Done.") == 0
    assert mark(text="word " * 20) != mark(text="weird " * 20) != 0


def test_what_travels_between_gateways_is_the_same_in_every_process():
    asked = turns.ToolCall(id="call_1", name="search", arguments='{"q":"tides"}')
    [pending] = turns.pending_of((asked,), canonical, lambda _name: False)
    turn = turns.answered_turn([pending], {"call_1": "high water at noon"})
    assert (pending.id, turn.calls, turn.kind) == (
        13256219415100999957,
        ((40752292465786504, 16250406732710188600),),
        760972013200982041,
    )
    halves = [turn.sketch(half).hex() for half in Half]
    assert halves == ["88be347c", "ea531c8e8f30afc5e2e003f0"]
