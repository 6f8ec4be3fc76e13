"""Innermost service: choose a credential, send, hold the deadlines, classify the outcome.

Returns at the first event, not at the status line: an error event inside a 200 must still reach retry
and downgrade (`protocols.md` §2.1). The agent's credential ends here and the upstream's own is set;
bytes of the body are the caller's own except for named edits (model, stream_options). From the moment
the first byte is handed to the transport the attempt counts as sent.
"""

from __future__ import annotations

from collections import deque
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import orjson

from gateway.call import Call, Dialect, HeaderList, Kind, Reply, Service
from gateway.clock import Expiry
from gateway.errors import UpstreamMalformed, UpstreamTimeout, UpstreamUnreachable
from gateway.resilience.credentials import FOREVER, CredentialHealth
from gateway.units import MICRO, Micros, Rng
from gateway.upstream import Incoming, Outgoing, Transport, TransportFault
from gateway.wire import ratelimit_headers, splice
from gateway.wire.sse import Events
from gateway.wire.upstream_refusals import classify

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from gateway.clock import Clock, Timer
    from gateway.snapshot import Credential, Deployment, Provider

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
    b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
OURS = frozenset({
    b"authorization", b"x-api-key", b"api-key", b"host", b"content-length", b"baggage", b"prefer",
    b"expect", b"cookie", b"x-goog-api-key",
})  # fmt: skip
LIMIT_PREFIXES = (b"x-ratelimit-", b"anthropic-ratelimit-", b"ratelimit")
RETRY_HEADERS = frozenset({b"retry-after", b"retry-after-ms", b"x-should-retry"})
MAX_ERROR_BODY = 1 << 20
"""Bytes of a refusal's body that are read to classify it; the rest is relayed unread."""
MAX_OPENING = 1 << 20
"""Bytes awaited for the first event; beyond it the stream is passed on as it is."""


def connection_named(headers: HeaderList) -> frozenset[bytes]:
    """Headers that `Connection` names: they stop here, in both directions (RFC 9110 §7.6.1)."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return frozenset(named)


def request_headers(call: Call, provider: Provider, credential: Credential | None) -> HeaderList:
    """What goes upstream: the client's headers without ours and hop-by-hop, with the provider's key."""
    named = connection_named(call.headers)
    governed = call.dialect is not Dialect.PASSTHROUGH
    out: HeaderList = []
    for pair in call.headers:
        name = pair[0]
        if (
            name in HOP_BY_HOP
            or name in OURS
            or name in named
            or name.startswith(b"tidegate-")
            or (governed and name == b"accept-encoding")
            or (name == b"idempotency-key" and not provider.supports_idempotency)
        ):
            continue
        out.append(pair)
    if governed:
        out.append((b"accept-encoding", b"identity"))
    if credential is not None:
        secret = credential.secret.reveal().encode()
        match credential.header:
            case "bearer":
                out.append((b"authorization", b"Bearer " + secret))
            case "none":
                pass
            case name:
                out.append((name.encode(), secret))
    out.extend((name.encode(), value.reveal().encode()) for name, value in provider.extra_headers)
    return out


def reply_headers(headers: HeaderList) -> HeaderList:
    """What goes to the client: without hop-by-hop, upstream limits and wait advice (ours replace them)."""
    named = connection_named(headers)
    return [
        pair
        for pair in headers
        if pair[0] not in HOP_BY_HOP
        and pair[0] not in named
        and pair[0] not in RETRY_HEADERS
        and not pair[0].startswith(LIMIT_PREFIXES)
    ]


def target_of(call: Call, provider: Provider) -> bytes:
    """Path and query exactly as sent, plus the provider's own query."""
    if provider.query is None:
        return call.target
    joint = b"&" if b"?" in call.target else b"?"
    return call.target + joint + provider.query.reveal().encode()


def body_of(call: Call, deployment: Deployment) -> tuple[bytes, bool]:
    """The body to send, and whether usage was asked for in the client's stead.

    A compressed body is forwarded as it is: its edits would need another encoding of it.
    """
    body, fields = call.body, call.fields
    if fields is None or not body or call.coding:
        return body, False
    if deployment.upstream_model is not None and deployment.upstream_model != fields.model:
        body = splice.splice(body, "model", orjson.dumps(deployment.upstream_model))
    asked = False
    if (
        fields.stream
        and call.dialect in (Dialect.CHAT, Dialect.COMPLETIONS)
        and fields.wants_usage is None
        and deployment.provider.accepts_stream_options
    ):
        body = splice.ask_for_usage(body)
        asked = True
    return body, asked


class Credentials:
    """Chooses among a provider's credentials and remembers which are out."""

    __slots__ = ("clock", "health", "rng")

    def __init__(self, clock: Clock, rng: Rng) -> None:
        self.clock = clock
        self.rng = rng
        self.health = CredentialHealth()

    def candidates(self, call: Call, provider: Provider) -> tuple[Credential, ...]:
        """Credentials that may be used for this model."""
        if len(provider.credentials) < 2:
            return provider.credentials
        model = call.fields.model if call.fields is not None else ""
        return tuple(
            one
            for one in provider.credentials
            if one.models == ("*",) or any(fnmatchcase(model, glob) for glob in one.models)
        )

    def choose(self, call: Call, provider: Provider) -> Credential | None:
        """A healthy credential; the first one where none is healthy and none ever was refused."""
        return self.health.choose(
            provider.name, self.candidates(call, provider), now=self.clock.now(), rng=self.rng
        )

    def other_credential(self, call: Call) -> bool:
        """True if a healthy credential other than the last one exists."""
        deployment = call.deployment
        if deployment is None or len(deployment.provider.credentials) < 2:
            return False
        now = self.clock.now()
        name = deployment.provider.name
        return any(
            one.id != call.credential
            and self.health.out_until(f"{name}/{one.id}", now=now) is None
            for one in self.candidates(call, deployment.provider)
        )

    def refused(self, provider: Provider, credential: str, reply: Reply) -> None:
        """Take a credential out, or cool it, by what its refusal means."""
        now = self.clock.now()
        scope = f"{provider.name}/{credential}"
        spares = len(provider.credentials) > 1
        match reply.kind:
            case Kind.AUTH if reply.status == 401 and spares:
                self.health.cool(scope, until=FOREVER)
            case Kind.MONEY if spares:
                self.health.cool(scope, until=FOREVER)
            case Kind.QUOTA | Kind.PERIOD | Kind.AUTH if spares:
                until = now + min(reply.retry_after or MICRO, 300 * MICRO)
                self.health.cool(scope, until=until)
            case _:
                pass


class Relayed:
    """A body under way: what was read to judge it, then the rest, with an idle and a total deadline."""

    __slots__ = ("_clock", "_first", "_idle", "_incoming", "_last", "_rest", "_timer", "_until")

    def __init__(  # noqa: PLR0913 - a body's facts
        self, incoming: Incoming, first: deque[bytes], rest: AsyncIterator[bytes], *, clock: Clock,
        idle: Micros, until: Micros,
    ) -> None:  # fmt: skip
        self._incoming = incoming
        self._first = first
        self._rest = rest
        self._clock = clock
        self._idle = idle
        self._until = until
        self._last = clock.now()
        self._timer: Timer | None = clock.after(min(idle, until - self._last), self._check)

    def touched(self, _chunk: bytes) -> None:
        """A tap: the upstream is alive."""
        self._last = self._clock.now()

    def _check(self) -> None:
        now = self._clock.now()
        if now >= self._until:
            self._incoming.abort("total")
            return
        quiet = now - self._last
        if quiet >= self._idle:
            self._incoming.abort("stalled")
            return
        self._timer = self._clock.after(min(self._idle - quiet, self._until - now), self._check)

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, without an asynchronous hop of our own per chunk."""
        return self

    def __aiter__(self) -> Relayed:
        """Itself."""
        return self

    def __anext__(self) -> Awaitable[bytes]:
        """What was read already, then the upstream's own next chunk."""
        if self._first:
            return _Ready(self._first.popleft())
        return self._rest.__anext__()

    async def close(self, *, reuse: bool) -> None:
        """The deadline is gone and the connection is back or closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._incoming.close(reuse=reuse)


class _Ready:
    """An awaitable that has its value."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __await__(self) -> Any:  # noqa: ANN401 - a generator that never yields
        return self._value
        yield


def fault_of(error: TransportFault, provider: str) -> UpstreamTimeout | UpstreamUnreachable:
    """The transport's fault in our tree; what was sent decides whether it may be repeated."""
    if error.kind in ("connect_timeout", "pool_timeout"):
        return UpstreamTimeout(f"{provider} did not accept a connection in time.", code=error.kind)
    if error.sent == "nothing":
        return UpstreamUnreachable(f"{provider} cannot be reached ({error.kind}).", code="connect_failed")
    return UpstreamUnreachable(
        f"{provider} broke the connection before it answered ({error.kind}).",
        code=f"upstream_{error.kind}",
    )


def dispatch(
    *,
    transport: Transport,
    clock: Clock,
    credentials: Credentials,
    wall: Callable[[], float],
    on_status: Callable[[str, int, Kind | None], None] | None = None,
) -> Service:
    """The innermost service."""

    async def send(call: Call, deployment: Deployment, asked: Callable[[], None]) -> Incoming:
        provider = deployment.provider
        credential = credentials.choose(call, provider)
        if credential is None and provider.credentials:
            raise UpstreamUnreachable(
                f"No credential of {provider.name} is usable now.", code="no_credential"
            )
        call.credential = credential.id if credential is not None else ""
        body, injected = body_of(call, deployment)
        if injected:
            asked()
        out = Outgoing(
            method=call.method,
            base_url=provider.base_url,
            target=target_of(call, provider),
            headers=request_headers(call, provider, credential),
            body=body,
            upload=call.upload,
            connect=provider.timeouts.connect,
        )
        call.sent = True
        stream = call.fields is not None and call.fields.stream
        limit = provider.timeouts.first_byte if stream else provider.timeouts.total_plain
        try:
            with Expiry(clock, limit):
                return await transport.send(out)
        except TimeoutError as error:
            raise UpstreamTimeout(
                f"{provider.name} sent no answer within {limit / MICRO:g} s.", code="first_byte"
            ) from error
        except TransportFault as error:
            if error.sent == "nothing":
                call.sent = False
            if error.kind == "malformed":
                raise UpstreamMalformed(f"{provider.name} did not answer in HTTP.") from error
            raise fault_of(error, provider.name) from error

    async def serve(call: Call) -> Reply:
        deployment = call.deployment
        assert deployment is not None  # noqa: S101 - estimate ran
        provider = deployment.provider
        injected = False

        def asked() -> None:
            nonlocal injected
            injected = True

        incoming = await send(call, deployment, asked)
        try:
            reply = await judge(call, deployment, incoming)
        except BaseException:
            incoming.abort("given_up")
            await incoming.close(reuse=False)
            raise
        if injected:
            call.usage_injected = True
        if reply.kind is not None:
            credentials.refused(provider, call.credential, reply)
        if on_status is not None:
            on_status(provider.name, reply.status, reply.kind)
        return reply

    async def judge(call: Call, deployment: Deployment, incoming: Incoming) -> Reply:
        """The reply, read as far as its first event or, if bad, as far as its meaning."""
        provider = deployment.provider
        timeouts = provider.timeouts
        call.upstream_status = incoming.status
        headers = incoming.headers
        stream = is_event_stream(headers)
        now = clock.now()
        until = now + (timeouts.total if stream else timeouts.total_plain)
        rest = incoming.chunks().__aiter__()
        first: deque[bytes] = deque()
        code = message = kind_of_error = ""
        bad = incoming.status >= 400
        try:
            with Expiry(clock, timeouts.first_byte if stream else timeouts.total_plain):
                if bad:
                    code, kind_of_error, message = await read_error(first, rest, headers)
                elif stream and call.dialect is not Dialect.PASSTHROUGH:
                    bad, code, kind_of_error, message = await read_opening(first, rest)
        except TimeoutError as error:
            if not bad:
                raise UpstreamTimeout(
                    f"{provider.name} sent no event within {timeouts.first_byte / MICRO:g} s.",
                    code="first_byte",
                ) from error
        except TransportFault as error:
            if not bad:
                raise fault_of(error, provider.name) from error
        call.first_byte = clock.now()
        source = Relayed(
            incoming, first, rest, clock=clock, idle=timeouts.idle, until=until
        )
        reply = Reply(status=incoming.status, headers=reply_headers(headers), source=source)
        reply.taps.append(source.touched)
        if bad:
            hints = ratelimit_headers.read(headers, now=wall())
            reply.kind = classify(
                incoming.status, code=code, error_type=kind_of_error, message=message,
                family=provider.header_family,
            )  # fmt: skip
            reply.code = code or kind_of_error
            reply.retry_after = hints.wait
        return reply

    return serve


def is_event_stream(headers: HeaderList) -> bool:
    """Whether the answer is a stream of events."""
    return any(
        name == b"content-type" and value.lower().lstrip().startswith(b"text/event-stream")
        for name, value in headers
    )


async def read_error(
    first: deque[bytes], rest: AsyncIterator[bytes], headers: HeaderList
) -> tuple[str, str, str]:
    """Code, type and message of a refusal's body; the bytes stay for the client."""
    size = 0
    async for chunk in rest:
        first.append(chunk)
        size += len(chunk)
        if size > MAX_ERROR_BODY:
            break
    return error_of(b"".join(first))


def error_of(body: bytes) -> tuple[str, str, str]:
    """Code, type and message out of any dialect's error body; empty strings where absent."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", "", ""
    return error_fields(parsed)


def error_fields(parsed: object) -> tuple[str, str, str]:
    """Code, type and message of a decoded error object."""
    if not isinstance(parsed, dict):
        return "", "", ""
    error = parsed.get("error", parsed)
    if isinstance(error, str):
        return "", "", error
    if not isinstance(error, dict):
        return "", "", ""

    def text(key: str) -> str:
        value = error.get(key)
        return value if isinstance(value, str) else str(value) if isinstance(value, int) else ""

    return text("code") or text("status"), text("type"), text("message")


async def read_opening(
    first: deque[bytes], rest: AsyncIterator[bytes]
) -> tuple[bool, str, str, str]:
    """Read up to the first event. Whether it is an error, and its code, type and message."""
    events = Events()
    size = 0
    async for chunk in rest:
        first.append(chunk)
        for event in events.feed(chunk):
            data = event.data
            if b'"error"' not in data and event.name != "error":
                return False, "", "", ""
            try:
                parsed = orjson.loads(data)
            except orjson.JSONDecodeError:
                return False, "", "", ""
            is_error = isinstance(parsed, dict) and (
                parsed.get("type") in ("error", "response.failed")
                or (isinstance(parsed.get("error"), dict) and "choices" not in parsed)
            )
            if not is_error:
                return False, "", "", ""
            return True, *error_fields(parsed)
        size += len(chunk)
        if size > MAX_OPENING:
            break
    return False, "", "", ""


