"""What an emulator is told, as values, and how they are read from a mapping with clear errors.

The caller reads YAML or JSON; here a mapping becomes an `EmulatorConfig` or a `ConfigError` that
lists every problem with its path, what is allowed and the nearest valid name. Spans are seconds
here, as in every file that people write; the meters get `Micros`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.admission.profiles import Accounting, Profile
from gateway.simulate.meters import Capacity, Dip, Quota, Shape
from gateway.units import Micros, micros

__all__ = [
    "Answers", "ConfigError", "EmulatorConfig", "Fault", "LimitRule", "ModelSpec", "Pacing",
    "from_mapping", "rules_from",
]  # fmt: skip

T = TypeVar("T")

HEADER_FAMILIES = ("auto", "openai", "anthropic", "azure", "groq", "none")
SCOPES = ("all", "model", "key", "key_model")
ACTIONS = (
    "status", "cut", "reset", "stall", "malformed", "slow_first_byte", "usage", "error_event",
    "flood", "fragment",
)  # fmt: skip
CODES = (
    "rate_limit", "insufficient_quota", "credit_balance", "overloaded", "slow_down", "capacity",
    "server_error", "bad_gateway", "gateway_timeout", "invalid_key", "permission", "timeout",
)  # fmt: skip
USAGES = ("wrong", "missing", "null", "zero")


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` says why, one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model the emulator serves.

    Attributes:
        name: As asked for.
        context: Input and output tokens at most; 0 is unlimited.
        max_output: A cap above this is refused; 0 accepts any.
        owner: `owned_by` of the OpenAI list.
    """

    name: str
    context: int = 0
    max_output: int = 0
    owner: str = "emulator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How answers look.

    Attributes:
        median, sigma: Lognormal length of a text answer in tokens.
        longest: No answer is longer, whatever the cap.
        tool_probability: Share of calls with tools that answer with a call though nothing asks for
            it.
        reasoning: Share of hidden reasoning tokens in the output; 0 is none.
        script: "latin", or "mixed" with letters of several bytes.
        prompt_cache: Whether repeated prefixes are reported, and metered, as cached.
    """

    median: float = 200.0
    sigma: float = 0.8
    longest: int = 8_192
    tool_probability: float = 0.3
    reasoning: float = 0.0
    script: str = "latin"
    prompt_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """How fast answers come.

    Attributes:
        first_byte: Seconds until the first token.
        tokens_per_second: Of one answer; 0 is at once.
        jitter: Spread of both between calls: each is multiplied by 1 ± jitter.
    """

    first_byte: float = 0.0
    tokens_per_second: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRule:
    """A quota and whom it governs. Of several rules the first that matches counts.

    Attributes:
        name: Shown in the ledger.
        models, keys: fnmatch patterns; keys are matched by their label.
        per: "all" share one quota, or each "model", "key" or "key_model" has its own.
        quota: The quota. Dips of its capacity count from the emulator's start; its own phase is not
            read.
        phase: Where fixed windows begin; None draws it from the seed, for nobody knows it.
        headers: Family of the limit headers; "auto" is the dialect's own.
        announce: False leaves limit headers out of good answers, as some providers do at times.
    """

    name: str
    models: tuple[str, ...] = ("*",)
    keys: tuple[str, ...] = ("*",)
    per: str = "all"
    quota: Quota = field(default_factory=Quota)
    phase: Micros | None = None
    headers: str = "auto"
    announce: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, and when.

    When, all conditions together (a rule that names none fires always):
        models, paths, keys: fnmatch patterns.
        nth: Which matching calls, counted from 1.
        every: Each n-th matching call; 0 does not ask.
        times: At most so many firings; 0 is unlimited.
        probability: Of firing, by seed.
    What, by `action`:
        status: answer `status` (0: the code's own) with the body of `code` (or `body` verbatim; ""
            is the status' own) and with `retry_after`, whose
            forms are seconds "2", "2s" for a date that far away, "ms:700" for `retry-after-ms`,
            anything else verbatim; `headers` are added.
        slow_first_byte: `seconds` before the head.
        stall: silence for `seconds` (0: until the client leaves), before the head, or after
            `after_bytes` or `after_events` of the body if one is given.
        cut: end the connection (FIN) after `after_bytes` or `after_events`; reset: with RST.
        malformed: a broken event after `after_events`; a plain body loses its end.
        error_event: an error inside a 200 after `after_events`, then the end without a terminal
            mark.
        usage: report it `wrong` (times `factor`), `missing`, `null` or `zero`.
        flood: one event with `size` bytes of text after `after_events`.
        fragment: write the body in pieces of `size` bytes.
    """

    action: str
    name: str = ""
    models: tuple[str, ...] = ("*",)
    paths: tuple[str, ...] = ("*",)
    keys: tuple[str, ...] = ("*",)
    nth: tuple[int, ...] = ()
    every: int = 0
    times: int = 0
    probability: float = 1.0
    status: int = 0
    code: str = ""
    body: str | None = None
    retry_after: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    after_bytes: int | None = None
    after_events: int | None = None
    usage: str = "wrong"
    factor: float = 2.0
    size: int = 0


DEFAULT_MODELS = (
    ModelSpec(name="gpt-5.4", context=400_000, max_output=128_000, owner="openai"),
    ModelSpec(name="gpt-5.4-mini", context=400_000, max_output=128_000, owner="openai"),
    ModelSpec(name="gpt-4o", context=128_000, max_output=16_384, owner="openai"),
    ModelSpec(name="gpt-4o-mini", context=128_000, max_output=16_384, owner="openai"),
    ModelSpec(name="gpt-3.5-turbo-instruct", context=16_384, max_output=4_096, owner="openai"),
    ModelSpec(name="text-embedding-3-small", context=8_191, owner="openai"),
    ModelSpec(name="text-embedding-3-large", context=8_191, owner="openai"),
    ModelSpec(name="claude-opus-5", context=200_000, max_output=128_000, owner="anthropic"),
    ModelSpec(name="claude-sonnet-4-6", context=200_000, max_output=64_000, owner="anthropic"),
    ModelSpec(name="claude-haiku-4-5", context=200_000, max_output=64_000, owner="anthropic"),
)
"""Listed by `/v1/models`; unless `models` is configured every other name is served as well."""

DEFAULT_LIMITS = (
    LimitRule(
        name="default",
        quota=Quota(shape=Shape.SLIDING, requests=10_000, tokens=2_000_000),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorConfig:
    """Everything an emulator is told. The default suits `make run`: generous, real limits.

    Attributes:
        seed: Answers, chances and phases derive from it.
        require_key: Answer 401 without a credential (with `keys`: without one of them).
        keys: Secret to label. Labels are what the ledger shows; secrets are never shown.
        models: Served; with `any_model` others are served too.
        strict_version: Messages needs `anthropic-version`, as the real one does.
        max_body: Larger requests get 413.
        events_per_write: Stream events that leave in one write when they need not be paced.
    """

    seed: int = 0
    require_key: bool = False
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    models: tuple[ModelSpec, ...] = DEFAULT_MODELS
    any_model: bool = True
    strict_version: bool = True
    answers: Answers = Answers()
    pacing: Pacing = Pacing(first_byte=0.2, tokens_per_second=80.0, jitter=0.25)
    limits: tuple[LimitRule, ...] = DEFAULT_LIMITS
    faults: tuple[Fault, ...] = ()
    max_body: int = 64 * 2**20
    events_per_write: int = 32


# --- reading ------------------------------------------------------------------------------------


class _Reader:
    """A mapping, read key by key; what was not read is unknown. Problems are collected."""

    def __init__(self, raw: object, path: str, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self._seen: list[str] = []
        self._raw: Mapping[str, Any] = {}
        if isinstance(raw, Mapping):
            self._raw = raw
        elif raw is not None:
            self._wrong("", "a mapping", raw)

    def _at(self, key: str) -> str:
        return ".".join(part for part in (self.path, key) if part) or "emulator"

    def _wrong(self, key: str, allowed: str, got: object) -> None:
        self.problems.append(f"{self._at(key)}: {allowed} is allowed, got {_show(got)}")

    def raw(self, key: str) -> Any:  # noqa: ANN401 - JSON is what it is
        """The value, or None."""
        self._seen.append(key)
        return self._raw.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is given and not null."""
        return self._raw.get(key) is not None

    def whole(self, key: str, default: int, *, least: int = 0) -> int:
        """An integer of at least that."""
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._wrong(key, f"a whole number from {least}", value)
            return default
        return value

    def maybe(self, key: str, *, least: int = 1) -> int | None:
        """An integer of at least that, or None where absent."""
        return self.whole(key, least, least=least) if self.has(key) else self.raw(key)

    def number(self, key: str, default: float, *, most: float = 1e12) -> float:
        """A number from 0 to `most`."""
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            self._wrong(key, f"a number from 0 to {most:g}", value)
            return default
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self._wrong(key, "a text", value)
            return default
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong(key, "true or false", value)
            return default
        return value

    def word(self, key: str, allowed: Sequence[str], default: str) -> str:
        """One of these words."""
        value = self.raw(key)
        if value is None:
            return default
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            self._wrong(key, "one of " + ", ".join(allowed) + hint, value)
            return default
        return str(value)

    def texts(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """One text or number, or a list of them."""
        value = self.raw(key)
        if value is None:
            return default
        items = value if isinstance(value, list | tuple) else [value]
        if not items or any(
            isinstance(i, bool) or not isinstance(i, str | int | float) for i in items
        ):
            self._wrong(key, "a text or a list of texts", value)
            return default
        return tuple(str(item) for item in items)

    def each(self, key: str, read: Callable[[_Reader], T], default: tuple[T, ...]) -> tuple[T, ...]:
        """A list of mappings, each read by `read`."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, list | tuple):
            self._wrong(key, "a list", value)
            return default
        return tuple(
            read(_Reader(item, f"{self._at(key)}[{index}]", self.problems))
            for index, item in enumerate(value)
        )

    def inner(self, key: str) -> _Reader:
        """The mapping under that key."""
        return _Reader(self.raw(key), self._at(key), self.problems)

    def done(self) -> None:
        """Every key that nobody read is a problem."""
        for key in self._raw:
            if key not in self._seen:
                near = difflib.get_close_matches(str(key), self._seen, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                known = ", ".join(dict.fromkeys(self._seen))
                self.problems.append(f"{self._at(str(key))}: unknown key{hint}; known are {known}")

    def problem(self, key: str, text: str) -> None:
        """Something else is wrong with that key."""
        self.problems.append(f"{self._at(key)}: {text}")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def from_mapping(raw: Mapping[str, Any]) -> EmulatorConfig:
    """The configuration of that mapping; absent keys keep their defaults.

    Raises:
        ConfigError: Lists every problem.
    """
    problems: list[str] = []
    top = _Reader(raw, "", problems)
    base = EmulatorConfig()
    models = top.each("models", _model, base.models)
    config = EmulatorConfig(
        seed=top.whole("seed", base.seed),
        require_key=top.flag("require_key", default=base.require_key),
        keys=_keys(top),
        models=models,
        any_model=top.flag("any_model", default=models is base.models),
        strict_version=top.flag("strict_version", default=base.strict_version),
        answers=_answers(top.inner("answers")),
        pacing=_pacing(top.inner("pacing")),
        limits=top.each("limits", _limit, base.limits),
        faults=top.each("faults", _fault, base.faults),
        max_body=top.whole("max_body", base.max_body, least=1),
        events_per_write=top.whole("events_per_write", base.events_per_write, least=1),
    )
    top.done()
    if problems:
        raise ConfigError(problems)
    return config


def rules_from(raw: object) -> tuple[Fault, ...]:
    """Fault rules from a list of mappings, or from a mapping with the one key `rules`.

    Raises:
        ConfigError: Lists every problem.
    """
    problems: list[str] = []
    top = _Reader({"rules": raw} if isinstance(raw, list) else raw, "", problems)
    rules = top.each("rules", _fault, ())
    top.done()
    if isinstance(raw, Mapping) and "rules" not in raw:
        problems.append('rules: missing; {"rules": []} removes all')
    if problems:
        raise ConfigError(problems)
    return rules


def _keys(top: _Reader) -> dict[str, str]:
    value = top.raw("keys")
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(
        isinstance(secret, str) and secret and isinstance(label, str) and label
        for secret, label in value.items()
    ):
        return dict(value)
    top.problem(
        "keys", "a mapping of secret to label is allowed, both texts"
    )  # never shows secrets
    return {}


def _model(reader: _Reader) -> ModelSpec:
    name = reader.text("name", "")
    if not name:
        reader.problem("name", "a model needs a name")
    model = ModelSpec(
        name=name,
        context=reader.whole("context", 0),
        max_output=reader.whole("max_output", 0),
        owner=reader.text("owner", "emulator"),
    )
    reader.done()
    return model


def _answers(reader: _Reader) -> Answers:
    base = Answers()
    answers = Answers(
        median=reader.number("median", base.median, most=1e6),
        sigma=reader.number("sigma", base.sigma, most=5),
        longest=reader.whole("longest", base.longest, least=1),
        tool_probability=reader.number("tool_probability", base.tool_probability, most=1),
        reasoning=reader.number("reasoning", base.reasoning, most=0.95),
        script=reader.word("script", ("latin", "mixed"), base.script),
        prompt_cache=reader.flag("prompt_cache", default=base.prompt_cache),
    )
    reader.done()
    return answers


def _pacing(reader: _Reader) -> Pacing:
    base = EmulatorConfig().pacing
    pacing = Pacing(
        first_byte=reader.number("first_byte", base.first_byte, most=3600),
        tokens_per_second=reader.number("tokens_per_second", base.tokens_per_second, most=1e6),
        jitter=reader.number("jitter", base.jitter, most=0.95),
    )
    reader.done()
    return pacing


def _limit(reader: _Reader) -> LimitRule:
    rule = LimitRule(
        name=reader.text("name", reader.path),
        models=reader.texts("models", ("*",)),
        keys=reader.texts("keys", ("*",)),
        per=reader.word("per", SCOPES, "all"),
        headers=reader.word("headers", HEADER_FAMILIES, "auto"),
        announce=reader.flag("announce", default=True),
        phase=micros(reader.number("phase", 0)) if reader.has("phase") else reader.raw("phase"),
        quota=Quota(
            shape=Shape(reader.word("shape", [s.value for s in Shape], Shape.SLIDING)),
            requests=reader.maybe("rpm"),
            tokens=reader.maybe("tpm"),
            input=reader.maybe("itpm"),
            output=reader.maybe("otpm"),
            requests_per_day=reader.maybe("rpd"),
            tokens_per_day=reader.maybe("tpd"),
            concurrency=reader.maybe("concurrency"),
            capacity=_capacity(reader),
            ramp=_ramp(reader),
            depth=reader.whole("depth", 60, least=1),
            day_offset=_day_offset(reader),
            accounting=_accounting(reader),
        ),
    )
    reader.done()
    return rule


def _day_offset(reader: _Reader) -> int:
    hours = reader.raw("day_offset_hours")
    if hours is None:
        return 0
    if isinstance(hours, bool) or not isinstance(hours, int | float) or not -24 <= hours <= 24:
        reader.problem("day_offset_hours", f"hours from -24 to 24 are allowed, got {_show(hours)}")
        return 0
    return micros(hours * 3600)


def _capacity(reader: _Reader) -> Capacity | None:
    if not reader.has("capacity"):
        reader.raw("capacity")
        return None
    inner = reader.inner("capacity")
    capacity = Capacity(
        limit=inner.whole("in_flight", 1_000_000),
        dips=inner.each("dips", _dip, ()),
    )
    inner.done()
    return capacity


def _dip(reader: _Reader) -> Dip:
    start = reader.number("start", 0)
    dip = Dip(
        start=micros(start),
        end=micros(start + reader.number("seconds", 0)),
        limit=reader.whole("in_flight", 0),
    )
    reader.done()
    return dip


def _ramp(reader: _Reader) -> tuple[int, int] | None:
    if not reader.has("ramp"):
        reader.raw("ramp")
        return None
    inner = reader.inner("ramp")
    ramp = (
        inner.whole("floor", 1_000_000, least=1),
        inner.whole("growth_percent", 150, least=100),
    )
    inner.done()
    return ramp


def _accounting(reader: _Reader) -> Accounting:
    profile = Profile(reader.word("accounting", [p.value for p in Profile], Profile.REALTIME.value))
    return Accounting(
        profile=profile,
        cached_input_counts=reader.flag("cached_input_counts", default=True),
        output_weight=reader.whole("output_weight", 1, least=1),
        refused_counts=reader.flag("refused_counts", default=True),
        missing_cap=reader.maybe("missing_cap"),
    )


def _fault(reader: _Reader) -> Fault:
    action = reader.word("action", ACTIONS, "")
    if not action and not reader.has("action"):
        reader.problem("action", "missing; one of " + ", ".join(ACTIONS) + " is allowed")
    code = reader.word("code", CODES, "")
    status = reader.whole("status", 0, least=200)
    if status > 599:
        reader.problem("status", f"200 to 599 is allowed, got {status}")
    nth = reader.texts("nth", ())
    if any(not item.isdigit() or item == "0" for item in nth):
        reader.problem("nth", "whole numbers from 1 are allowed")
        nth = ()
    headers = reader.raw("headers") or {}
    if not isinstance(headers, Mapping) or not all(isinstance(v, str) for v in headers.values()):
        reader.problem("headers", "a mapping of name to text is allowed")
        headers = {}
    fault = Fault(
        action=action,
        name=reader.text("name", reader.path),
        models=reader.texts("models", ("*",)),
        paths=reader.texts("paths", ("*",)),
        keys=reader.texts("keys", ("*",)),
        nth=tuple(int(item) for item in nth),
        every=reader.whole("every", 0),
        times=reader.whole("times", 0),
        probability=reader.number("probability", 1.0, most=1),
        status=status,
        code=code,
        body=reader.text("body", "") if reader.has("body") else reader.raw("body"),
        retry_after=reader.texts("retry_after", ()),
        headers=tuple((str(name), value) for name, value in headers.items()),
        seconds=reader.number("seconds", 0.0, most=86_400),
        after_bytes=reader.maybe("after_bytes", least=0),
        after_events=reader.maybe("after_events", least=0),
        usage=reader.word("usage", USAGES, "wrong"),
        factor=reader.number("factor", 2.0, most=1e6),
        size=reader.whole("size", 0),
    )
    if action in ("flood", "fragment") and fault.size < 1:
        reader.problem("size", f"{action} needs a size of at least 1 byte")
    reader.done()
    return fault
