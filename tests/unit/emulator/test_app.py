"""The emulator in process: books, meters, faults and bad input, on a clock that jumps."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.profiles import Accounting, Profile
from gateway.emulator.app import key_label
from gateway.emulator.config import Answers, Fault, LimitRule, ModelSpec, Pacing
from gateway.emulator.exchange import ConnectionBroken
from gateway.emulator.ledger import MAX_ROWS, Ledger
from gateway.emulator.meters import MAX_SCOPES, Limiter
from gateway.simulate.meters import Capacity, Dip, Quota, Shape
from gateway.units import MICRO
from tests.unit.emulator.driving import PLAIN, START, Driver

LONG = "All work and no play makes a dull day. " * 300


def limited(quota: Quota, **more: object) -> LimitRule:
    return LimitRule(name="l", quota=quota, **more)  # type: ignore[arg-type]


def test_the_same_call_twice_has_one_text_and_two_ids():
    driver = Driver()
    one, two = driver.chat().json, driver.chat().json
    assert one["choices"] == two["choices"]
    assert one["usage"] == two["usage"]
    assert one["id"] != two["id"]
    assert driver.chat("other").json["choices"] != one["choices"]


def test_a_tokenizer_may_be_injected_to_count_input():
    driver = Driver(tokenizer=lambda text: len(text.split()))
    usage = driver.chat("one two three").json["usage"]
    assert usage["prompt_tokens"] == 3 + 3 + 3


def test_images_and_files_are_never_counted_as_text():
    driver = Driver()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    body = {"model": "m", "messages": [{"role": "user", "content": [image]}]}
    assert driver.call("/v1/chat/completions", body).json["usage"]["prompt_tokens"] < 1_000
    block = {"type": "image", "source": {"type": "base64", "data": "A" * 400_000}}
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    assert driver.call("/v1/messages", body).json["usage"]["input_tokens"] < 2_000


def test_an_answer_is_paced_and_charged_while_it_is_produced():
    pacing = Pacing(first_byte=1, tokens_per_second=10)
    driver = Driver(replace(PLAIN, pacing=pacing))
    driver.chat(max_tokens=20)
    assert sum(driver.clock.slept) == pytest.approx(3.0)
    got = driver.chat(max_tokens=20, stream=True)
    assert sum(driver.clock.slept) == pytest.approx(6.0, abs=0.1)
    assert got.writes > 15
    seconds = driver.app.ledger(timeline=True)["timeline"]
    assert sum(second[3] for second in seconds) == driver.app.ledger()["charged"]["tokens"]
    assert len(seconds) >= 5


def test_jitter_is_a_property_of_the_call_and_not_of_the_moment():
    pacing = Pacing(first_byte=1, jitter=0.5)
    driver = Driver(replace(PLAIN, pacing=pacing))
    for text in ("a", "a", "b"):
        driver.chat(text, max_tokens=1)
    per_call = []
    total = 0.0
    for slept in driver.clock.slept:
        total += slept
        if slept < 0.25:
            per_call.append(round(total, 6))
            total = 0.0
    assert per_call[0] == per_call[1] != per_call[2]


@pytest.mark.parametrize("shape", list(Shape))
def test_requests_beyond_the_limit_are_refused_until_the_told_time_and_not_longer(shape):
    driver = Driver(replace(PLAIN, limits=(limited(Quota(shape=shape, requests=60)),)))
    served = 0
    while (got := driver.chat(max_tokens=1)).status == 200:
        served += 1
    assert served == (1 if shape is Shape.SUB_MINUTE else 60)
    wait = int(got.header("retry-after-ms") or "0")
    assert 0 < wait <= 60_001
    assert got.json["error"]["code"] == "rate_limit_exceeded"
    driver.clock.time += 120 * MICRO
    assert driver.chat(max_tokens=1).status == 200


@pytest.mark.parametrize(
    ("per", "models", "keys", "statuses"),
    [
        ("all", ["a", "b"], ["x", "x"], [200, 429]),
        ("model", ["a", "b", "a"], ["x", "y", "y"], [200, 200, 429]),
        ("key", ["a", "b", "a"], ["x", "x", "y"], [200, 429, 200]),
        ("key_model", ["a", "a", "b", "a"], ["x", "y", "x", "x"], [200, 200, 200, 429]),
    ],
)
def test_a_quota_is_shared_by_whom_its_rule_says(per, models, keys, statuses):
    driver = Driver(replace(PLAIN, limits=(limited(Quota(requests=1), per=per),)))
    seen = [
        driver.chat(model=model, headers={"authorization": f"Bearer {key}"}).status
        for model, key in zip(models, keys, strict=True)
    ]
    assert seen == statuses


def test_the_first_matching_rule_governs_and_what_none_matches_is_unlimited():
    rules = (
        limited(Quota(requests=1), models=("gpt-*",), keys=("alice",)),
        limited(Quota(requests=2), models=("gpt-*",)),
    )
    driver = Driver(replace(PLAIN, limits=rules, keys={"a": "alice"}))
    alice = {"authorization": "Bearer a"}
    assert [driver.chat(model="gpt-x", headers=alice).status for _ in range(2)] == [200, 429]
    assert [driver.chat(model="gpt-x").status for _ in range(3)] == [200, 200, 429]
    other = driver.chat(model="claude")
    assert other.status == 200
    assert other.header("x-ratelimit-limit-requests") is None


@pytest.mark.slow
def test_quotas_are_bounded_and_those_that_come_too_late_share_one():
    limiter = Limiter(replace(PLAIN, limits=(limited(Quota(requests=5), per="model"),)), START)
    scopes = {id(limiter.scope("k", f"m{i}")) for i in range(MAX_SCOPES)}
    assert len(scopes) == MAX_SCOPES
    late = limiter.scope("k", "late")
    assert limiter.scope("k", "later") is late
    assert limiter.scope("k", "m0") is not late
    assert len(limiter.scopes()) == MAX_SCOPES + 1


def test_rows_of_the_ledger_are_bounded_and_the_sums_stay_true():
    ledger = Ledger(START)
    for i in range(MAX_ROWS + 5):
        ledger.arrived(START, "k", f"m{i}")
    assert len(ledger.rows()) == MAX_ROWS + 1
    assert ledger.rows()[-1].requests == 5
    assert ledger.as_json()["requests"] == MAX_ROWS + 5


def test_the_peak_of_a_tenth_of_a_second_counts_refused_requests_too():
    driver = Driver(replace(PLAIN, limits=(limited(Quota(requests=3)),)))
    for _ in range(5):
        driver.chat(max_tokens=1)
    driver.clock.time += MICRO
    driver.chat(max_tokens=1)
    ledger = driver.app.ledger()
    assert ledger["peak_requests_per_100ms"] == 5
    assert ledger["peak_admitted_per_100ms"] == 3


def test_capacity_is_a_529_or_503_and_a_ramp_is_slow_down():
    dip = Dip(start=0, end=5 * MICRO, limit=0)
    driver = Driver(
        replace(PLAIN, limits=(limited(Quota(capacity=Capacity(limit=9, dips=(dip,)))),))
    )
    assert driver.chat().status == 503
    denied = driver.messages()
    assert (denied.status, denied.json["error"]["type"]) == (529, "overloaded_error")
    driver.clock.time += 5 * MICRO
    assert driver.chat().status == 200
    driver = Driver(replace(PLAIN, limits=(limited(Quota(ramp=(10, 150))),)))
    assert driver.chat("word " * 30).json["error"]["code"] == "slow_down"
    assert "acceleration" in driver.messages("word " * 30).json["error"]["message"]


def test_a_call_that_can_never_fit_is_told_so_without_a_retry_after():
    driver = Driver(replace(PLAIN, limits=(limited(Quota(tokens=10)),)))
    got = driver.chat("word " * 100)
    assert got.status == 429
    assert "Request too large" in got.json["error"]["message"]
    assert got.header("retry-after") is None


def test_bedrock_reserves_the_models_maximum_where_no_cap_is_named():
    quota = Quota(tokens=1_000, accounting=Accounting(profile=Profile.RESERVE_SETTLE))
    models = (ModelSpec(name="m", max_output=990),)
    driver = Driver(replace(PLAIN, limits=(limited(quota),), models=models))
    assert driver.chat("hello hello hello hello hello").status == 429
    assert driver.chat("hello", max_tokens=100).status == 200


def test_cached_input_can_be_free_of_the_meter_and_is_reported():
    account = Accounting(profile=Profile.REALTIME, cached_input_counts=False)
    driver = Driver(replace(PLAIN, limits=(limited(Quota(input=10**6, accounting=account)),)))
    first = driver.chat(LONG, max_tokens=1).json["usage"]
    before = driver.app.ledger()["charged"]["tokens"]
    second = driver.chat(LONG, max_tokens=1).json["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached >= 1_024
    spent = driver.app.ledger()["charged"]["tokens"] - before
    assert spent == second["prompt_tokens"] - cached + 1
    driver.clock.time += 301 * MICRO
    third = driver.chat(LONG, max_tokens=1).json["usage"]
    assert third["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_refused_call_leaves_nothing_in_the_prompt_cache():
    driver = Driver(replace(PLAIN, limits=(limited(Quota(requests=1)),)))
    driver.chat(max_tokens=1)
    assert driver.chat(LONG).status == 429
    driver.clock.time += 61 * MICRO
    usage = driver.chat(LONG, max_tokens=1).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_key_does_not_see_what_another_one_cached():
    driver = Driver()
    driver.chat(LONG, max_tokens=1, headers={"x-api-key": "a"})
    got = driver.chat(LONG, max_tokens=1, headers={"x-api-key": "b"})
    assert got.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_keys_are_named_by_label_or_by_a_digest_and_never_shown():
    driver = Driver(replace(PLAIN, keys={"sk-known-secret": "alice"}))
    driver.chat(headers={"authorization": "Bearer sk-known-secret"})
    driver.chat(headers={"x-api-key": "sk-other-secret"})
    driver.chat()
    rows = driver.app.ledger()["rows"]
    assert [row["key"] for row in rows] == ["alice", key_label("sk-other-secret"), "anonymous"]
    assert "secret" not in json.dumps(driver.app.ledger())


@pytest.mark.parametrize(
    ("keys", "sent", "status"),
    [({}, None, 401), ({}, "any", 200), ({"good": "g"}, "bad", 401), ({"good": "g"}, "good", 200)],
)
def test_a_key_is_asked_for_only_if_required_and_any_will_do_if_none_is_listed(keys, sent, status):
    driver = Driver(replace(PLAIN, require_key=True, keys=keys))
    headers = {"authorization": f"Bearer {sent}"} if sent else {}
    got = driver.chat(headers=headers)
    assert got.status == status
    assert driver.call("/v1/models", method="GET", headers=headers).status == status
    assert sent is None or f'"{sent}"' not in got.body.decode()


# --- faults -------------------------------------------------------------------------------------


def test_a_status_fault_spends_no_quota_and_every_retry_after_form_is_sent():
    forms = ("2", "2s", "ms:700", "soon")
    fault = Fault(
        action="status", status=503, code="slow_down", retry_after=forms,
        headers=(("X-Odd", "1"),), nth=(1,),
    )  # fmt: skip
    driver = Driver(replace(PLAIN, faults=(fault,)))
    got = driver.chat()
    assert got.status == 503
    assert got.json["error"]["code"] == "slow_down"
    assert [v for k, v in got.headers if k == "retry-after"] == [
        "2", "Mon, 21 Sep 2026 14:13:22 GMT", "soon",
    ]  # fmt: skip
    assert got.header("retry-after-ms") == "700"
    assert got.header("x-odd") == "1"
    ledger = driver.app.ledger()
    assert (ledger["admitted"], ledger["charged"]["tokens"], ledger["refused"]) == (
        0,
        0,
        {"fault": 1},
    )
    assert driver.chat().status == 200


@pytest.mark.parametrize("after", [0, 10, 10_000])
def test_in_process_a_break_raises_because_nobody_can_break_the_connection(after):
    driver = Driver(replace(PLAIN, faults=(Fault(action="reset", after_bytes=after),)))
    if after == 10_000:
        assert driver.chat(max_tokens=2).status == 200
        return
    with pytest.raises(ConnectionBroken):
        driver.chat(max_tokens=2)
    assert driver.app.ledger()["faulted"] == 1
    assert driver.app.ledger()["in_flight"] == 0


def test_a_stall_passes_and_the_answer_is_whole():
    whole = Driver().chat(stream=True).body
    for fault in (
        Fault(action="stall", seconds=30),
        Fault(action="stall", seconds=30, after_bytes=500),
        Fault(action="stall", seconds=30, after_events=5),
        Fault(action="slow_first_byte", seconds=30),
    ):
        driver = Driver(replace(PLAIN, faults=(fault,)))
        got = driver.chat(stream=True)
        assert got.body == whole
        assert got.complete
        assert sum(driver.clock.slept) == pytest.approx(30)


def test_a_malformed_plain_body_is_not_json_and_its_length_is_true():
    got = Driver(replace(PLAIN, faults=(Fault(action="malformed"),))).chat()
    assert int(got.header("content-length") or "0") == len(got.body)
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        _ = got.json


def test_an_error_fault_on_a_plain_answer_is_a_real_status():
    driver = Driver(replace(PLAIN, faults=(Fault(action="error_event", code="overloaded"),)))
    assert driver.messages().status == 529
    assert driver.app.ledger()["faulted"] == 1


def test_messages_that_break_off_have_reported_their_input_already():
    fault = Fault(action="cut", after_events=5)
    driver = Driver(replace(PLAIN, faults=(fault,)))
    with pytest.raises(ConnectionBroken):
        driver.messages(stream=True)
    ledger = driver.app.ledger()
    assert ledger["reported"]["usages"] == 0
    assert ledger["reported_before_a_cut"]["input"] == ledger["charged"]["input"] > 0


def test_rules_strike_by_model_path_key_order_count_and_chance():
    rules = (
        Fault(action="status", status=500, models=("bad*",), times=2),
        Fault(action="status", status=501, paths=("/v1/messages",)),
        Fault(action="status", status=502, keys=("alice",)),
        Fault(action="status", status=503, models=("every",), every=3),
        Fault(action="status", status=504, models=("maybe",), probability=0.5),
    )
    config = replace(PLAIN, faults=rules, keys={"a": "alice"})
    driver = Driver(config)
    assert [driver.chat(model="bad1").status for _ in range(3)] == [500, 500, 200]
    assert driver.messages().status == 501
    assert driver.chat(headers={"x-api-key": "a"}).status == 502
    assert [driver.chat(model="every").status for _ in range(6)] == [200, 200, 503] * 2
    chances = [driver.chat(model="maybe").status for _ in range(40)]
    again = Driver(config)
    assert [again.chat(model="maybe").status for _ in range(40)] == chances
    assert 8 < chances.count(504) < 32


def test_a_reset_empties_books_meters_cache_and_fault_counters():
    fault = Fault(action="status", status=500, nth=(2,))
    driver = Driver(replace(PLAIN, faults=(fault,), limits=(limited(Quota(requests=2)),)))
    assert [driver.chat().status for _ in range(3)] == [200, 500, 200]
    assert driver.chat().status == 429
    driver.app.reset()
    assert driver.app.ledger()["requests"] == 0
    assert [driver.chat().status for _ in range(3)] == [200, 500, 200]


# --- bad input ----------------------------------------------------------------------------------

USER = [{"role": "user", "content": "x"}]
PATHS = [
    "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/embeddings",
    "/v1/messages/count_tokens",
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"messages": USER}, None, None),
        ({"model": 5, "messages": USER}, "model", "invalid_type"),
        ({"model": "m\x00", "messages": USER}, "model", "invalid_value"),
        ({"model": "m"}, "messages", "missing_required_parameter"),
        ({"model": "m", "messages": "x"}, "messages", "invalid_type"),
        ({"model": "m", "messages": []}, "messages", "empty_array"),
        ({"model": "m", "messages": ["x"]}, "messages[0]", "invalid_type"),
        ({"model": "m", "messages": [{"content": "x"}]}, "messages[0].role",
         "missing_required_parameter"),
        ({"model": "m", "messages": [{"role": "boss", "content": "x"}]}, "messages[0].role",
         "invalid_value"),
        ({"model": "m", "messages": [{"role": "user"}]}, "messages[0].content", None),
        ({"model": "m", "messages": [{"role": "user", "content": 5}]}, "messages[0].content",
         "invalid_type"),
        ({"model": "m", "messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]",
         "invalid_type"),
        ({"model": "m", "messages": [{"role": "user", "content": [{"type": "odd"}]}]},
         "messages[0].content[0].type", "invalid_value"),
        ({"model": "m", "messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text", "invalid_type"),
        ({"model": "m", "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", None),
        ({"model": "m", "messages": USER, "max_tokens": 0}, "max_tokens",
         "integer_below_min_value"),
        ({"model": "m", "messages": USER, "n": 500}, "n", "integer_above_max_value"),
        ({"model": "m", "messages": USER, "n": True}, "n", "invalid_type"),
        ({"model": "m", "messages": USER, "temperature": 3}, "temperature",
         "decimal_above_max_value"),
        ({"model": "m", "messages": USER, "temperature": -1}, "temperature",
         "decimal_below_min_value"),
        ({"model": "m", "messages": USER, "temperature": "x"}, "temperature", "invalid_type"),
        ({"model": "m", "messages": USER, "stream": "yes"}, "stream", "invalid_type"),
        ({"model": "m", "messages": USER, "stream_options": {}}, "stream_options", None),
        ({"model": "m", "messages": USER, "stop": [1]}, "stop", "invalid_type"),
        ({"model": "m", "messages": USER, "stop": ["a"] * 5}, "stop", "array_above_max_length"),
        ({"model": "m", "messages": USER, "tools": [{"type": "x"}]}, "tools[0].type",
         "invalid_value"),
        ({"model": "m", "messages": USER, "tools": [{"type": "function"}]},
         "tools[0].function.name", "missing_required_parameter"),
        ({"model": "m", "messages": USER, "tool_choice": "auto"}, "tool_choice", None),
        ({"model": "m", "messages": USER, "response_format": {"type": "xml"}},
         "response_format.type", "invalid_value"),
    ],
)  # fmt: skip
def test_a_chat_body_at_fault_gets_openais_words(body, param, code):
    driver = Driver()
    got = driver.call("/v1/chat/completions", body)
    error = got.json["error"]
    assert got.status == 400
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert driver.app.ledger()["refused"] == {"400": 1}
    assert driver.app.ledger()["in_flight"] == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "model: Field required"),
        ({"model": ""}, "model: String"),
        ({"model": "m"}, "max_tokens: Field required"),
        ({"model": "m", "max_tokens": 0}, "max_tokens: must be greater"),
        ({"model": "m", "max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
        ({"model": "m", "max_tokens": 5}, "messages: Field required"),
        ({"model": "m", "max_tokens": 5, "messages": {}}, "messages: Input should be a valid list"),
        ({"model": "m", "max_tokens": 5, "messages": []}, "messages: at least one message"),
        ({"model": "m", "max_tokens": 5, "messages": [5]}, "messages.0: Input"),
        ({"model": "m", "max_tokens": 5, "messages": [{"role": "x"}]}, "messages.0.role"),
        ({"model": "m", "max_tokens": 5, "messages": [{"role": "user"}]}, "messages.0.content"),
        ({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [{}]}]},
         "messages.0.content.0.type: Field required"),
        ({"model": "m", "max_tokens": 5, "messages": USER, "system": 5}, "system: Input"),
        ({"model": "m", "max_tokens": 5, "messages": USER, "system": [{}]}, "system.0.text"),
        ({"model": "m", "max_tokens": 5, "messages": USER, "stream": 1}, "stream: Input"),
        ({"model": "m", "max_tokens": 5, "messages": USER, "temperature": 2}, "temperature: range"),
        ({"model": "m", "max_tokens": 5, "messages": USER, "tools": [{}]}, "tools.0.name"),
        ({"model": "m", "max_tokens": 5, "messages": USER, "tools": [{"name": "t"}]},
         "input_schema: Field required"),
        ({"model": "m", "max_tokens": 5, "messages": USER, "tool_choice": {"type": "tool"}},
         "not found in provided tools"),
        ({"model": "m", "max_tokens": 5, "messages": USER, "stop_sequences": "x"},
         "list of strings"),
        ({"model": "m", "max_tokens": 5000, "messages": USER,
          "thinking": {"type": "enabled", "budget_tokens": 5}}, "1024"),
        ({"model": "m", "max_tokens": 1024, "messages": USER,
          "thinking": {"type": "enabled", "budget_tokens": 1024}}, "must be greater than"),
    ],
)  # fmt: skip
def test_a_messages_body_at_fault_gets_anthropics_words(body, words):
    got = Driver().call("/v1/messages", body)
    assert got.status == 400
    assert got.json["type"] == "error"
    assert got.json["error"]["type"] == "invalid_request_error"
    assert words in got.json["error"]["message"]
    assert got.json["request_id"] == got.header("request-id")


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "input": []}, {"model": "m"}, {"model": "m", "input": [5]},
        {"model": "m", "input": [{"role": "x", "content": "y"}]},
        {"model": "m", "input": [{"role": "user", "content": 5}]},
        {"model": "m", "input": [{"role": "user", "content": [{"type": "x"}]}]},
        {"model": "m", "input": "x", "max_output_tokens": 3},
        {"model": "m", "input": "x", "tools": {}}, {"model": "m", "input": "x", "tools": [{}]},
        {"model": "m", "input": "x", "tools": [{"type": "function"}]},
        {"model": "m", "input": "x", "tool_choice": {"type": "function", "name": "t"}},
        {"model": "m", "input": "x", "tool_choice": 5},
        {"model": "m", "input": "x", "text": {"format": {}}},
        {"model": "m", "input": "x", "instructions": 5},
        {"model": "m", "input": "x", "previous_response_id": ["x"]},
    ],
)  # fmt: skip
def test_a_responses_body_at_fault_is_a_400(body):
    got = Driver().call("/v1/responses", body)
    assert got.status == 400
    assert got.json["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [{"model": "m"}, {"model": "m", "input": ""}, {"model": "m", "input": []},
     {"model": "m", "input": [[]]}, {"model": "m", "input": {}},
     {"model": "m", "input": ["x"] * 3000},
     {"model": "m", "input": "x", "encoding_format": "hex"},
     {"model": "m", "input": "x", "dimensions": 0}],
)  # fmt: skip
def test_an_embeddings_body_at_fault_is_a_400(body):
    assert Driver().call("/v1/embeddings", body).status == 400


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1,2]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}', b'"x"']
)
def test_a_body_that_is_no_object_is_a_400_in_the_dialect(path, raw):
    got = Driver().call(path, raw)
    assert got.status == 400
    assert got.json["error"]["type"] == "invalid_request_error"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "name", "tools", "function", "input",
                         "source", "parameters", "input_schema", "tool_calls", "output"]),
        inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
FIELDS = ("messages", "input", "prompt", "tools", "tool_choice", "max_tokens", "stop", "n",
          "system", "thinking", "stream", "stream_options", "response_format", "text",
          "instructions", "metadata", "temperature", "stop_sequences", "dimensions")  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(PATHS),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5),
)  # fmt: skip
def test_whatever_is_sent_the_answer_is_200_or_a_400_and_nothing_is_held(path, fields):
    driver = Driver()
    base = {"model": "m", "messages": USER, "input": "x", "prompt": "x", "max_tokens": 20}
    got = driver.call(path, json.dumps({**base, **fields}).encode())
    assert got.status in (200, 400)
    assert got.complete
    assert driver.app.ledger()["in_flight"] == 0


def test_bodies_are_bounded_before_and_after_decoding():
    driver = Driver(replace(PLAIN, max_body=1_000))
    assert driver.chat("x" * 2_000).status == 413
    bomb = gzip.compress(b" " * 50_000)
    headers = {"content-encoding": "gzip"}
    path = "/v1/chat/completions"
    assert driver.call(path, bomb, headers=headers).status == 413
    assert driver.call(path, b"junk", headers=headers).status == 400
    assert driver.call(path, bomb[:20], headers=headers).status == 400
    assert driver.call(path, b"junk", headers={"content-encoding": "zstd"}).status == 400
    assert driver.call(path, b"junk", headers={"content-encoding": "lzma"}).status == 415
    packed = gzip.compress(json.dumps({"model": "m", "messages": USER}).encode())
    assert driver.call(path, packed, headers=headers).status == 200


def test_messages_need_a_version_unless_told_otherwise():
    body = {"model": "m", "max_tokens": 5, "messages": USER}
    got = Driver().call("/v1/messages", body, headers={})
    assert (got.status, got.json["error"]["message"]) == (
        400,
        "anthropic-version: header is required",
    )
    lax = Driver(replace(PLAIN, strict_version=False))
    assert lax.call("/v1/messages", body, headers={}).status == 200
    assert Driver().call("/v1/messages/count_tokens", body, headers={}).status == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nowhere", 404), ("HEAD", "/api/hello", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405), ("GET", "/v1/files", 200), ("GET", "/emulator/nowhere", 404),
        ("GET", "/v1/models/any-name", 200), ("GET", "/v1/responses/none", 404),
    ],
)  # fmt: skip
def test_other_paths_and_methods_get_a_status_and_a_body(method, path, status):
    got = Driver().call(path, method=method)
    assert got.status == status
    assert got.json


def test_an_unknown_model_is_404_only_where_models_are_listed():
    driver = Driver(replace(PLAIN, any_model=False))
    assert driver.chat(model="gpt-4o").status == 200
    assert driver.chat(model="x").json["error"]["code"] == "model_not_found"
    assert driver.call("/v1/models/x", method="GET").status == 404
    body = {"model": "x", "messages": USER}
    assert driver.call("/v1/messages/count_tokens", body).json["error"]["type"] == "not_found_error"


def test_the_context_window_is_enforced_in_both_dialects():
    models = (ModelSpec(name="m", context=100, max_output=60),)
    driver = Driver(replace(PLAIN, models=models))
    assert driver.chat("w " * 300).json["error"]["code"] == "context_length_exceeded"
    assert (
        "prompt is too long" in driver.messages("w " * 300, max_tokens=5).json["error"]["message"]
    )
    assert (
        "exceed context limit"
        in driver.messages("w " * 100, max_tokens=55).json["error"]["message"]
    )
    assert "maximum allowed" in driver.messages(max_tokens=61).json["error"]["message"]
    assert driver.chat(max_tokens=61).json["error"]["param"] == "max_tokens"


# --- tools --------------------------------------------------------------------------------------


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("text", "more", "names"),
    [
        ("hello", {}, []),
        ("please use a tool", {}, ["?"]),
        ("call beta", {}, ["beta"]),
        ("alpha and beta", {}, ["alpha", "beta"]),
        ("alpha and beta", {"parallel_tool_calls": False}, ["alpha"]),
        ("call alpha in parallel", {}, ["alpha", "alpha"]),
        ("hello", {"tool_choice": "required"}, ["?"]),
        ("call alpha", {"tool_choice": "none"}, []),
        ("call alpha", {"tool_choice": {"type": "function", "function": {"name": "beta"}}},
         ["beta"]),
    ],
)  # fmt: skip
def test_which_tools_are_called_follows_the_text_and_the_choice(text, more, names):
    got = Driver().chat(text, tools=[tool("alpha"), tool("beta")], **more).json
    calls = got["choices"][0]["message"].get("tool_calls", [])
    assert len(calls) == len(names)
    for call, name in zip(calls, names, strict=True):
        assert name in ("?", call["function"]["name"])


def test_some_calls_answer_with_a_tool_though_nothing_asks_for_it():
    driver = Driver(replace(PLAIN, answers=Answers(tool_probability=0.3)))
    called = sum(
        "tool_calls" in driver.chat(f"hello {i}", tools=[tool("a")]).json["choices"][0]["message"]
        for i in range(100)
    )
    assert 15 < called < 45


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60), st.booleans(), st.sampled_from(["chat", "messages", "responses"]),
    st.sampled_from([0.0, 0.5]), st.integers(0, 50),
)  # fmt: skip
def test_streamed_and_plain_agree_on_tokens_and_no_cap_is_exceeded(cap, tools, dialect, hidden, n):
    answers = Answers(tool_probability=0.0, reasoning=hidden)
    spent = []
    for stream in (False, True):
        driver = Driver(replace(PLAIN, answers=answers))
        text = f"alpha {n}" if tools else f"{n}"
        if dialect == "messages":
            kit = (
                {"tools": [{"name": "alpha", "input_schema": {"type": "object"}}]} if tools else {}
            )
            driver.messages(text, max_tokens=cap, stream=stream, **kit)
        elif dialect == "chat":
            driver.chat(
                text, max_tokens=cap, stream=stream, **({"tools": [tool("alpha")]} if tools else {})
            )
        else:
            cap = max(16, cap)
            kit = {"tools": [{"type": "function", "name": "alpha"}]} if tools else {}
            driver.call("/v1/responses", {"model": "m", "input": text, "max_output_tokens": cap,
                                          "stream": stream, **kit})  # fmt: skip
        ledger = driver.app.ledger()
        assert ledger["completed"] == 1
        assert ledger["produced"] == ledger["charged"]["output"] <= cap
        spent.append(ledger["produced"])
    assert spent[0] == spent[1]
