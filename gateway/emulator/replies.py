"""How the emulator answers whatever is not a stream: headers, refusals, errors, plain bodies."""

from __future__ import annotations

from gateway.clock import Clock
from gateway.emulator.ask import Rejected
from gateway.emulator.config import EmulatorConfig, Fault
from gateway.emulator.exchange import Exchange
from gateway.emulator.faults import retry_after_headers, scripted
from gateway.emulator.meters import (
    ANTHROPIC,
    HeaderPairs,
    Scope,
    denial,
    error_body,
    limit_headers,
)
from gateway.emulator.text import Draw, as_json
from gateway.simulate.meters import Refusal

JSON_TYPE = (b"content-type", b"application/json")


class Replies:
    """Writes answers; numbers them, so that request ids are unique within one emulator."""

    __slots__ = ("_clock", "_mark", "_serial")

    def __init__(self, config: EmulatorConfig, clock: Clock) -> None:
        self._clock = clock
        self._serial = 0
        self._mark = f"{Draw(config.seed, 'requests').bits():016x}"

    def headers(self, dialect: str) -> HeaderPairs:
        """What every answer of that dialect carries; the first is the request id."""
        self._serial += 1
        name = f"req_{self._mark}{self._serial:08x}".encode()
        if dialect == ANTHROPIC:
            return [(b"request-id", name), (b"anthropic-organization-id", b"org-emulator")]
        return [
            (b"x-request-id", name), (b"openai-organization", b"org-emulator"),
            (b"openai-version", b"2020-10-01"), (b"openai-processing-ms", b"5"),
        ]  # fmt: skip

    def limits(self, scope: Scope, dialect: str, route: str) -> HeaderPairs:
        """Limit headers of a good answer, unless the rule says that there are none."""
        if not scope.rule.announce:
            return []
        return limit_headers(scope, dialect, route, self._clock.now(), self._clock.wall())

    async def deny(
        self, exchange: Exchange, refusal: Refusal, scope: Scope, about: tuple[str, str, str]
    ) -> None:
        """A meter refused; `about` is dialect, route and model."""
        dialect, route, model = about
        told = denial(refusal, scope, dialect, model)
        headers = self.headers(dialect)
        body = error_body(
            dialect, told.message, kind=told.kind, code=told.code,
            request_id=headers[0][1].decode(),
        )  # fmt: skip
        limits = limit_headers(scope, dialect, route, self._clock.now(), self._clock.wall())
        await self.raw(exchange, told.status, as_json(body), headers + limits + list(told.headers))

    async def script(self, exchange: Exchange, fault: Fault, dialect: str) -> None:
        """A fault answers."""
        told = scripted(fault, dialect)
        headers = self.headers(dialect)
        extra = [(n.lower().encode(), v.encode("latin-1", "replace")) for n, v in fault.headers]
        body = error_body(
            dialect, told.message, kind=told.kind, code=told.code,
            request_id=headers[0][1].decode(),
        )  # fmt: skip
        headers += retry_after_headers(fault, self._clock.wall()) + extra
        raw = as_json(body) if fault.body is None else fault.body.encode()
        await self.raw(exchange, told.status, raw, headers)

    async def reject(self, exchange: Exchange, dialect: str, rejected: Rejected) -> None:
        """The request is at fault."""
        headers = self.headers(dialect)
        body = error_body(
            dialect, rejected.message, kind=rejected.kind, param=rejected.param,
            code=rejected.code, request_id=headers[0][1].decode(),
        )  # fmt: skip
        await self.raw(exchange, rejected.status, as_json(body), headers)

    async def json(self, exchange: Exchange, body: object, dialect: str) -> None:
        """200 with that body."""
        await self.raw(exchange, 200, as_json(body), self.headers(dialect))

    @staticmethod
    async def raw(exchange: Exchange, status: int, body: bytes, headers: HeaderPairs) -> None:
        """Bytes with their length, JSON unless the headers say otherwise."""
        types = [] if any(name == b"content-type" for name, _ in headers) else [JSON_TYPE]
        length = (b"content-length", b"%d" % len(body))
        await exchange.head(status, [*headers, *types, length])
        await exchange.body(body, more=False)
