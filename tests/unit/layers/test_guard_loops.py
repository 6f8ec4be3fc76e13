"""The loop breaker as a caller meets it: real rules, real reading, a service that counts."""

from __future__ import annotations

import asyncio
import weakref

import orjson
import pytest

from gateway.call import (
    Bytes,
    Call,
    Dialect,
    End,
    Estimate,
    Family,
    Fields,
    Kind,
    Principal,
    Reply,
    Usage,
)
from gateway.ending import MOST_READ
from gateway.errors import LoopDetected, UpstreamUnreachable
from gateway.layers.guard_loops import MOST_FOLDED, LoopGuard
from gateway.resilience.loops import TASK_IDLE, LoopRules
from gateway.resilience.memory import IDLE
from gateway.snapshot import AgentRule, Snapshot
from gateway.units import MICRO, Mode

ENFORCE = LoopRules(mode=Mode.ENFORCE)
TASK = LoopRules(mode=Mode.ENFORCE, max_tokens=1000)
AGENT = AgentRule(id="ada", tenant="t")
SAME = '{"a":1,"b":{"c":2,"d":[3]}}'


def principal(name="ada", session=""):
    return Principal(id=f"key:{name}", agent=name, tenant="t", rule=AGENT, session=session)


class Gateway:
    """A guard before a service that counts what came through."""

    def __init__(self, rules=ENFORCE):
        self.rules = rules
        self.stages: list[tuple[str, str]] = []
        self.guard = LoopGuard(on_loop=lambda rule, stage: self.stages.append((rule, stage)))
        self.passed = 0
        self.now = 1_000_000 * MICRO
        self.usage: Usage | None = None
        self.kind: Kind | None = None
        self.error: BaseException | None = None
        self.serve = self.guard(self.inner)
        self.wrap = dict
        self.tools = True

    async def inner(self, call):
        if self.error is not None:
            raise self.error
        self.passed += 1
        reply = Reply(status=200, headers=[], source=Bytes(b"{}"))
        reply.kind = self.kind
        call.usage = self.usage
        return reply

    def ask(
        self,
        body,
        *,
        dialect=Dialect.CHAT,
        session="s",
        caller=None,
        estimate=(0, 0, 0),
        parsed=True,
        headers=(),
    ):
        """The call after its end; LoopDetected is raised as a caller would get it."""
        self.now += MICRO
        call = Call(
            id="c", dialect=dialect, family=Family.OPENAI, method="POST", path="/", target=b"/",
            headers=list(headers), snapshot=Snapshot(revision=1, digest="", loops=self.rules),
            received=self.now,
        )  # fmt: skip
        # As the edge decodes it: what strings share must not depend on who made them here.
        call.parsed = self.wrap(orjson.loads(orjson.dumps(body))) if parsed else None
        call.fields = Fields(model="m", has_tools=self.tools) if parsed else None
        call.principal = caller or principal()
        call.session = session
        tokens, output, money = estimate
        call.estimate = Estimate(input=tokens, output=output, money=money)

        async def whole():
            reply = await self.serve(call)
            self.relay(reply)
            await reply.close(End.COMPLETE)

        asyncio.run(whole())
        return call

    def relay(self, reply):
        """The body reaches the client."""

    def refuses(self, body, **more):
        before = self.passed
        with pytest.raises(LoopDetected) as caught:
            self.ask(body, **more)
        assert self.passed == before
        return caught.value


PERSON = {"role": "user", "content": "find it"}


def step(number, arguments=SAME, name="search", result="nothing found", id_=None, words=None):
    """One chat turn with its result."""
    key = id_ or f"call_{number:012}"
    call = {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": words, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": key, "content": result},
    ]


def chat(*steps, first=PERSON):
    return {"model": "m", "messages": [first, *(message for step in steps for message in step)]}


def varied(count, start=0):
    return [
        step(start + n, f'{{"path":"{chr(97 + n % 26)}{chr(97 + n // 26)}"}}', "read",
             "x" * (3 ** (n % 8)) + chr(97 + n % 26)) for n in range(count)
    ]  # fmt: skip


def claude(count):
    messages = [PERSON]
    for n in range(count):
        use = {"type": "tool_use", "id": f"toolu_{n:012}", "name": "search", "input": {"a": 1}}
        reminder = {"type": "text", "text": "<system-reminder>go on</system-reminder>"}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "none"}
        messages += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, reminder]},
        ]
    return {"messages": messages}


def codex(count):
    items = [{"type": "message", **PERSON}]
    for n in range(count):
        key = f"call_{n:012}"
        items += [
            {"type": "function_call", "call_id": key, "name": "search", "arguments": SAME},
            {"type": "function_call_output", "call_id": key, "output": "none"},
        ]
    return {"input": items}


HISTORIES = {
    Dialect.CHAT: lambda count: chat(*(step(n) for n in range(count))),
    Dialect.MESSAGES: claude,
    Dialect.RESPONSES: codex,
}


@pytest.mark.parametrize("dialect", HISTORIES)
def test_a_loop_in_the_history_itself_is_refused_at_its_first_sight(dialect):
    error = Gateway().refuses(HISTORIES[dialect](4), dialect=dialect)
    assert error.because == "loops.same_call"
    assert "search(" in error.message
    assert "made 4 times since the last user message" in error.message
    assert "A new user message" in error.message
    assert error.retry_after is None


@pytest.mark.parametrize("dialect", HISTORIES)
def test_a_loop_is_warned_of_then_refused_as_it_grows(dialect):
    gateway = Gateway()
    history = HISTORIES[dialect]
    for count in (0, 1, 2):
        call = gateway.ask(history(count), dialect=dialect)
        assert call.extra_headers == []
    call = gateway.ask(history(3), dialect=dialect)
    ((name, text),) = call.extra_headers
    assert name == b"tidegate-warning"
    assert text.startswith(b"loops.same_call: The tool call search was made 3 times")
    gateway.refuses(history(4), dialect=dialect)
    assert gateway.stages == [("same_call", "warned"), ("same_call", "refused")]
    assert [note.verdict for note in call.notes] == ["warned"]


@pytest.mark.parametrize("dialect", HISTORIES)
def test_a_new_user_turn_passes_whatever_was_before(dialect):
    gateway = Gateway()
    body = HISTORIES[dialect](9)
    gateway.refuses(body, dialect=dialect)
    next(iter(body.values() if dialect is not Dialect.CHAT else [body["messages"]])).append(
        {"role": "user", "content": "try another way"}
    )
    assert gateway.ask(body, dialect=dialect).extra_headers == []


def test_after_a_user_turn_the_count_begins_anew():
    gateway = Gateway()
    old = [step(n) for n in range(9)]
    again = [[{"role": "user", "content": "once more"}]]
    for count in range(1, 4):
        gateway.ask(chat(*old, *again, *(step(20 + n) for n in range(count))))
    gateway.refuses(chat(*old, *again, *(step(20 + n) for n in range(4))))


def test_another_call_passes_after_a_refusal_and_the_old_one_does_not():
    gateway = Gateway()
    loop = [step(n) for n in range(4)]
    gateway.refuses(chat(*loop))
    other = step(5, '{"x":1}', "echo", "1")
    gateway.ask(chat(*loop, other))
    gateway.refuses(chat(*loop, other, step(6)))


def test_the_same_request_once_more_counts_nothing():
    gateway = Gateway()
    for _ in range(9):
        gateway.ask(chat(step(0), step(1)))
    assert len(gateway.ask(chat(step(0), step(1), step(2))).extra_headers) == 1
    for _ in range(9):
        gateway.refuses(chat(*(step(n) for n in range(4))))
    assert len(gateway.guard) == 1


def test_a_client_that_cuts_its_history_is_remembered():
    gateway = Gateway()
    for n in range(3):
        window = [step(at) for at in range(max(0, n - 1), n + 1)]
        gateway.ask({"messages": [message for one in window for message in one]})
    error = gateway.refuses({"messages": [*step(2), *step(3)]})
    assert "4 times" in error.message


def test_what_is_idle_is_judged_by_its_history_alone():
    gateway = Gateway()
    for n in (1, 2):
        gateway.ask({"messages": [*step(n - 1), *step(n)]})
    gateway.now += IDLE
    gateway.ask({"messages": [*step(2), *step(3)]})


@pytest.mark.parametrize("session", ["", "shared"])
def test_parallel_agents_never_add_up(session):
    gateway = Gateway()
    for agent in range(20):
        for count in (1, 2):
            gateway.ask(chat(*(step(agent * 100 + n) for n in range(count))), session=session)
    assert gateway.stages == []


def test_interleaved_agents_with_the_same_beginning_are_each_stopped():
    gateway = Gateway()
    for count in (1, 2, 3):
        for agent in range(3):
            gateway.ask(chat(*(step(agent * 100 + n) for n in range(count))), session="")
    for agent in range(3):
        gateway.refuses(chat(*(step(agent * 100 + n) for n in range(4))), session="")


def test_ids_that_name_a_place_hide_no_loop():
    gateway = Gateway()
    for count in (1, 2, 3):
        gateway.ask(chat(*(step(0, id_="call_0") for _ in range(count))))
    gateway.refuses(chat(*(step(0, id_="call_0") for _ in range(4))))
    patient = Gateway()
    for _ in range(9):
        patient.ask(chat(*(step(0, id_="call_0") for _ in range(2))))
    assert patient.stages == []
    numbered = Gateway()
    for count in (1, 2, 3):
        numbered.ask(chat(*(step(0, id_=f"call_{n}") for n in range(count))))
    numbered.refuses(chat(*(step(0, id_=f"call_{n}") for n in range(4))))


def test_missing_ids_hide_no_loop():
    gateway = Gateway()

    def legacy(count):
        messages = [PERSON]
        for _ in range(count):
            messages += [
                {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "none"},
            ]
        return {"messages": messages}

    for count in (1, 2, 3):
        gateway.ask(legacy(count))
    gateway.refuses(legacy(4))


def test_turns_of_short_words_are_judged_from_the_history():
    gateway = Gateway()
    words = {"role": "assistant", "content": "I go on working on it now."}
    end = {"role": "system", "content": "hurry"}
    for count in (1, 2, 3):
        gateway.ask({"messages": [PERSON, *[words] * count, end]})
    assert "nearly the same" in gateway.refuses({"messages": [PERSON, *[words] * 4, end]}).message
    assert len(gateway.guard) == 0


def test_nearly_the_same_turns_are_refused_and_their_tool_is_named():
    gateway = Gateway(LoopRules(mode=Mode.ENFORCE, same_masked=100))
    text = " ".join(f"word{n}" for n in range(40))
    loop = [
        step(n, f'{{"note":"{text} {word}"}}', "write", f"saved the note: {text}")
        for n, word in enumerate(("red", "blue", "green", "white"))
    ]
    for count in (1, 2, 3):
        gateway.ask(chat(*loop[:count]))
    error = gateway.refuses(chat(*loop))
    assert error.because == "loops.alike_turns"
    assert "write(" in error.message
    assert Gateway(gateway.rules).refuses(chat(*loop)).because == "loops.alike_turns"


def test_nearly_the_same_turns_are_seen_by_a_window_of_two():
    gateway = Gateway(LoopRules(mode=Mode.ENFORCE, same_masked=100))
    text = " ".join(f"word{n}" for n in range(40))
    loop = [
        step(n, f'{{"note":"{text} {word}"}}', "write", f"saved the note: {text}")
        for n, word in enumerate(("red", "blue", "green", "white"))
    ]
    for at in range(3):
        gateway.ask({"messages": [m for one in loop[max(0, at - 1) : at + 1] for m in one]})
    gateway.refuses({"messages": [m for one in loop[2:] for m in one]})


def test_counters_and_dates_do_not_hide_a_loop_but_paging_is_none():
    counters = [step(n, f'{{"try":{n},"at":"2026-11-{n + 10}"}}') for n in range(4)]
    error = Gateway().refuses(chat(*counters))
    assert error.because == "loops.same_masked"
    pages = [step(n, f'{{"page":{n}}}', result=f"page of {chr(97 + n) * 5}") for n in range(30)]
    gateway = Gateway()
    for count in range(30):
        gateway.ask(chat(*pages[:count]))
    assert gateway.stages == []


def test_a_long_honest_history_passes_and_costs_one_turn_a_call():
    gateway = Gateway()
    for count in range(60):
        gateway.ask(chat(*varied(count)))
    assert gateway.stages == []
    assert len(gateway.guard) == 1


def test_iterations_of_a_history_never_seen_before_are_all_counted():
    rules = LoopRules(mode=Mode.ENFORCE, max_iterations=MOST_FOLDED + 20)
    Gateway(rules).refuses(chat(*varied(MOST_FOLDED + 20)))
    gateway = Gateway(rules)
    call = gateway.ask(chat(*varied(MOST_FOLDED + 19)))
    assert b"max_iterations" in call.extra_headers[0][1]


def test_polling_tools_are_exempt_by_pattern():
    rules = LoopRules(mode=Mode.ENFORCE, polling_tools=("wait_*",))
    gateway = Gateway(rules)
    for count in range(1, 12):
        gateway.ask(chat(*(step(n, name="wait_job") for n in range(count))))
    gateway.refuses(chat(*(step(n, name="search") for n in range(4))))
    mixed = step(0)
    mixed[0]["tool_calls"].insert(
        0, {"id": "call_x0123456789", "function": {"name": "wait_job", "arguments": "{}"}}
    )
    error = gateway.refuses(chat(*(step(n) for n in range(20, 23)), mixed))
    assert "search(" in error.message


def test_shadow_counts_what_it_would_have_refused_and_lets_it_pass():
    gateway = Gateway(LoopRules(mode=Mode.SHADOW))
    assert gateway.ask(chat(*(step(n) for n in range(3)))).notes == []
    call = gateway.ask(chat(*(step(n) for n in range(4))))
    assert call.extra_headers == []
    assert [(note.verdict, note.because, note.detail) for note in call.notes] == [
        ("shadowed", "loops.same_call", "4 of 4")
    ]
    assert gateway.stages == [("same_call", "shadowed")]


def test_a_guard_that_reports_to_nobody_guards_all_the_same():
    gateway = Gateway()
    gateway.guard.on_loop = None
    gateway.refuses(chat(*(step(n) for n in range(4))))


def test_off_looks_at_nothing():
    gateway = Gateway(LoopRules(mode=Mode.OFF))
    gateway.ask(chat(*(step(n) for n in range(9))))
    assert gateway.stages == []
    assert len(gateway.guard) == 0


@pytest.mark.parametrize("dialect", [Dialect.EMBEDDINGS, Dialect.COMPLETIONS, Dialect.PASSTHROUGH])
def test_other_dialects_pass(dialect):
    gateway = Gateway()
    gateway.ask(chat(*(step(n) for n in range(9))), dialect=dialect)
    gateway.ask({}, parsed=False)
    assert gateway.passed == 2


def test_nothing_of_a_tools_name_can_end_a_header_line():
    name = "bad\r\nx-evil: 1\té" + "x" * 900
    call = Gateway().ask(chat(*(step(n, name=name) for n in range(3))))
    ((_, value),) = call.extra_headers
    assert not set(value) & set(b"\r\n\t")
    assert value.isascii()
    assert len(value) < 400
    error = Gateway().refuses(chat(*(step(n, SAME + " " * 900, name) for n in range(4))))
    assert len(error.message) < 900


def test_long_arguments_are_quoted_in_part():
    error = Gateway().refuses(chat(*(step(n, orjson.dumps({"q": "word " * 900}).decode())
                                     for n in range(4))))  # fmt: skip
    assert "…)" in error.message
    assert len(error.message) < 600


def test_a_call_without_a_name_is_refused_by_what_it_is():
    assert (
        "without a name" in Gateway().refuses(chat(*(step(n, name="") for n in range(4)))).message
    )


def test_the_same_two_calls_in_turn_are_refused():
    rules = LoopRules(mode=Mode.ENFORCE, same_call=100, same_masked=100)
    steps = [step(n, name=("ask_a", "ask_b")[n % 2]) for n in range(8)]
    error = Gateway(rules).refuses(chat(*steps))
    assert error.because == "loops.ping_pong"
    assert "alternate for 4 rounds" in error.message


class Weak(dict[str, object]):
    """A body that can be watched."""


@pytest.mark.parametrize("dialect", HISTORIES)
@pytest.mark.parametrize("count", [0, 2])
def test_a_waiting_call_keeps_nothing_of_its_body_alive(dialect, count):
    gateway = Gateway(LoopRules(mode=Mode.ENFORCE, max_tokens=10**9))
    seen = []

    async def waiting(call):
        watched = weakref.ref(call.parsed)
        call.parsed = None  # as admission does before it waits
        seen.append(watched())
        return await gateway.inner(call)

    gateway.serve = gateway.guard(waiting)
    gateway.wrap = Weak
    gateway.ask(HISTORIES[dialect](count), dialect=dialect)
    assert seen == [None]


# --- histories that the provider keeps ------------------------------------------------------------


class Remembering(Gateway):
    """An agent on Responses that sends results only, and the provider's answers to it."""

    def __init__(self, rules=ENFORCE, *, stream=False):
        super().__init__(rules)
        self.stream = stream
        self.number = 0
        self.calls = [("search", SAME)]
        self.status = "completed"

    async def inner(self, call):
        reply = await super().inner(call)
        self.number += 1
        response = {
            "id": f"resp_{self.number}", "status": self.status,
            "output": [
                {"type": "function_call", "call_id": f"c{self.number}_{at}", "name": name,
                 "arguments": arguments}
                for at, (name, arguments) in enumerate(self.calls)
            ],
        }  # fmt: skip
        body = orjson.dumps(response)
        if self.stream:
            reply.headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            body = (b'event: response.completed\ndata: {"type":"response.completed","response":'
                    + body + b"}\n\n")  # fmt: skip
        self.answer = body
        self.reply = reply
        return reply

    def say(self, text="find it", previous=None, **more):
        return self.send(previous, [{"role": "user", "content": text}], **more)

    def answer_calls(self, result="none", previous=None, **more):
        """Results for every call of the last answer, or of the one named."""
        number = previous or self.number
        items = [
            {"type": "function_call_output", "call_id": f"c{number}_{at}", "output": result}
            for at in range(len(self.calls))
        ]
        return self.send(number, items, **more)

    def send(self, previous, items, *, refused=False, store=None):
        body = {"model": "m", "input": items}
        if previous:
            body["previous_response_id"] = f"resp_{previous}"
        if store is not None:
            body["store"] = store
        return (self.refuses if refused else self.ask)(body, dialect=Dialect.RESPONSES)

    def relay(self, reply):
        for tap in reply.taps:
            half = len(self.answer) // 2
            tap(self.answer[:half])
            tap(self.answer[half:])


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_that_only_the_provider_remembers_is_refused(stream):
    gateway = Remembering(stream=stream)
    gateway.say()
    gateway.answer_calls()
    gateway.answer_calls()
    warned = gateway.answer_calls()
    assert warned.extra_headers[0][1].startswith(
        b"loops.same_call: The tool call search was made 3"
    )
    error = gateway.answer_calls(refused=True)
    assert "The tool call search was made 4 times" in error.message
    gateway.answer_calls(refused=True)
    assert len(gateway.guard) == 1
    gateway.say("another way", previous=gateway.number)
    gateway.answer_calls()


def test_the_same_continuation_once_more_counts_nothing():
    gateway = Remembering()
    gateway.say()
    gateway.error = UpstreamUnreachable("gone")
    for _ in range(9):
        with pytest.raises(UpstreamUnreachable):
            gateway.answer_calls()
    gateway.error = None
    gateway.answer_calls()
    assert gateway.stages == []


def test_a_conversation_found_in_the_middle_is_counted_from_there():
    gateway = Remembering()
    gateway.number = 5
    for _ in range(3):
        gateway.answer_calls()
    gateway.answer_calls()
    gateway.answer_calls(refused=True)


def test_iterations_count_where_calls_are_unknown():
    gateway = Remembering(LoopRules(mode=Mode.ENFORCE, max_iterations=3))
    gateway.number = 5
    gateway.answer_calls()
    gateway.answer_calls()
    error = gateway.answer_calls(refused=True)
    assert error.because == "loops.max_iterations"


def test_polling_by_continuation_is_exempt():
    gateway = Remembering(LoopRules(mode=Mode.ENFORCE, polling_tools=("poll",)))
    gateway.calls = [("poll", "{}")]
    gateway.say()
    for _ in range(9):
        gateway.answer_calls()
    assert gateway.stages == []


def test_continuations_with_other_calls_pass():
    gateway = Remembering()
    gateway.say()
    for number in range(12):
        gateway.calls = [("read", f'{{"path":"{chr(97 + number) * 3}"}}')]
        gateway.answer_calls(result=f"{number}" * (3 ** (number % 7)))
    assert gateway.stages == []


def test_a_failed_answer_is_not_remembered_and_a_final_one_ends_the_stretch():
    gateway = Remembering()
    gateway.status = "failed"
    gateway.say()
    assert len(gateway.guard) == 0
    gateway.status = "completed"
    gateway.say()
    assert len(gateway.guard) == 1
    gateway.calls = []
    gateway.send(gateway.number, [
        {"type": "function_call_output", "call_id": f"c{gateway.number}_0", "output": "x"}
    ])  # fmt: skip
    assert len(gateway.guard) == 0


def test_answers_that_nobody_can_continue_are_not_read():
    gateway = Remembering()
    gateway.say(store=False)
    assert gateway.reply.taps == []
    gateway.kind = Kind.CALLER
    gateway.say()
    assert gateway.reply.taps == []
    gateway.kind = None
    gateway.tools = False
    gateway.say()
    assert gateway.reply.taps == []


def test_an_answer_too_long_or_no_json_is_not_remembered():
    gateway = Remembering()
    gateway.say()
    ending = gateway.reply.taps[0]
    ending(b"x")
    assert ending.response() == {}
    long = type(ending)([])
    for chunk in (b'{"id":"r"', b" " * MOST_READ, b"}"):
        long(chunk)
    assert long.response() == {}
    fresh = type(ending)([])
    fresh(b"[]")
    assert fresh.response() == {}


def test_the_operator_resets_what_the_provider_remembers():
    gateway = Remembering()
    gateway.say()
    for _ in range(3):
        gateway.answer_calls()
    gateway.answer_calls(refused=True)
    assert gateway.guard.reset("s") == 1
    gateway.answer_calls()


def test_amounts_count_across_continuations():
    gateway = Remembering(TASK)
    gateway.usage = Usage(input=500, output=0)
    gateway.say()
    gateway.answer_calls()
    assert gateway.answer_calls(refused=True).because == "loops.max_tokens"
    gateway.say("go on", previous=gateway.number)


# --- the operator ---------------------------------------------------------------------------------


def test_the_operator_lets_a_conversation_go_on():
    gateway = Gateway()
    loop = [step(n) for n in range(4)]
    gateway.refuses(chat(*loop), session="one")
    gateway.refuses(chat(*loop), session="two", caller=principal("bob"))
    assert gateway.guard.reset("one") == 1
    gateway.ask(chat(*loop), session="one")
    gateway.ask(chat(*loop, step(4)), session="one")
    gateway.refuses(chat(*loop), session="two", caller=principal("bob"))
    assert gateway.guard.reset() == 2
    gateway.ask(chat(*loop), session="two", caller=principal("bob"))
    assert gateway.guard.reset("unknown") == 0


def test_a_session_of_the_credential_counts_before_the_headers():
    gateway = Gateway()
    gateway.refuses(chat(*(step(n) for n in range(4))), caller=principal(session="claim"))
    assert gateway.guard.reset("s") == 0
    assert gateway.guard.reset("claim") == 1


# --- amounts --------------------------------------------------------------------------------------


def test_a_task_that_used_its_tokens_is_refused_until_the_user_speaks():
    gateway = Gateway(TASK)
    gateway.ask(chat(), estimate=(300, 100, 0))
    call = gateway.ask(chat(*varied(1)), estimate=(300, 100, 0))
    assert call.extra_headers == []
    call = gateway.ask(chat(*varied(2)), estimate=(300, 100, 0))
    assert b"max_tokens" in call.extra_headers[0][1]
    error = gateway.refuses(chat(*varied(3)), estimate=(1, 0, 0))
    assert error.because == "loops.max_tokens"
    assert "used 1200 tokens since the last user message, of 1000 allowed" in error.message
    spoken = [*varied(3), [{"role": "user", "content": "go on"}]]
    gateway.ask(chat(*spoken), estimate=(500, 0, 0))
    gateway.ask(chat(*spoken, *varied(1, 50)), estimate=(400, 0, 0))


def test_a_subagent_of_the_session_passes_and_resets_nothing():
    gateway = Gateway(TASK)
    gateway.ask(chat(), estimate=(1000, 0, 0))
    gateway.refuses(chat(*varied(1)))
    gateway.ask(chat(first={"role": "user", "content": "you are a helper"}))
    gateway.refuses(chat(*varied(1)))


def test_estimates_become_what_was_used():
    gateway = Gateway(TASK)
    gateway.usage = Usage(input=100, output=50, cache_read=200, cache_write=50)
    for n in range(3):
        gateway.ask(chat(*varied(n)), estimate=(5000, 5000, 0))
    gateway.refuses(chat(*varied(3)))


@pytest.mark.parametrize("error", [UpstreamUnreachable("gone"), asyncio.CancelledError()])
def test_a_call_that_failed_costs_nothing(error):
    gateway = Gateway(TASK)
    gateway.error = error
    with pytest.raises(type(error)):
        gateway.ask(chat(*varied(1)), estimate=(5000, 0, 0))
    gateway.error = None
    gateway.ask(chat(*varied(1)), estimate=(0, 0, 0))


def test_a_refused_answer_costs_nothing_and_a_silent_one_its_estimate():
    gateway = Gateway(TASK)
    gateway.kind = Kind.QUOTA
    gateway.ask(chat(*varied(1)), estimate=(5000, 0, 0))
    gateway.kind = None
    gateway.ask(chat(*varied(1)), estimate=(5000, 0, 0))
    gateway.refuses(chat(*varied(2)))


def test_tokens_per_minute_come_back_with_time():
    gateway = Gateway(LoopRules(mode=Mode.ENFORCE, tokens_per_minute=6000))
    gateway.ask(chat(*varied(1)), estimate=(7000, 0, 0))
    error = gateway.refuses(chat(*varied(2)))
    assert "tokens within a minute, of 6000 allowed" in error.message
    gateway.now += 20 * MICRO
    gateway.ask(chat(*varied(2)))


def test_money_of_a_task_is_told_in_dollars():
    gateway = Gateway(LoopRules(mode=Mode.ENFORCE, max_money=2_000_000))
    gateway.usage = Usage(input=1, output=1, money=2_500_000)
    gateway.ask(chat(*varied(1)), estimate=(1, 1, 1))
    assert "cost 2.50 USD" in gateway.refuses(chat(*varied(2))).message


def test_runs_without_a_session_are_told_apart_by_their_first_message():
    gateway = Gateway(TASK)
    gateway.ask(chat(*varied(1)), session="", estimate=(1000, 0, 0))
    gateway.refuses(chat(*varied(2)), session="")
    other = {"role": "user", "content": "another task"}
    gateway.ask(chat(*varied(2), first=other), session="")
    gateway.ask(chat(*varied(2)), session="", caller=principal("bob"))


def test_a_loop_is_named_before_an_amount():
    gateway = Gateway(TASK)
    gateway.ask(chat(step(0)), estimate=(1000, 0, 0))
    assert gateway.refuses(chat(*(step(n) for n in range(4)))).because == "loops.same_call"
    assert gateway.refuses(chat(*(step(n) for n in range(3)))).because == "loops.max_tokens"


# --- beyond a stretch ---


def told(text):
    return {"messages": [{"role": "user", "content": text}]}


def within(workflow, agent=""):
    labels = f"workflow.id={workflow}" + (f",agent.id={agent}" if agent else "")
    return ((b"baggage", labels.encode()),)


def rally(gateway, rounds, *, workflow="w", who=("ada", "bob"), texts=("please check", "done")):
    """Two agents answer each other, each of them a user turn to the other."""
    for number in range(rounds):
        for name, text in zip(who, texts, strict=True):
            gateway.ask(
                told(f"{text} (attempt {number})"), session="", caller=principal(name),
                headers=within(workflow),
            )  # fmt: skip


def test_two_agents_that_say_the_same_to_each_other_are_warned_then_refused():
    gateway = Gateway()
    rally(gateway, 3)
    assert gateway.stages == [("ping_pong", "warned")]
    again = told("please check (attempt 9)")
    gateway.ask(again, session="", caller=principal(), headers=within("w"))
    refused = gateway.refuses(
        told("done (attempt 9)"), session="", caller=principal("bob"), headers=within("w")
    )
    assert "Two agents of the workflow" in str(refused)
    assert refused.because == "loops.ping_pong"


def test_agents_that_share_a_key_are_told_apart_by_their_own_names():
    gateway = Gateway()
    for number in range(8):
        agent = "ab"[number % 2]
        ask = gateway.refuses if number == 7 else gateway.ask
        ask(told(f"to {agent}"), session="", headers=within("w", agent))


def test_something_new_ends_a_rally_and_other_workflows_are_no_part_of_it():
    gateway = Gateway()
    rally(gateway, 2)
    gateway.ask(told("something else"), session="", caller=principal(), headers=within("w"))
    rally(gateway, 2)
    rally(gateway, 2, workflow="v")
    assert gateway.stages == []


def test_a_repeated_request_is_no_round():
    gateway = Gateway()
    for name, text in zip(("ada", "bob"), ("please check", "done"), strict=True):
        for _ in range(9):
            gateway.ask(told(text), session="", caller=principal(name), headers=within("w"))
    assert gateway.stages == []


def test_one_agent_alone_and_calls_without_a_workflow_are_no_rally():
    gateway = Gateway()
    rally(gateway, 9, who=("ada", "ada"))
    for _ in range(9):
        gateway.ask(told("please check"), session="", caller=principal())
        gateway.ask(told("done"), session="", caller=principal("bob"))
    assert gateway.stages == []


def test_the_operator_ends_a_rally_by_the_workflows_name():
    gateway = Gateway()
    rally(gateway, 3)
    assert gateway.guard.reset("w") == 1
    rally(gateway, 3)
    assert gateway.stages == [("ping_pong", "warned")] * 2


BUDGET = LoopRules(mode=Mode.ENFORCE, task_tokens=1000, task_money=1_000_000)


def test_a_tasks_budget_outlasts_user_turns_and_agents():
    gateway = Gateway(BUDGET)
    gateway.usage = Usage(input=300, output=100)
    for name in ("ada", "bob"):
        gateway.ask(told(f"hello {name}"), caller=principal(name), headers=within("w"))
    assert gateway.stages == [], "800 of 1000 are a warning to the next call"
    gateway.ask(told("go on"), headers=within("w"))
    assert gateway.stages == [("task_tokens", "warned")]
    refused = gateway.refuses(told("go on"), headers=within("w"))
    assert "1200 tokens, of 1000 allowed in all" in str(refused)
    assert "operator" in str(refused)
    assert refused.because == "loops.task_tokens"
    gateway.ask(told("go on"), headers=within("another"))


def test_a_tasks_money_is_limited_as_well():
    gateway = Gateway(BUDGET)
    gateway.usage = Usage(input=1, output=1, money=1_100_000)
    gateway.ask(told("hello"), headers=within("w"))
    assert "The task cost 1.10 USD" in str(gateway.refuses(told("on"), headers=within("w")))


def test_without_a_workflow_the_session_is_the_task():
    gateway = Gateway(BUDGET)
    gateway.usage = Usage(input=900, output=200)
    gateway.ask(told("hello"), session="s1")
    gateway.refuses(told("and on"), session="s1")
    gateway.ask(told("and on"), session="s2")


def test_the_operator_gives_a_task_its_budget_anew():
    gateway = Gateway(BUDGET)
    gateway.usage = Usage(input=900, output=200)
    gateway.ask(told("hello"), headers=within("w"))
    gateway.refuses(told("on"), headers=within("w"))
    assert gateway.guard.reset("w") == 1
    gateway.ask(told("on"), headers=within("w"))


def test_a_task_is_remembered_for_a_day_and_its_failed_calls_cost_nothing():
    gateway = Gateway(BUDGET)
    gateway.error = UpstreamUnreachable("away")
    with pytest.raises(UpstreamUnreachable):
        gateway.ask(told("hello"), headers=within("w"), estimate=(2000, 0, 0))
    gateway.error, gateway.usage = None, Usage(input=900, output=200)
    gateway.ask(told("hello"), headers=within("w"))
    gateway.now += IDLE + MICRO
    gateway.refuses(told("on"), headers=within("w"))
    gateway.now += TASK_IDLE + MICRO
    gateway.ask(told("on"), headers=within("w"))
