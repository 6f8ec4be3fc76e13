"""Innermost service: choose a credential, send, hold the deadlines, classify the outcome.

Returns at the first event, not at the status line: an error event inside a 200 must still reach
retry and downgrade. The agent's credential ends here and the upstream's own is set; the body is the
caller's own bytes except for named edits (`model`, `stream_options`). From the moment the first
byte is handed to the transport the attempt counts as sent.
"""

from __future__ import annotations

from collections import deque
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import orjson

from gateway.call import Call, Dialect, HeaderList, Kind, Reply
from gateway.clock import Expiry
from gateway.errors import BreakerOpen, UpstreamTimeout
from gateway.opening import Relayed, decoded, fault_of, read_error, read_opening
from gateway.resilience.breaker import spent_for
from gateway.resilience.credentials import FOREVER, CredentialHealth
from gateway.units import MICRO, Micros, Rng
from gateway.upstream import TransportFault, make_outgoing
from gateway.wire import headers as wire_headers
from gateway.wire import ratelimit_headers, splice
from gateway.wire.upstream_refusals import classify, said

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gateway.clock import Clock
    from gateway.snapshot import Credential, Deployment, Provider
    from gateway.upstream import Incoming, Transport

SHORTEST_SECRET = 8
"""Shorter ones are no secrets, and replacing them would garble texts."""
SPENT = frozenset({Kind.MONEY, Kind.PERIOD})
COOLED = frozenset({Kind.QUOTA, Kind.RAMP, Kind.AUTH})
"""Refusals that send the credential they met aside for a while."""
REDIRECTS = 300
"""From here on a status is no answer to a model call: nothing was served, nothing is charged."""
MOST_SENT = 256
"""Credentials whose headers are remembered."""
PASSTHROUGH = Dialect.PASSTHROUGH
STREAM_OPTIONS = frozenset({Dialect.CHAT, Dialect.COMPLETIONS})


class Credentials:
    """Chooses among a provider's credentials and remembers which are out."""

    __slots__ = ("_sent", "clock", "health", "rng")

    def __init__(self, clock: Clock, rng: Rng) -> None:
        self.clock = clock
        self.rng = rng
        self.health = CredentialHealth()
        self._sent: dict[int, tuple[Provider, Credential | None, HeaderList]] = {}

    def headers(self, provider: Provider, credential: Credential | None) -> HeaderList:
        """The credential in the form it is sent in, made once for each of a policy."""
        key = id(provider if credential is None else credential)
        known = self._sent.get(key)
        if known is not None and known[0] is provider and known[1] is credential:
            return known[2]
        made = credential_headers(provider, credential)
        if len(self._sent) >= MOST_SENT:
            self._sent.clear()
        self._sent[key] = (provider, credential, made)
        return made

    def candidates(self, call: Call, provider: Provider) -> tuple[Credential, ...]:
        """Credentials that may be used for the model asked for."""
        if len(provider.credentials) < 2:
            return provider.credentials
        model = call.deployment.model if call.deployment is not None else ""
        return tuple(
            one
            for one in provider.credentials
            if any(glob == "*" or fnmatchcase(model, glob) for glob in one.models)
        )

    def choose(self, call: Call, provider: Provider, now: Micros) -> Credential | None:
        """A healthy credential, or None."""
        own = provider.credentials
        candidates = own if len(own) < 2 else self.candidates(call, provider)
        return self.health.choose(provider.name, candidates, now=now, rng=self.rng)

    def none_left(self, call: Call, provider: Provider) -> BreakerOpen:
        """Why nothing can be sent: soft where one is only cooling, hard where all are out."""
        now = self.clock.now()
        ends = [
            self.health.out_until(f"{provider.name}/{one.id}", now=now) or now
            for one in self.candidates(call, provider)
        ]
        wait = min(ends, default=FOREVER) - now
        text = f"No credential of {provider.name} is usable now."
        return BreakerOpen(
            text,
            because=provider.because,
            retry_after=max(MICRO, wait) if wait < FOREVER // 2 else None,
            code="no_credential",
        )

    def other_credential(self, call: Call) -> bool:
        """True if a healthy credential other than the last one exists."""
        deployment = call.deployment
        if deployment is None or len(deployment.provider.credentials) < 2:
            return False
        provider = deployment.provider
        now = self.clock.now()
        return any(
            one.id != call.credential
            and self.health.out_until(f"{provider.name}/{one.id}", now=now) is None
            for one in self.candidates(call, provider)
        )

    def refused(self, call: Call, provider: Provider, reply: Reply) -> None:
        """Take a credential out, or cool it, by what its refusal means.

        A provider's only credential stays: the breaker and the pool speak for it. Where another one
        is healthy, the refusal spares the pool: it was this credential's, not the quota's.
        """
        if len(provider.credentials) < 2:
            return
        scope = f"{provider.name}/{call.credential}"
        if reply.kind is Kind.AUTH and reply.status == 401:
            self.health.cool(scope, until=FOREVER)
        elif reply.kind in SPENT:
            self.health.cool(scope, until=self.clock.now() + spent_for(reply.retry_after))
        elif reply.kind in COOLED:
            wait = min(reply.retry_after or MICRO, 300 * MICRO)
            self.health.cool(scope, until=self.clock.now() + wait)
        reply.spares_pool = self.other_credential(call)


def target_of(call: Call, provider: Provider) -> bytes:
    """Path and query exactly as sent, plus the provider's own query."""
    if provider.query is None:
        return call.target
    joint = b"&" if b"?" in call.target else b"?"
    return call.target + joint + provider.query.reveal().encode()


def credential_headers(
    provider: Provider, credential: Credential | None
) -> list[tuple[bytes, bytes]]:
    """The upstream's own credential, in the form its profile names."""
    out: list[tuple[bytes, bytes]] = []
    if credential is not None and credential.header != "none":
        secret = credential.secret.reveal().encode()
        if credential.header == "bearer":
            out.append((b"authorization", b"Bearer " + secret))
        else:
            out.append((credential.header.encode(), secret))
    out.extend((name.encode(), value.reveal().encode()) for name, value in provider.extra_headers)
    return out


def edited_body(call: Call, deployment: Deployment) -> tuple[bytes, bool]:
    """The body to send, and whether usage was asked for in the client's stead.

    A compressed body is forwarded as it is: edits would need another encoding of it.
    """
    body, fields = call.body, call.fields
    if fields is None or not body or call.coding:
        return body, False
    if deployment.upstream_model is not None and deployment.upstream_model != fields.model:
        body = splice.splice(body, "model", orjson.dumps(deployment.upstream_model))
    wanted = (
        fields.stream
        and fields.wants_usage is None
        and call.dialect in STREAM_OPTIONS
        and deployment.provider.accepts_stream_options
    )
    if wanted:
        body = splice.splice_in(body, "stream_options", "include_usage", b"true")
    return body, wanted


def hide_secrets(
    reply: Reply, first: deque[bytes], provider: Provider, *, unpack: Callable[[str, bytes], bytes]
) -> None:
    """A refusal that quotes the credential it was sent is relayed without it.

    Only bodies that were read to be judged can quote it where it would be seen; what is compressed
    is relayed plain if it had to be changed.
    """
    body = b"".join(first)
    coding = wire_headers.coding_of(reply.headers)
    plain = unpack(coding, body) if coding else body
    clean = plain
    for secret in secrets_of(provider):
        clean = clean.replace(secret, b"***")
        if any(secret in value for _, value in reply.headers):  # Location, debugging headers
            reply.headers = [(name, value.replace(secret, b"***")) for name, value in reply.headers]
    if clean == plain:
        return
    first.clear()
    first.append(clean)
    reply.headers = [
        pair for pair in reply.headers if pair[0] not in (b"content-length", b"content-encoding")
    ]


def secrets_of(provider: Provider) -> list[bytes]:
    """Everything secret that this provider's requests carry."""
    found = [one.secret.reveal() for one in provider.credentials]
    found += [value.reveal() for _, value in provider.extra_headers]
    if provider.query is not None:
        found += [part.partition("=")[2] for part in provider.query.reveal().split("&")]
    return [text.encode() for text in found if len(text) >= SHORTEST_SECRET]


class Dispatch:
    """The innermost service.

    Attributes:
        on_status: Called with provider, status and kind of every answer, for metrics.
        on_head: Called with the call and the upstream's own headers as soon as they are here: what
            they say of the quota corrects our meter.
    """

    __slots__ = ("_clock", "_credentials", "_decode", "_transport", "on_head", "on_status")

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        credentials: Credentials,
        *,
        decode: Callable[[str, bytes], bytes],
        on_status: Callable[[str, int, Kind | None], None] | None = None,
        on_head: Callable[[Call, HeaderList], None] | None = None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._credentials = credentials
        self._decode = decode
        self.on_status = on_status
        self.on_head = on_head

    async def __call__(self, call: Call) -> Reply:
        """The reply, judged: `kind` says what a bad one means."""
        deployment = call.deployment
        assert deployment is not None  # noqa: S101 - estimate ran
        provider = deployment.provider
        started = self._clock.now()
        try:
            incoming = await self._send(call, deployment, started)
            try:
                reply = self._begun(call, provider, incoming)
                if reply is None:
                    reply = await self._judged(call, provider, incoming)
            except BaseException:
                incoming.abort("given_up")
                await incoming.close(reuse=False)
                raise
        except BaseException:
            call.upstream_us += self._clock.now() - started
            raise
        call.upstream_us += call.first_byte - started
        if reply.kind is not None:
            self._credentials.refused(call, provider, reply)
        if self.on_status is not None:
            self.on_status(provider.name, reply.status, reply.kind)
        return reply

    async def _send(self, call: Call, deployment: Deployment, now: Micros) -> Incoming:
        provider = deployment.provider
        credential = self._credentials.choose(call, provider, now)
        if credential is None and provider.credentials:
            raise self._credentials.none_left(call, provider)
        call.credential = credential.id if credential is not None else ""
        body, call.usage_injected = edited_body(call, deployment)
        headers = wire_headers.to_upstream(
            call.headers,
            governed=call.dialect is not PASSTHROUGH,
            idempotency=provider.supports_idempotency,
        )
        headers += self._credentials.headers(provider, credential)
        out = make_outgoing(
            method=call.method,
            base_url=provider.base_url,
            target=call.target if provider.query is None else target_of(call, provider),
            headers=headers,
            body=body,
            upload=call.upload,
            length=call.upload_length,
            connect=provider.timeouts.connect,
        )
        stream = call.fields is not None and call.fields.stream
        limit = provider.timeouts.first_byte if stream else provider.timeouts.total_plain
        call.sent = True
        try:
            with Expiry(self._clock, limit, call.task):
                return await self._transport.send(out)
        except TimeoutError as error:
            text = f"{provider.name} sent no answer within {limit / MICRO:g} s."
            raise UpstreamTimeout(text, code="first_byte_timeout") from error
        except TransportFault as error:
            call.sent = error.sent != "nothing"
            raise fault_of(error, provider.name) from error

    def _begun(self, call: Call, provider: Provider, incoming: Incoming) -> Reply | None:
        """The reply of an answer whose head says enough; None: its body must be looked at."""
        call.upstream_status = incoming.status
        if self.on_head is not None:
            self.on_head(call, incoming.headers)
        stream = wire_headers.is_event_stream(incoming.headers)
        governed = call.dialect is not PASSTHROUGH
        if incoming.status >= (REDIRECTS if governed else 400) or (stream and governed):
            return None
        now, timeouts = self._clock.now(), provider.timeouts
        until = now + (timeouts.total if stream else timeouts.total_plain)
        call.first_byte = now
        rest = incoming.chunks().__aiter__()
        return self._reply(call, incoming, Relayed(
            incoming, deque(), rest, self._clock, timeouts.idle, until
        ))  # fmt: skip

    def _reply(self, call: Call, incoming: Incoming, source: Relayed) -> Reply:
        reply = Reply(incoming.status, wire_headers.to_client(incoming.headers), source)
        call.answer = reply
        if source.timed:
            reply.taps.append(source.touched)
        return reply

    async def _judged(self, call: Call, provider: Provider, incoming: Incoming) -> Reply:
        """The reply of a refusal, or of a stream, whose first event may be one."""
        timeouts, clock = provider.timeouts, self._clock
        stream = wire_headers.is_event_stream(incoming.headers)
        until = clock.now() + (timeouts.total if stream else timeouts.total_plain)
        rest = incoming.chunks().__aiter__()
        first: deque[bytes] = deque()
        error = await self._error(provider, incoming, first, rest)
        call.first_byte = clock.now()
        source = Relayed(incoming, first, rest, clock, timeouts.idle, until)
        reply = self._reply(call, incoming, source)
        if error is not None:
            self._understand(reply, incoming, provider, error)
            hide_secrets(reply, first, provider, unpack=self._decode)
        return reply

    def _understand(
        self, reply: Reply, incoming: Incoming, provider: Provider, error: object
    ) -> None:
        """What the refusal means, and how long the provider says to stay away."""
        now = round(self._clock.wall() * MICRO)
        limits = ratelimit_headers.limits_in(incoming.headers, now=now)
        heard = said(error)
        reply.retry_after = ratelimit_headers.wait_told(
            incoming.headers, error, now=now, limits=limits
        )
        reply.kind = classify(
            incoming.status, heard, family=provider.header_family, wait=reply.retry_after
        )
        reply.code = heard.code

    async def _error(
        self, provider: Provider, incoming: Incoming, first: deque[bytes],
        rest: AsyncIterator[bytes],
    ) -> object | None:  # fmt: skip
        """What a refusal or a stream's first event says, read as far as needed; None if well."""
        bad = incoming.status >= REDIRECTS
        limit = provider.timeouts.idle if bad else provider.timeouts.first_byte
        try:
            with Expiry(self._clock, limit):
                if not bad:
                    coding = wire_headers.coding_of(incoming.headers)
                    return await read_opening(first, rest, coding)
                body = await read_error(first, rest)
        except TimeoutError as error:
            if bad:
                return ""  # the status is enough to act on
            text = f"{provider.name} sent no event within {limit / MICRO:g} s."
            raise UpstreamTimeout(text, code="first_byte_timeout") from error
        except TransportFault as error:
            if bad:
                return decoded(b"".join(first))
            raise fault_of(error, provider.name) from error
        return decoded(self._decode(wire_headers.coding_of(incoming.headers), body))
