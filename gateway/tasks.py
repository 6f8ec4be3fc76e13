"""Our own API on the data listener: held calls (`/v1/holds`); tasks and schedules join it later.

    GET    /v1/holds                 the caller's holds, oldest first: ?after=<cursor>&limit=<n>
    GET    /v1/holds/{id}            202 while it waits, then the reply as the provider sent it, or
                                     the refusal in its stead. `Prefer: wait=<s>` waits up to 60 s.
                                     `Accept: text/event-stream` follows until it is done.
    GET    /v1/holds/{id}/status     the hold itself, whatever its state
    DELETE /v1/holds/{id}            cancels it; a hold that has ended is erased

The credential that held a call is the one that fetches it: whoever else asks is told 404, as if
there were none. Errors are problem documents (RFC 9457) on this family, with a word in `code`.
Beside `edge.py`, not inside it, and not hot; the head of a request is checked as strictly.
Source: `execution.md` §15 and §16; `protocols.md` §1.1, §5.6.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway import cors, framing
from gateway.call import Principal
from gateway.clock import Expiry
from gateway.errors import Draining, Forbidden, GatewayError, MalformedCall, Saturated
from gateway.holds.rows import reply_value, shown
from gateway.units import MICRO, Micros
from gateway.wire import prefer, sse
from gateway.wire.headers import is_event_stream
from scheduler.api import (
    FINAL,
    Held,
    IllegalTransition,
    Message,
    SchedulerError,
    State,
    UnknownHold,
)

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from gateway.clock import Clock
    from gateway.holds.follow import Run
    from gateway.holds.resume import Resuming
    from gateway.identity import Identities
    from gateway.snapshot import Snapshot

PROBLEM = "application/problem+json"
PREFIX = "/v1/holds"
LONGEST_WAIT: Micros = 60 * MICRO
LOOK: Micros = MICRO
"""How often a waiting request looks for what another process may have done."""
BEAT: Micros = 10 * MICRO
"""Between two comments of a stream that has nothing to say."""
SENDING: Micros = 300 * MICRO
"""Time in which a client must have taken a result."""
MAX_SERVING = 256 * 1024 * 1024
"""Bytes of results being sent at once."""
MOST_LISTED = 100
MAX_ID = 64
COME_BACK_S = 2
"""Advice to who polls."""


class Problem(Exception):
    """What ends a request of this API: HTTP status, a word, a sentence, seconds to come back in."""

    def __init__(self, status: int, code: str, detail: str, retry_after: int = 0) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.retry_after = retry_after


def is_ours(path: str) -> bool:
    """Whether this API serves the path; for the composition root."""
    return path == PREFIX or path.startswith(PREFIX + "/")


STORE_AWAY = Problem(
    503, "store_unavailable", "The store of held calls does not answer; no hold is lost by that.",
    COME_BACK_S,
)  # fmt: skip


def problem(error: Problem) -> Response:
    """A problem document."""
    value = {
        "type": "about:blank", "title": error.code.replace("_", " "), "status": error.status,
        "detail": error.detail, "code": error.code,
    }  # fmt: skip
    headers = {"cache-control": "no-store"}
    if error.retry_after:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        orjson.dumps(value), status_code=error.status, media_type=PROBLEM, headers=headers
    )


def of_refusal(error: GatewayError) -> Problem:
    """A refusal of the gateway as a problem."""
    wait = -(-error.retry_after // MICRO) if error.retry_after else 0
    return Problem(type(error).status, error.code, error.message, min(60, wait))


def of_end(held: Held) -> Problem:
    """Why a hold that has ended has no reply."""
    return Problem(held.status or 500, held.code or held.state.value, held.message)


def json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:  # noqa: ANN401 - JSON
    """A JSON answer that no cache keeps."""
    return Response(
        orjson.dumps(value),
        status_code=status,
        media_type="application/json",
        headers={"cache-control": "no-store", **(headers or {})},
    )


class Books:
    """Bytes of results that are being sent."""

    def __init__(self) -> None:
        self.bytes = 0


class Weighed(Response):
    """A result whose bytes are counted while it is sent, for a bounded time."""

    def __init__(self, body: bytes, *, clock: Clock, books: Books) -> None:
        super().__init__(body)
        self._clock = clock
        self._books = books
        books.bytes += len(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """It was sent, or its reader was too slow and the connection ends unfinished."""
        try:
            with Expiry(self._clock, SENDING):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            return
        finally:
            self._books.bytes -= len(self.body)


class Holds:
    """The routes of held calls."""

    def __init__(
        self,
        *,
        resuming: Resuming,
        identities: Identities,
        snapshot: Callable[[], Snapshot],
        clock: Clock,
    ) -> None:
        self._resuming = resuming
        self._identities = identities
        self._snapshot = snapshot
        self._clock = clock
        self._books = Books()

    def app(self) -> Starlette:
        """The ASGI application."""
        app = Starlette(
            routes=[
                Route(PREFIX, self._door(self._list), methods=["GET"]),
                Route(PREFIX + "/{hold}", self._door(self._get), methods=["GET"]),
                Route(PREFIX + "/{hold}", self._door(self._delete), methods=["DELETE"]),
                Route(PREFIX + "/{hold}/status", self._door(self._status), methods=["GET"]),
            ],
            exception_handlers={404: _not_found, 405: _not_allowed},
        )
        app.router.redirect_slashes = False
        return app

    # --- the door --------------------------------------------------------------------------------

    def _door(
        self, inner: Callable[[Request, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler for who may come in; whatever it refuses is a problem document."""

        async def serve(request: Request) -> Response:
            snapshot = self._snapshot()
            try:
                principal = await self._principal(request, snapshot)
                answer = await inner(request, principal.id)
            except Problem as error:
                answer = problem(error)
            except UnknownHold:
                answer = problem(_unknown(request))
            except GatewayError as error:
                answer = problem(of_refusal(error))
            except SchedulerError:
                answer = problem(STORE_AWAY)
            origin = request.headers.get("origin")
            found = cors.answer_headers(
                origin.encode("latin-1") if origin is not None else None,
                snapshot.edge.cors_origins,
            )
            answer.raw_headers.extend(found)
            return answer

        return serve

    async def _principal(self, request: Request, snapshot: Snapshot) -> Principal:
        """Who asks; the head is checked first."""
        head = framing.read(request.scope["headers"])
        server = request.scope.get("server")
        if not framing.HostRule(snapshot.edge).allows(head.host, server[0] if server else ""):
            raise MalformedCall("The Host header names none of this listener's names.",
                                code="host_not_allowed")  # fmt: skip
        if framing.secret_in_query(request.scope["query_string"]) is not None:
            raise MalformedCall("A query parameter carries a credential.",
                                code="credential_in_query")  # fmt: skip
        if head.origin is not None and not cors.allowed(head.origin, snapshot.edge.cors_origins):
            raise Forbidden("Requests of web pages need an origin of edge.cors_origins.")
        client = request.scope.get("client")
        found = self._identities.principal(
            snapshot, head.kept, client[0] if client else "", self._clock.wall()
        )
        return found if isinstance(found, Principal) else await found

    # --- reading ---------------------------------------------------------------------------------

    async def _list(self, request: Request, owner: str) -> Response:
        after = _number(request, "after", 0, most=1 << 62)
        limit = max(1, _number(request, "limit", 20, most=MOST_LISTED))
        found = await self._resuming.store.listing(owner, after=after, limit=limit)
        value: dict[str, Any] = {"object": "list", "data": [shown(held) for held in found]}
        if len(found) == limit:
            value["next"] = f"{PREFIX}?after={found[-1].seq}&limit={limit}"
        return json(value)

    async def _status(self, request: Request, owner: str) -> Response:
        return json(shown(await self._find(request, owner)))

    async def _find(self, request: Request, owner: str) -> Held:
        hold = request.path_params["hold"]
        if len(hold) > MAX_ID:
            raise UnknownHold(hold[:MAX_ID])
        return await self._resuming.store.find(hold, owner)

    async def _get(self, request: Request, owner: str) -> Response:
        held = await self._find(request, owner)
        if "text/event-stream" in request.headers.get("accept", ""):
            self._check_room()
            return StreamingResponse(
                self._follow(held, owner),
                media_type="text/event-stream",
                headers={"cache-control": "no-store", "x-accel-buffering": "no",
                         "tidegate-hold-id": held.id},
            )  # fmt: skip
        wait = prefer.wait(list(request.scope["headers"]), most=LONGEST_WAIT)
        if wait and held.state not in FINAL:
            self._check_room()
            held = await self._awaited(held, owner, self._clock.now() + wait)
        return await self._answer(held)

    def _check_room(self) -> None:
        followers = self._resuming.followers
        if followers.leaving:
            raise Draining("The process is stopping.", retry_after=MICRO)
        if followers.crowded:
            raise Saturated("As many requests as may wait for held calls do so already.",
                            retry_after=COME_BACK_S * MICRO)  # fmt: skip

    async def _awaited(self, held: Held, owner: str, until: Micros) -> Held:
        """The hold once it has ended, or as it is at that instant."""
        followers = self._resuming.followers
        while held.state not in FINAL and not followers.leaving:
            left = until - self._clock.now()
            if left <= 0:
                break
            await followers.news(held.id, min(LOOK, left))
            held = await self._resuming.store.find(held.id, owner)
        return held

    async def _answer(self, held: Held) -> Response:
        """The reply as the provider sent it, the refusal in its stead, or word to come back."""
        marks = {"tidegate-hold-id": held.id, "tidegate-hold-state": held.state.value}
        if held.state not in FINAL:
            return json(
                shown(held), status=202,
                headers={"retry-after": str(COME_BACK_S), "location": f"{PREFIX}/{held.id}",
                         **marks},
            )  # fmt: skip
        if held.bytes + self._books.bytes > MAX_SERVING:
            raise Saturated("As many bytes of results as may be are being fetched already.",
                            retry_after=COME_BACK_S * MICRO)  # fmt: skip
        reply = await self._resuming.store.reply(held.id) if held.state is State.DONE else None
        if reply is None:
            ended = problem(of_end(held))
            for name, value in marks.items():
                ended.headers[name] = value
            return ended
        answer = Weighed(reply.body, clock=self._clock, books=self._books)
        answer.status_code = reply.status
        answer.raw_headers = [
            *((name, value) for name, value in reply.headers if name != b"cache-control"),
            (b"content-length", b"%d" % len(reply.body)),
            (b"cache-control", b"no-store"),
            *((name.encode(), value.encode()) for name, value in marks.items()),
        ]
        return answer

    # --- following -------------------------------------------------------------------------------

    async def _follow(self, held: Held, owner: str) -> AsyncIterator[bytes]:
        """Comments while it waits, the bytes of a stream as they come, one event at the end.

        A call that asked for a stream is answered by its stream alone, once it was served; any
        other end, and any other call, is told by an event `result` or `error`.
        """
        yield b": held\n\n"
        try:
            async for piece in self._news(held, owner):
                yield piece
        except UnknownHold:
            yield error_event(Problem(404, "unknown_hold", "The hold was erased."), held)
        except SchedulerError:
            yield error_event(STORE_AWAY, held)

    async def _news(self, held: Held, owner: str) -> AsyncIterator[bytes]:
        resuming = self._resuming
        silent: Micros = 0
        relayed = False
        while not resuming.followers.leaving:
            run = resuming.run_of(held.id)
            if run is not None and not relayed and streams(run):
                relayed = True
                async for chunk in resuming.followers.bytes_of(run, BEAT):
                    yield chunk or b": waiting\n"
            held = await resuming.store.find(held.id, owner)
            if held.state in FINAL:
                yield await self._last(held, relayed=relayed)
                return
            await resuming.followers.news(held.id, LOOK)
            silent += LOOK
            if silent >= BEAT:
                silent = 0
                yield b": held\n\n"
        yield b": the gateway is stopping; ask again\n\n"

    async def _last(self, held: Held, *, relayed: bool) -> bytes:
        """What is still to be said of a hold that has ended."""
        reply = await self._resuming.store.reply(held.id) if held.state is State.DONE else None
        if reply is None:
            # A stream that was relayed may have stopped in the middle of an event.
            return b"\n\n" * relayed + error_event(of_end(held), held)
        if relayed:
            return b""
        if held.streams and reply.status == 200 and is_event_stream(list(reply.headers)):
            return reply.body
        return sse.frame(orjson.dumps(result(held, reply)), "result")

    # --- ending ----------------------------------------------------------------------------------

    async def _delete(self, request: Request, owner: str) -> Response:
        held = await self._find(request, owner)
        try:
            if held.state in FINAL:
                await self._resuming.store.forget(held.id, owner)
                return Response(status_code=204)
            return json(shown(await self._resuming.cancel(held.id, owner)))
        except IllegalTransition as error:
            raise Problem(409, "hold_moved", f"{str(error).capitalize()}; ask again.") from error


def streams(run: Run) -> bool:
    """Whether the execution has begun to answer with a stream that the caller asked for."""
    if run.head is None or not run.held.streams:
        return False
    status, headers = run.head
    return status == 200 and is_event_stream(headers)


def error_event(error: Problem, held: Held) -> bytes:
    """The end of a stream that has no answer; clients of both families see an error in it."""
    said = {"type": error.code, "code": error.code, "message": error.detail}
    value = {"type": "error", "error": said, "hold": shown(held)}
    return sse.frame(orjson.dumps(value), "error")


def result(held: Held, reply: Message) -> dict[str, Any]:
    """A whole reply as one event."""
    return {"type": "result", "hold": shown(held), "response": reply_value(reply)}


def _number(request: Request, name: str, default: int, *, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise Problem(400, "invalid_request", f"{name} must be a whole number.")
    return min(most, int(text))


def _unknown(request: Request) -> Problem:
    hold = str(request.path_params.get("hold", ""))[:MAX_ID]
    return Problem(404, "unknown_hold", f"No hold {hold!r} of yours is known: it never was, was "
                   "erased, or its time is over.")  # fmt: skip


async def _not_found(request: Request, _error: Exception) -> Response:
    return problem(Problem(404, "not_found", f"{request.url.path[:200]} is no path of this API."))


async def _not_allowed(request: Request, _error: Exception) -> Response:
    answer = problem(Problem(405, "method_not_allowed", "Holds are read with GET and ended with "
                             "DELETE; a call asks to be held when it is made."))  # fmt: skip
    answer.headers["allow"] = "GET, HEAD" if request.url.path == PREFIX else "GET, HEAD, DELETE"
    return answer


def beside(
    edge: Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]], ours: Starlette
) -> Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]:
    """The edge, with this API in front of it for its own paths. No frame of its own: it is hot."""

    def choose(scope: MutableMapping[str, Any], receive: Any, send: Any) -> Awaitable[None]:  # noqa: ANN401 - ASGI
        # Preflights are the edge's business, whatever the path.
        if scope["type"] == "http" and is_ours(scope["path"]) and scope["method"] != "OPTIONS":
            return ours(scope, receive, send)
        return edge(scope, receive, send)

    return choose
