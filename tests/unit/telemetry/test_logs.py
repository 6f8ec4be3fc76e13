"""Log lines: shape, bounds, and no secret in any of them."""

from __future__ import annotations

import io
import logging
import threading

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.telemetry.logs import (
    CALL_ID,
    LONGEST,
    LONGEST_TEXT,
    Foreign,
    Log,
    Redactor,
    looks_secret,
    serialized,
)


class Kept(io.BytesIO):
    """A sink that remembers after the writer is done."""

    def lines(self):
        return [orjson.loads(line) for line in self.getvalue().splitlines()]


class Stuck:
    """A pipe nobody reads."""

    def __init__(self):
        self.free = threading.Event()
        self.taken = 0

    def write(self, data):
        self.free.wait()
        self.taken += len(data)

    def flush(self):
        pass


class Broken:
    def write(self, data):
        raise BrokenPipeError

    def flush(self):
        pass


def log_to(sink, **options):
    return Log(sink, wall=lambda: 1_795_000_000.25, redact=Redactor(["s3cr3t-value"]), **options)


def lines_of(do, **options):
    sink = Kept()
    log = log_to(sink, **options)
    do(log)
    assert log.close()
    return sink.lines()


def test_an_event_is_one_line_with_time_level_name_and_fields():
    (line,) = lines_of(lambda log: log.info("policy_loaded", revision=3, files=["a.yaml"]))
    assert line == {
        "ts": "2026-11-18T11:06:40.250Z", "level": "info", "event": "policy_loaded",
        "revision": 3, "files": ["a.yaml"],
    }  # fmt: skip


def test_events_below_the_level_are_not_made():
    def do(log):
        log.debug("a")
        log.info("b")
        log.warning("c")
        log.error("d")

    assert [line["event"] for line in lines_of(do, level="warning")] == ["c", "d"]
    assert [line["event"] for line in lines_of(do, level="debug")] == ["a", "b", "c", "d"]


def test_an_unknown_level_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match="one of debug, info, warning, error"):
        log_to(Kept(), level="loud")


def test_an_event_carries_the_call_it_belongs_to():
    def do(log):
        token = CALL_ID.set("c1")
        log.warning("a")
        CALL_ID.reset(token)
        log.warning("b")

    first, second = lines_of(do)
    assert first["call"] == "c1"
    assert "call" not in second


def test_values_that_are_no_json_become_text():
    def do(log):
        log.info("x", error=ValueError("no"), raw=b"\xff", odd="\ud83d", big=1 << 70, n={1: (2,)})

    (line,) = lines_of(do)
    assert line["error"] == "no"
    assert line["raw"] == "b'\\xff'"
    assert line["odd"] == "\\ud83d"
    assert line["big"] == str(1 << 70)
    assert line["n"] == {"1": [2]}


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.integers(), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=4,
    )
)
@settings(max_examples=25)
def test_any_record_is_one_line_of_json(record):
    line = serialized(record)
    assert b"\n" not in line
    assert isinstance(orjson.loads(line), dict)


def test_long_texts_are_cut_and_long_lines_replaced():
    def do(log):
        log.info("x", text="y" * 10_000)
        log.write(serialized({"event": "huge", "x": "z" * LONGEST}))

    cut, replaced = lines_of(do)
    assert len(cut["text"]) == LONGEST_TEXT + 1
    assert replaced["event"] == "line_too_long"
    assert replaced["bytes"] > LONGEST


def test_a_full_pipe_stops_nobody_and_what_does_not_fit_is_counted():
    sink, lost = Stuck(), []
    log = log_to(sink, capacity=1_000, on_drop=lost.append)
    for _ in range(50):
        log.write(b'{"event":"%s"}' % (b"x" * 88), plain=True)  # 100 bytes
    assert log.dropped == sum(lost) == 40
    sink.free.set()
    assert log.close()
    assert sink.taken == 10 * 101


def test_a_writer_that_hangs_is_not_waited_for_at_the_end():
    sink = Stuck()
    log = log_to(sink)
    log.info("x")
    assert not log.close(patience=0.01)
    sink.free.set()
    assert log.close()


def test_a_closed_or_broken_sink_costs_lines_not_calls():
    log = log_to(Broken())
    log.info("x")
    assert log.close()
    assert log.dropped == 1
    log.info("y")
    assert log.dropped == 2


SECRETS = [
    "Authorization: Bearer s3cr3t",
    "authorization: s3cr3t",
    "'Authorization': 'Bearer s3cr3t'",
    '"authorization":"Basic s3cr3t"',
    "Proxy-Authorization: Digest username=x, response=s3cr3t",
    "x-api-key: s3cr3t",
    "X-Api-Key=s3cr3t",
    "{'x-goog-api-key': 's3cr3t'}",
    "api_key=s3cr3t&x=1",
    "https://h/v1?key=s3cr3t",
    "https://h/v1?a=b&token=s3cr3t ended",
    "GET /callback?code=s3cr3t HTTP/1.1",
    "redis://user:s3cr3t@host:6379/0",
    "Cookie: a=s3cr3t; b=s3cr3t",
    "set-cookie: session=s3cr3t; Path=/",
    "password = s3cr3t",
    "client_secret: s3cr3t",
    "refresh_token=s3cr3t",
    "sent Bearer s3cr3t to h",
    "key sk-proj-s3cr3ts3cr3t is wrong",
    "tg_dev_s3cr3t is unknown",
    "eyJhbGciOiJub25lIn0.s3cr3t0000.s3cr3t",
]


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize("nested", [False, True], ids=["text", "nested"])
def test_a_secret_is_hidden_by_name_or_shape(text, nested):
    wrapped = orjson.dumps({"inner": text}).decode() if nested else text
    (line,) = lines_of(lambda log: log.error("x", text=wrapped))
    assert "s3cr3t" not in line["text"]
    assert "***" in line["text"]


@pytest.mark.parametrize(
    "value", ["plain-secret", 'with"quote\\and', "ünicode-ß", "a+b(c)*[d]", "longer-plain-secret"]
)
def test_a_registered_value_is_hidden_wherever_it_stands(value):
    redact = Redactor(["plain-secret", 'with"quote\\and', "ünicode-ß", "a+b(c)*[d]",
                       "longer-plain-secret"])  # fmt: skip
    line = serialized({"event": "x", "text": f"before {value} after", value: [value]})
    hidden = orjson.loads(redact.values(line))
    assert hidden == {"event": "x", "text": "before *** after", "***": ["***"]}


def test_secrets_can_be_replaced_and_short_ones_are_left_alone():
    redact = Redactor(["old-secret", "ab"])
    redact.replace(["new-secret"])
    assert redact(b"old-secret new-secret ab") == b"old-secret *** ab"


def test_a_plain_line_is_still_searched_for_registered_values():
    (line,) = lines_of(lambda log: log.write(b'{"a":"s3cr3t-value"}', plain=True))
    assert line == {"a": "***"}


@pytest.mark.parametrize(
    "text",
    [
        "tokens: 12", "monkey = banana", "the key is lost", "task-1", "disk-full",
        "limit tokens_reserved=7", "authorized: yes", "spiffe://td/agent", "id: 5",
    ],
)  # fmt: skip
def test_harmless_text_stays(text):
    assert Redactor()(text.encode()) == text.encode()


@given(st.text(max_size=60))
@settings(max_examples=25)
def test_redaction_leaves_json_json(text):
    for record in ({"text": text}, {text: text}, {"password": 123, "cookie": None, "x": text}):
        orjson.loads(Redactor(["s3cr3t-value"])(serialized(record)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpt-4o-mini", False), ("sk-proj-abc", True), ("tg_dev_abc", True), ("eyJhbGci", True),
     ("Bearer x", True), ("claude-fable-5", False)],
)  # fmt: skip
def test_a_name_that_may_be_a_key_is_noticed(name, expected):
    assert looks_secret(name) is expected


def test_a_librarys_record_becomes_an_event_without_secrets():
    def do(log):
        logger = logging.Logger("aiohttp.client")  # noqa: LOG001 - one that nobody else has
        logger.addHandler(Foreign(log))
        logger.info("not worth a line")
        logger.warning("sent %s", "authorization: Bearer abc123456")
        error = ConnectionError("x-api-key: abc123456")
        logger.error("broken", exc_info=error)
        logger.error("wrong %d format", "text")

    sent, broken, wrong = lines_of(do)
    assert sent["level"] == "warning"
    assert sent["logger"] == "aiohttp.client"
    assert "abc123456" not in sent["text"]
    assert broken["level"] == "error"
    assert broken["error"].startswith("ConnectionError: x-api-key: ***")
    assert wrong["text"] == "wrong %d format"


@pytest.mark.parametrize(
    ("wall", "told"),
    [(1_795_000_000.25, ".250Z"), (1_795_000_000.0, ".000Z"), (1_795_000_001.0075, ".007Z")],
)
def test_a_stamp_has_three_digits_of_a_second(wall, told):
    log = Log(io.BytesIO(), wall=lambda: wall, redact=Redactor())
    assert log.stamp().endswith(told)
