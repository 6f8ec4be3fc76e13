"""Laws of the loop breaker over random histories: spelling never evades, a person always passes."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.call import Bytes, Call, Dialect, End, Estimate, Family, Fields, Principal, Reply
from gateway.errors import LoopDetected
from gateway.layers.guard_loops import LoopGuard
from gateway.resilience.loops import LoopRules, Stretch, Turn, sketch_of
from gateway.resilience.memory import Memory
from gateway.snapshot import AgentRule, Snapshot
from gateway.units import MICRO, Mode

CALLER = Principal(id="key:a", agent="a", tenant="t", rule=AgentRule(id="a", tenant="t"))
SPACES = (" ", "  ", "\n", "\t", " \r\n ", "\u00a0", "\u2003")


class Guarded:
    """The layer before a service that always answers."""

    def __init__(self, rules):
        self.rules = rules
        self.guard = LoopGuard()
        self.serve = self.guard(self.inner)
        self.now = MICRO

    async def inner(self, _call):
        return Reply(status=200, headers=[], source=Bytes(b""))

    def passes(self, dialect, body, session="s"):
        self.now += MICRO
        call = Call(
            id="c", dialect=dialect, family=Family.OPENAI, method="POST", path="/", target=b"/",
            headers=[], snapshot=Snapshot(revision=1, digest="", loops=self.rules),
            received=self.now,
        )  # fmt: skip
        call.parsed, call.fields, call.principal = body, Fields(model="m"), CALLER
        call.session = session
        call.estimate = Estimate(input=100, output=100, money=100)

        try:
            finish(self.whole(call))
        except LoopDetected:
            return False
        return True

    async def whole(self, call):
        await (await self.serve(call)).close(End.COMPLETE)


def finish(coroutine):
    """Run what never waits; an event loop for each of thousands would be most of the time."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")


words = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=6)
scalars = st.one_of(
    words, st.integers(-(2**53), 2**53), st.booleans(), st.none(),
    st.lists(words, min_size=2, max_size=4).map(" ".join),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=4)),
    max_leaves=8,
)
arguments = st.dictionaries(words, values, max_size=4)


def respelled(value, draw):
    """The same meaning: keys in another order, white space of strings run out."""
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return {key: respelled(value[key], draw) for key in keys}
    if isinstance(value, list):
        return [respelled(one, draw) for one in value]
    if isinstance(value, str) and " " in value:
        edge = draw(st.sampled_from(("", *SPACES)))
        return edge + value.replace(" ", draw(st.sampled_from(SPACES))) + edge
    return value


def spelled(value, draw):
    """JSON of the same meaning, spelled by chance."""
    indent = draw(st.sampled_from((None, 0, 1, 4)))
    between = draw(st.sampled_from(((",", ":"), (", ", ": "), (" ,\n", " :\t"))))
    return json.dumps(
        respelled(value, draw),
        indent=indent,
        separators=between,
        ensure_ascii=draw(st.booleans()),
    )


def history(dialect, texts):
    """Turns of one tool whose result never is the same."""
    messages = [{"role": "user", "content": "do it"}]
    for at, text in enumerate(texts):
        key = f"call_{at:012}"
        if dialect is Dialect.CHAT:
            call = {"id": key, "function": {"name": "f", "arguments": text}}
            messages += [
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": key, "content": f"{at}"},
            ]
        elif dialect is Dialect.MESSAGES:
            use = {"type": "tool_use", "id": key, "name": "f", "input": json.loads(text)}
            block = {"type": "tool_result", "tool_use_id": key, "content": f"{at}"}
            messages += [
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [block]},
            ]
        else:
            messages += [
                {"type": "function_call", "call_id": key, "name": "f", "arguments": text},
                {"type": "function_call_output", "call_id": key, "output": f"{at}"},
            ]
    return {"input" if dialect is Dialect.RESPONSES else "messages": messages}


dialects = st.sampled_from((Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES))


@settings(max_examples=60, deadline=None)
@given(st.data(), dialects, arguments, st.integers(2, 6), st.booleans())
def test_no_spelling_of_one_call_evades(data, dialect, value, limit, grown):
    rules = LoopRules(
        mode=Mode.ENFORCE, same_call=limit, same_masked=1000, alike_turns=1000, ping_pong=1000
    )
    texts = [spelled(value, data.draw) for _ in range(limit)]
    guarded = Guarded(rules)
    if grown:  # else the whole loop is seen at once
        for count in range(1, limit):
            assert guarded.passes(dialect, history(dialect, texts[:count]))
    assert not guarded.passes(dialect, history(dialect, texts))


STRICT = LoopRules(
    mode=Mode.ENFORCE, same_call=2, same_masked=2, alike_turns=2, ping_pong=2, max_iterations=1,
    tokens_per_minute=1, max_tokens=1, max_money=1,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.data(), dialects, st.lists(arguments, max_size=4), words)
def test_a_person_always_passes(data, dialect, calls, said):
    """Whatever the history, the limits and the amounts used: a user turn goes through."""
    guarded = Guarded(STRICT)
    texts = [json.dumps(one) for one in calls]
    texts += texts[-1:] * data.draw(st.integers(0, 4))
    body = history(dialect, texts)
    for _ in range(data.draw(st.integers(0, 3))):
        guarded.passes(dialect, body)
    content = data.draw(
        st.sampled_from([said, [{"type": "text", "text": said}], [{"type": "image_url"}]])
    )
    for messages in body.values():
        messages.append({"role": "user", "content": content})
    assert guarded.passes(dialect, body)
    assert guarded.passes(dialect, body)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=20), dialects, st.integers(1, 20))
def test_what_is_remembered_and_what_is_read_anew_agree(calls, dialect, step):
    """A gateway that saw every call, or every so many, decides as one that sees the last alone."""
    rules = LoopRules(mode=Mode.ENFORCE, same_masked=1000, alike_turns=1000)
    texts = [json.dumps({"n": n}) for n in calls]
    remembering = Guarded(rules)
    for count in range(1, len(texts) + 1):
        body = history(dialect, texts[:count])
        alone = Guarded(rules).passes(dialect, body)
        if count % step == 0 or count == len(texts):
            assert remembering.passes(dialect, body) is alone
            assert remembering.passes(dialect, body) is alone  # once more counts nothing


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                ("role", "content", "type", "text", "tool_calls", "function", "name", "arguments",
                 "input", "id", "call_id", "tool_call_id", "tool_use_id", "output", "custom",
                 "function_call", "action")
            ),
            st.one_of(inner, st.sampled_from(
                ("user", "assistant", "tool", "tool_use", "tool_result", "function_call",
                 "function_call_output", "x_call")
            )),
            max_size=5,
        ),
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(junk, max_size=5), max_size=3), dialects)
def test_no_history_breaks_the_layer(bodies, dialect):
    guarded = Guarded(STRICT)
    for body in bodies:
        guarded.passes(dialect, {"messages": body, "input": body})


turn_lists = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=3),
              st.integers(0, 3), st.integers(0, 50), st.booleans()),
    max_size=30,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(turn_lists, st.integers(2, 5))
def test_a_higher_limit_never_refuses_what_a_lower_one_passes(history_of_turns, limit):
    low = LoopRules(same_call=limit, same_masked=limit, alike_turns=limit, ping_pong=limit)
    high = LoopRules(
        same_call=limit + 1, same_masked=limit + 1, alike_turns=limit + 1, ping_pong=limit + 1
    )
    stretch = Stretch()
    for calls, kind, size, exempt in history_of_turns:
        turn = Turn(
            calls=() if exempt else tuple(calls), kind=kind, size=size, exempt=exempt,
            sketch=lambda _half, kind=kind: sketch_of([kind]),
        )  # fmt: skip
        stretch.fold(turn, rules=low)
        lower, higher = stretch.judge(turn, low), stretch.judge(turn, high)
        if higher is not None and higher.refuse:
            assert lower is not None
            assert lower.refuse


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1200)), max_size=60))
def test_the_memory_never_outgrows_its_limit(touches):
    memory = Memory(limit=7)
    now = 0
    for key, seconds in touches:
        now += seconds * MICRO
        memory.put(key, memory.get(key, now) or Stretch(), now)
        assert len(memory) <= 7
        assert memory.get(key, now) is not None
