"""The provider emulator as a pure ASGI application: routes, keys, and its own controls.

`/emulator/ledger`, `/emulator/reset` and `/emulator/faults` are the emulator's own and ask no key:
serve it on loopback only.
"""

from __future__ import annotations

import hashlib
from typing import Any

from gateway.clock import Clock
from gateway.emulator import messages
from gateway.emulator.ask import Rejected
from gateway.emulator.calls import ROUTES, Calls, fresh, need_version
from gateway.emulator.config import ConfigError, EmulatorConfig, Fault, ModelSpec, rules_from
from gateway.emulator.exchange import Ended, Exchange, Message, Receive, Send
from gateway.emulator.faults import Faults
from gateway.emulator.meters import ANTHROPIC, OPENAI, rfc3339
from gateway.emulator.rejections import decode, json_object, unauthenticated
from gateway.emulator.replies import Replies
from gateway.emulator.text import Tokenizer, approximate, as_json

MAX_CONTROL_BODY = 2**20

EPOCH_OF_MODELS = 1_767_225_600
"""`created` of every listed model: 2026-01-01."""


class Emulator:
    """The application, and its controls for whoever runs it in process."""

    def __init__(
        self, config: EmulatorConfig, clock: Clock, *, tokenizer: Tokenizer = approximate
    ) -> None:
        self.config = config
        self._clock = clock
        self._replies = Replies(config, clock)
        self._calls = Calls(config, clock, tokenizer=tokenizer, replies=self._replies)

    # --- controls -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Full meters, empty books, an empty prompt cache, the configured faults from their start.

        Calls under way finish in the books and meters they began with.
        """
        self._calls.state = fresh(self.config, self._clock.now())

    def set_faults(self, rules: tuple[Fault, ...]) -> None:
        """These rules replace all others; their counters begin at 0."""
        self._calls.state.faults = Faults(rules, self.config.seed)

    def ledger(self, *, timeline: bool = False) -> dict[str, Any]:
        """What `GET /emulator/ledger` answers."""
        state = self._calls.state
        seen = state.books.as_json(timeline=timeline)
        seen["meters"] = {
            scope.name: {
                "peak_in_flight": scope.provider.peak_in_flight,
                "dimensions": scope.provider.peaks(),
            }
            for scope in state.limiter.scopes()
        }
        seen["faults"] = state.faults.counts()
        return seen

    # --- ASGI -----------------------------------------------------------------------------------

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection of the server."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"the emulator speaks http, not {scope['type']}")
        exchange = Exchange(scope, receive, send, self._clock)
        try:
            await self._serve(exchange)
        except Ended:
            return

    async def _serve(self, exchange: Exchange) -> None:
        path = exchange.path
        dialect = _dialect(exchange)
        try:
            if path.startswith("/emulator/"):
                await self._control(exchange)
            elif exchange.method == "POST" and path in ROUTES:
                await self._calls.call(exchange, ROUTES[path], self._key(exchange, dialect))
            elif exchange.method == "POST" and path == "/v1/embeddings":
                await self._calls.embed(exchange, self._key(exchange, dialect))
            elif exchange.method == "POST" and path == "/v1/messages/count_tokens":
                await self._count(exchange)
            elif path == "/v1/models" or path.startswith("/v1/models/"):
                await self._list_models(exchange, dialect)
            elif path.startswith("/v1/responses/"):
                await self._stored_response(exchange)
            elif exchange.method == "GET" and path == "/v1/files":
                await self._files(exchange)
            else:
                raise self._no_route(exchange, dialect)
        except Rejected as rejected:
            await self._replies.reject(exchange, dialect, rejected)

    @staticmethod
    def _no_route(exchange: Exchange, dialect: str) -> Rejected:
        known = exchange.path in ROUTES or exchange.path.startswith("/v1/models")
        status = 405 if known else 404
        if dialect == ANTHROPIC:
            message, kind = ("Method Not Allowed", "invalid_request_error") if known else (
                "Not found", "not_found_error",
            )  # fmt: skip
            return Rejected(message, status=status, kind=kind)
        return Rejected(
            f"Invalid URL ({exchange.method} {exchange.path[:200]})"
            if not known
            else f"Not allowed to {exchange.method} on {exchange.path[:200]}",
            status=status,
        )

    async def _count(self, exchange: Exchange) -> None:
        raw = await exchange.read(self.config.max_body)
        self._key(exchange, ANTHROPIC)
        if self.config.strict_version:
            need_version(exchange)
        body = json_object(raw, ANTHROPIC)
        ask = messages.parse_messages(body, self._calls.prompt(), counting=True)
        self._calls.spec(ask.model, ANTHROPIC)
        self._calls.state.books.aside("count_tokens")
        await self._replies.json(exchange, {"input_tokens": ask.prompt.tokens}, ANTHROPIC)

    # --- what is not metered --------------------------------------------------------------------

    async def _list_models(self, exchange: Exchange, dialect: str) -> None:
        self._key(exchange, dialect)
        if exchange.method not in ("GET", "HEAD"):
            raise self._no_route(exchange, dialect)
        self._calls.state.books.aside("models")
        if exchange.path != "/v1/models":
            spec = self._calls.spec(exchange.path.removeprefix("/v1/models/"), dialect)
            await self._replies.json(exchange, _model(spec, dialect), dialect)
            return
        listed = [_model(spec, dialect) for spec in self.config.models]
        if dialect == ANTHROPIC:
            body: dict[str, Any] = {
                "data": listed, "has_more": False,
                "first_id": listed[0]["id"] if listed else None,
                "last_id": listed[-1]["id"] if listed else None,
            }  # fmt: skip
        else:
            body = {"object": "list", "data": listed}
        await self._replies.json(exchange, body, dialect)

    async def _stored_response(self, exchange: Exchange) -> None:
        self._key(exchange, OPENAI)
        name, _, verb = exchange.path.removeprefix("/v1/responses/").partition("/")
        body = self._calls.stored.body(name)
        if body is None:
            raise Rejected(f"Response with id '{name[:80]}' not found.", status=404)
        self._calls.state.books.aside("stored_responses")
        if exchange.method == "GET" and not verb:
            answer = body
        elif exchange.method == "DELETE" and not verb:
            self._calls.stored.forget(name)
            answer = as_json({"id": name, "object": "response", "deleted": True})
        elif exchange.method == "POST" and verb == "cancel":
            raise Rejected("Only responses created with background=true can be cancelled.")
        else:
            raise self._no_route(exchange, OPENAI)
        await self._replies.raw(exchange, 200, answer, self._replies.headers(OPENAI))

    async def _files(self, exchange: Exchange) -> None:
        """A route that a gateway passes through without knowing it."""
        self._key(exchange, OPENAI)
        self._calls.state.books.aside("files")
        body = {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
        await self._replies.json(exchange, body, OPENAI)

    async def _control(self, exchange: Exchange) -> None:
        match (exchange.method, exchange.path):
            case ("GET", "/emulator/ledger"):
                body: object = self.ledger(timeline=b"timeline" in exchange.query)
            case ("POST", "/emulator/reset"):
                await exchange.read(MAX_CONTROL_BODY)
                self.reset()
                body = {"reset": True}
            case ("GET", "/emulator/faults"):
                body = {"rules": self._calls.state.faults.counts()}
            case ("POST", "/emulator/faults"):
                raw = await exchange.read(MAX_CONTROL_BODY)
                try:
                    self.set_faults(rules_from(decode(raw)))
                except ConfigError as error:
                    problems = {"error": {"message": str(error), "problems": error.problems}}
                    await self._replies.raw(exchange, 400, as_json(problems), [])
                    return
                except ValueError:
                    raise Rejected("The body is not valid JSON.") from None
                body = {"rules": self._calls.state.faults.counts()}
            case _:
                raise Rejected(
                    "Known: GET /emulator/ledger, POST /emulator/reset, GET and POST "
                    "/emulator/faults.",
                    status=404,
                )
        await self._replies.raw(exchange, 200, as_json(body), [])

    def _key(self, exchange: Exchange, dialect: str) -> str:
        """The label of the caller's key.

        Raises:
            Rejected: A key is needed, and there is none, or a wrong one.
        """
        secret = exchange.header(b"x-api-key") or exchange.header(b"api-key") or ""
        authorization = exchange.header(b"authorization") or ""
        if authorization[:7].lower() == "bearer ":
            secret = authorization[7:].strip()
        label = self.config.keys.get(secret)
        if label is None:
            label = key_label(secret)
            wrong = bool(secret) and bool(self.config.keys)
            if self.config.require_key and (not secret or wrong):
                now = self._clock.now()
                self._calls.state.books.refused(
                    now, self._calls.state.books.arrived(now, label, "(none)"), "401"
                )
                raise unauthenticated(dialect, given=bool(secret))
        return label


def emulator(
    config: EmulatorConfig, clock: Clock, *, tokenizer: Tokenizer = approximate
) -> Emulator:
    """An emulator of that configuration: an ASGI application. `tokenizer` counts input."""
    return Emulator(config, clock, tokenizer=tokenizer)


def key_label(secret: str) -> str:
    """How the ledger names a key without a configured label: never the secret itself."""
    if not secret:
        return "anonymous"
    raw = secret.encode("utf-8", "surrogatepass")
    return "key-" + hashlib.blake2b(raw, digest_size=4).hexdigest()


def _dialect(exchange: Exchange) -> str:
    path = exchange.path
    if path.startswith("/v1/messages") or exchange.header(b"anthropic-version") is not None:
        return ANTHROPIC
    return OPENAI


def _model(spec: ModelSpec, dialect: str) -> dict[str, Any]:
    if dialect == ANTHROPIC:
        return {
            "type": "model", "id": spec.name, "display_name": spec.name,
            "created_at": rfc3339(EPOCH_OF_MODELS), "lifecycle": "active",
            "max_input_tokens": spec.context or None, "max_tokens": spec.max_output or None,
        }  # fmt: skip
    return {
        "id": spec.name, "object": "model", "created": EPOCH_OF_MODELS, "owned_by": spec.owner,
    }  # fmt: skip


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{kind}.complete"})
        if kind == "shutdown":
            return
