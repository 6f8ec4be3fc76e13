"""Metered calls: parse, strike, meter, plan, deliver, account.

A call that was admitted has a `Tab`, and whatever happens to it, cancellation included, the tab is
closed exactly once: what it held is given back, what it produced is in the books.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson

from gateway.admission.profiles import Profile
from gateway.clock import Clock
from gateway.emulator import chat, messages, responses
from gateway.emulator.answer import Answer, Planner
from gateway.emulator.ask import Ask, Prompt, Rejected
from gateway.emulator.chat import Frame
from gateway.emulator.config import EmulatorConfig, Fault, ModelSpec
from gateway.emulator.exchange import ConnectionBroken, Ended, Exchange
from gateway.emulator.faults import Faults, scripted
from gateway.emulator.ledger import Ledger, Row
from gateway.emulator.meters import ANTHROPIC, OPENAI, HeaderPairs, Limiter, Scope, error_body
from gateway.emulator.prompt_cache import Counted, PromptCache
from gateway.emulator.rejections import (
    cap_too_large,
    context_exceeded,
    json_object,
    unknown_model,
)
from gateway.emulator.replies import JSON_TYPE, Replies
from gateway.emulator.text import Draw, Tokenizer, as_json
from gateway.simulate.meters import Demand, Refusal, Ticket
from gateway.units import Micros

PLAIN_STEPS = 4
"""A plain answer's output is metered in so many steps while it is produced."""

UNCACHED = ("embeddings", "completions")
"""Routes whose providers do not cache prompts."""

SSE_HEADERS: HeaderPairs = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


@dataclass(frozen=True, slots=True)
class Route:
    """A metered route: how its dialect reads and writes."""

    name: str
    dialect: str
    parse: Callable[[Mapping[str, Any], Prompt], Ask]
    body: Callable[[Ask, Answer], dict[str, Any]]
    frames: Callable[[Ask, Answer, bytes | None, bytes | None], Iterator[Frame]]
    usage: Callable[[Counted], dict[str, Any]]


def _without_first(
    frames: Callable[[Ask, Answer, bytes | None], Iterator[Frame]],
) -> Callable[[Ask, Answer, bytes | None, bytes | None], Iterator[Frame]]:
    """Only Messages reports usage at both ends of a stream."""
    return lambda ask, answer, last, _: frames(ask, answer, last)


ROUTES = {
    "/v1/chat/completions": Route(
        "chat", OPENAI, chat.parse_chat, chat.chat_body, _without_first(chat.chat_frames),
        chat.chat_usage,
    ),
    "/v1/completions": Route(
        "completions", OPENAI, chat.parse_completions, chat.completions_body,
        _without_first(chat.completions_frames), chat.chat_usage,
    ),
    "/v1/responses": Route(
        "responses", OPENAI, responses.parse_responses, responses.responses_body,
        _without_first(responses.responses_frames), responses.responses_usage,
    ),
    "/v1/messages": Route(
        "messages", ANTHROPIC, messages.parse_messages, messages.messages_body,
        messages.messages_frames, messages.messages_usage,
    ),
}  # fmt: skip


class Tab:
    """The account of one admitted call: what was charged, until it is over."""

    __slots__ = ("_clock", "_ledger", "_produced", "_scope", "_ticket", "counted", "row")

    def __init__(
        self, clock: Clock, ledger: Ledger, row: Row, scope: Scope, opened: tuple[Ticket, Counted]
    ) -> None:
        self._clock = clock
        self._ledger = ledger
        self._produced = 0
        self._scope = scope
        self._ticket, self.counted = opened
        self.row = row
        ledger.admitted(row)
        account = scope.provider.quota.accounting
        charges = account.profile is not Profile.NONE
        counted = self.counted
        ledger.charge(
            self._ticket.at, row, scope.provider.charged_tokens(self._ticket),
            input=counted.input if charges else 0,
            cache_write=counted.cache_write if charges else 0,
            cache_read=counted.cache_read if charges and account.cached_input_counts else 0,
            output=self._ticket.output,
        )  # fmt: skip

    def produce(self, tokens: int) -> None:
        """So many tokens more were produced."""
        if tokens > 0:
            self._produced += tokens
            self.row.produced += tokens
            self._adjust(lambda now: self._scope.provider.produce(now, self._ticket, tokens))

    def _adjust(self, step: Callable[[Micros], None]) -> None:
        provider, ticket = self._scope.provider, self._ticket
        tokens, output = provider.charged_tokens(ticket), ticket.output
        now = self._clock.now()
        step(now)
        change = provider.charged_tokens(ticket) - tokens
        if change or ticket.output != output:
            self._ledger.charge(now, self.row, change, output=ticket.output - output)

    def close(self, how: str) -> None:
        """The call is over, with what it has produced."""
        self._adjust(lambda now: self._scope.provider.finish(now, self._ticket, self._produced))
        self._ledger.over(self.row, how)


@dataclass(slots=True)
class State:
    """What a reset replaces. A call keeps the books and the quota it began with."""

    limiter: Limiter
    cache: PromptCache
    faults: Faults
    books: Ledger


def fresh(config: EmulatorConfig, now: Micros) -> State:
    """Full meters, empty books, an empty prompt cache, the configured faults from their start."""
    return State(
        Limiter(config, now), PromptCache(), Faults(config.faults, config.seed), Ledger(now)
    )


class Calls:
    """Answers calls of the metered routes."""

    def __init__(
        self, config: EmulatorConfig, clock: Clock, *, tokenizer: Tokenizer, replies: Replies
    ) -> None:
        self.config = config
        self.state = fresh(config, clock.now())
        self.stored = responses.Stored()
        self._clock = clock
        self._tokenizer = tokenizer
        self._replies = replies
        self._planner = Planner(config.seed, config.answers)
        self._embeddings = chat.Embeddings()
        self._models = {model.name: model for model in config.models}
        self._serial = 0

    def prompt(self) -> Prompt:
        """An empty prompt that counts as this emulator does."""
        return Prompt(self._tokenizer)

    def spec(self, model: str, dialect: str) -> ModelSpec:
        """The model of that name.

        Raises:
            Rejected: It is not served.
        """
        spec = self._models.get(model)
        if spec is None:
            if not self.config.any_model:
                raise unknown_model(model[:256], dialect)
            spec = ModelSpec(name=model)
        return spec

    async def call(self, exchange: Exchange, route: Route, key: str) -> None:
        """A call of a text route."""
        raw = await exchange.read(self.config.max_body)
        ask = self._parse(exchange, raw, key, route)
        admitted = await self._admit(exchange, route.name, route.dialect, key, ask)
        if admitted is None:
            return
        tab, scope = admitted
        with _closing(tab):
            await self._deliver(exchange, route, ask, (tab, scope), tab.produce)

    def _parse(self, exchange: Exchange, raw: bytes, key: str, route: Route) -> Ask:
        model = "(none)"
        try:
            body = json_object(raw, route.dialect)
            if isinstance(body.get("model"), str):
                model = body["model"][:256]
            if route.dialect == ANTHROPIC and self.config.strict_version:
                need_version(exchange)
            ask = route.parse(body, self.prompt())
            if route.name == "responses":
                self.stored.continued(ask)
            self._check_model(ask, route.dialect)
        except Rejected as rejected:
            now = self._clock.now()
            self.state.books.refused(
                now, self.state.books.arrived(now, key, model), str(rejected.status)
            )
            raise
        return ask

    def _check_model(self, ask: Ask, dialect: str) -> None:
        spec = self.spec(ask.model, dialect)
        cap = ask.cap or 0
        if spec.max_output and cap > spec.max_output:
            raise cap_too_large(spec, cap, dialect)
        if spec.context and ask.prompt.tokens + cap > spec.context:
            raise context_exceeded(spec, ask.prompt.tokens, cap, dialect)

    async def _admit(
        self, exchange: Exchange, route: str, dialect: str, key: str, ask: Ask
    ) -> tuple[Tab, Scope] | None:
        """The call's account and quota; None once it was refused."""
        clock, books = self._clock, self.state.books
        now = clock.now()
        row = books.arrived(now, key, ask.model)
        fault = self.state.faults.strike(exchange.path, ask.model, key)
        if fault is not None and fault.action == "status":
            books.refused(now, row, "fault")
            await self._replies.script(exchange, fault, dialect)
            return None
        scope = self.state.limiter.scope(key, ask.model)
        cached = self.config.answers.prompt_cache and route not in UNCACHED
        if cached:
            counted = self.state.cache.look(now, key, ask)
        else:
            counted = Counted(input=ask.prompt.tokens)
        outcome = scope.provider.arrive(now, self._demand(ask, counted, scope))
        if isinstance(outcome, Refusal):
            books.refused(now, row, outcome.dimension)
            await self._replies.deny(exchange, outcome, scope, (dialect, route, ask.model))
            return None
        if cached:
            self.state.cache.remember(now, key, ask)
        exchange.fault = fault
        return Tab(clock, books, row, scope, (outcome, counted)), scope

    def _demand(self, ask: Ask, counted: Counted, scope: Scope) -> Demand:
        cap = ask.cap
        account = scope.provider.quota.accounting
        if cap is None and account.profile is Profile.RESERVE_SETTLE and not account.missing_cap:
            # The commonest cause of throttling at Bedrock: an unset cap reserves the model's
            # maximum.
            spec = self._models.get(ask.model)
            cap = spec.max_output if spec is not None and spec.max_output else None
        return Demand(
            input=counted.input, cache_read=counted.cache_read, cache_write=counted.cache_write,
            cap=None if cap is None else cap * ask.n,
        )  # fmt: skip

    async def _deliver(
        self,
        exchange: Exchange,
        route: Route,
        ask: Ask,
        opened: tuple[Tab, Scope],
        produce: Callable[[int], None],
    ) -> None:
        tab, scope = opened
        self._serial += 1
        answer = self._planner.plan(ask, serial=self._serial, created=int(self._clock.wall()))
        counted = Counted(
            input=tab.counted.input, cache_read=tab.counted.cache_read,
            cache_write=tab.counted.cache_write, output=answer.tokens, reasoning=answer.reasoning,
        )  # fmt: skip
        told, usage = _report(counted, route, exchange.fault)
        pacing = self.config.pacing
        draw = Draw(self.config.seed, "pace", answer.id[:16])
        rate = pacing.tokens_per_second * draw.spread(pacing.jitter) * ask.n
        await exchange.wait(pacing.first_byte * draw.spread(pacing.jitter))
        if ask.stream:
            opening = _report(
                Counted(
                    input=counted.input, cache_read=counted.cache_read,
                    cache_write=counted.cache_write, output=min(1, counted.output),
                ), route, exchange.fault,
            )  # fmt: skip
            frames = route.frames(ask, answer, usage if ask.include_usage else None, opening[1])
            try:
                await self._stream(
                    exchange, route, self._heads(scope, route), frames, (rate, produce)
                )
            except BaseException:
                if route.name == "messages" and exchange.written and opening[0] is not None:
                    self.state.books.report_begun(tab.row, opening[0])
                raise
            reported = ask.include_usage
        else:
            await self._plain(exchange, route, ask, answer, (scope, usage, rate, produce))
            reported = True
        if told is not None and reported:
            self.state.books.report(tab.row, told)
        if route.name == "responses" and ask.body.get("store") is not False:
            body = _body_with(responses.responses_body(ask, answer), usage)
            self.stored.keep(f"resp_{answer.id}", body, counted.prompt + counted.output)

    async def _stream(
        self,
        exchange: Exchange,
        route: Route,
        headers: HeaderPairs,
        frames: Iterator[Frame],
        pace: tuple[float, Callable[[int], None]],
    ) -> None:
        rate, produce = pace
        await exchange.head(200, headers + SSE_HEADERS)
        fault = exchange.fault
        per_write = self.config.events_per_write
        if fault is not None and fault.after_events is not None:
            await self._broken_stream(exchange, route, fault, frames, pace)
        else:
            await exchange.stream(frames, rate=rate, per_write=per_write, produced=produce)

    async def _broken_stream(
        self,
        exchange: Exchange,
        route: Route,
        fault: Fault,
        frames: Iterator[Frame],
        pace: tuple[float, Callable[[int], None]],
    ) -> None:
        """A stream with something wrong after `after_events` events."""
        rate, produce = pace
        before = list(islice(frames, fault.after_events))
        insert = b""
        match fault.action:
            case "malformed":
                insert = b'data: {"id":"broken","choices":[{"delta":\n\n'
            case "flood":
                insert = _flood(route, fault.size)
            case "error_event":
                insert = _error_event(route, fault)
            case _:
                pass
        await exchange.stream(before, rate=rate, per_write=1, produced=produce, ends=False)
        if insert:
            await exchange.body(insert, more=fault.action != "error_event")
            if fault.action == "error_event":
                raise Ended("faulted")
        elif fault.action in ("stall", "cut", "reset"):
            await exchange.strike(fault)
        await exchange.stream(frames, rate=rate, per_write=1, produced=produce)

    async def _plain(
        self,
        exchange: Exchange,
        route: Route,
        ask: Ask,
        answer: Answer,
        rest: tuple[Scope, bytes | None, float, Callable[[int], None]],
    ) -> None:
        scope, usage, rate, produce = rest
        body = _body_with(route.body(ask, answer), usage)
        tokens = answer.tokens
        if rate and tokens:
            for step in range(1, PLAIN_STEPS + 1):
                part = tokens * step // PLAIN_STEPS - tokens * (step - 1) // PLAIN_STEPS
                await exchange.wait(part / rate)
                produce(part)
        else:
            produce(tokens)
        fault = exchange.fault
        if fault is not None:
            if fault.action == "error_event":
                await self._replies.script(exchange, fault, route.dialect)
                raise Ended("faulted")
            if fault.action == "malformed":
                body = body[: len(body) * 2 // 3]
            elif fault.action == "flood":
                body = b" " * fault.size + body
        length = (b"content-length", b"%d" % len(body))
        # Asked now: a realtime meter has taken the output by the time the head leaves.
        await exchange.head(200, [*self._heads(scope, route), JSON_TYPE, length])
        await exchange.body(body, more=False)

    def _heads(self, scope: Scope, route: Route) -> HeaderPairs:
        limits = self._replies.limits(scope, route.dialect, route.name)
        return self._replies.headers(route.dialect) + limits

    # --- embeddings, counting -------------------------------------------------------------------

    async def embed(self, exchange: Exchange, key: str) -> None:
        """A call of the embeddings route."""
        raw = await exchange.read(self.config.max_body)
        parsed: list[tuple[list[str], int, bool]] = []

        def parse(body: Mapping[str, Any], prompt: Prompt) -> Ask:
            ask, texts, dimensions, encoded = chat.parse_embeddings(body, prompt)
            parsed.append((texts, dimensions, encoded))
            return ask

        route = Route("embeddings", OPENAI, parse, _no_body, _no_frames, chat.embeddings_usage)
        ask = self._parse(exchange, raw, key, route)
        admitted = await self._admit(exchange, "embeddings", OPENAI, key, ask)
        if admitted is None:
            return
        tab, scope = admitted
        texts, dimensions, encoded = parsed[0]
        with _closing(tab):
            told, usage = _report(tab.counted, route, exchange.fault)
            await exchange.wait(self.config.pacing.first_byte / 2)
            vectors = [self._embeddings.vector(text, dimensions) for text in texts]
            body = _body_with(chat.embeddings_body(ask, vectors, base64_wanted=encoded), usage)
            if exchange.fault is not None and exchange.fault.action == "malformed":
                body = body[: len(body) * 2 // 3]
            length = (b"content-length", b"%d" % len(body))
            await exchange.head(200, [*self._heads(scope, route), JSON_TYPE, length])
            await exchange.body(body, more=False)
            if told is not None:
                self.state.books.report(tab.row, told)


@contextmanager
def _closing(tab: Tab) -> Iterator[None]:
    """The tab is closed however the block ends; a cancelled call counts as abandoned."""
    how = "abandoned"
    try:
        yield
        how = "completed"
    except Ended as ended:
        how = ended.how
        raise
    except ConnectionBroken:
        how = "faulted"
        raise
    finally:
        tab.close(how)


def need_version(exchange: Exchange) -> None:
    """Messages routes need a version.

    Raises:
        Rejected: There is none.
    """
    if exchange.header(b"anthropic-version") is None:
        raise Rejected("anthropic-version: header is required")


def _report(
    counted: Counted, route: Route, fault: Fault | None
) -> tuple[Counted | None, bytes | None]:
    """What is reported, as figures and as JSON of the `usage` field; None where it is left out."""
    if fault is not None and fault.action == "usage":
        match fault.usage:
            case "missing":
                return None, None
            case "null":
                return None, b"null"
            case "zero":
                counted = Counted(input=0)
            case _:
                counted = counted.times(fault.factor)
    return counted, orjson.dumps(route.usage(counted))


def _body_with(body: dict[str, Any], usage: bytes | None) -> bytes:
    raw = as_json(body)
    return raw if usage is None else raw[:-1] + b',"usage":' + usage + b"}"


def _no_body(_ask: Ask, _answer: Answer) -> dict[str, Any]:
    return {}


def _no_frames(
    _ask: Ask, _answer: Answer, _last: bytes | None, _first: bytes | None
) -> Iterator[Frame]:
    return iter(())


def _flood(route: Route, size: int) -> bytes:
    """One valid event with that many bytes of text."""
    text = b"x" * size
    if route.name == "messages":
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
            b'"delta":{"type":"text_delta","text":"' + text + b'"}}\n\n'
        )
    if route.name == "responses":
        return b": " + text + b"\n\n"
    return (
        b'data: {"id":"flood","object":"chat.completion.chunk","created":0,"model":"flood",'
        b'"choices":[{"index":0,"delta":{"content":"' + text + b'"},"finish_reason":null}]}\n\n'
    )


def _error_event(route: Route, fault: Fault) -> bytes:
    """The dialect's error inside a 200; nothing follows it."""
    told = scripted(fault, route.dialect)
    if route.dialect == ANTHROPIC:
        error = {"type": told.kind, "message": told.message}
        return b"event: error\ndata: " + as_json({"type": "error", "error": error}) + b"\n\n"
    if route.name == "responses":
        event = {
            "type": "error", "code": told.code or told.kind, "message": told.message,
            "param": None, "sequence_number": fault.after_events or 0,
        }  # fmt: skip
        return b"event: error\ndata: " + as_json(event) + b"\n\n"
    body = error_body(OPENAI, told.message, kind=told.kind, code=told.code)
    return b"data: " + as_json(body) + b"\n\n"
