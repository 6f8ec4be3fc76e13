"""The admin listener (default 127.0.0.1:8485): health, readiness, metrics, status, explain, reload.

Never on the data port. Errors are application/problem+json (RFC 9457). Starlette, because nothing
here is hot. The listener has no authentication of its own: it binds to loopback unless told
otherwise, and shows no secret and no prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from gateway.desk import Unfit

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")
Given: TypeAlias = T | Awaitable[T]

JSON = "application/json"
PROBLEM = "application/problem+json"
MOST_ID = 300
MOST_POSTED = 16 * 1024
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class OperatorsDesk(Protocol):
    """Approvals and effects in doubt: of this process (`desk.py`), or of all workers."""

    async def approvals(self, state: str, after: int) -> dict[str, Any]:
        """Approvals of a state ("" means all), oldest first."""

    async def approval(self, approval: str) -> dict[str, Any]:
        """One approval with all that is signed."""

    async def decide(self, approval: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A signed decision."""

    async def doubts(self) -> dict[str, Any]:
        """Effects in doubt, oldest first."""

    async def resolve(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A human's word on an effect in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminView:
    """What the admin listener may ask of the process.

    Attributes:
        status: The whole state as plain values.
        ready: An empty list when ready, else what is missing.
        metrics: The Prometheus text; may render in a thread.
        explain: The decision record of a call, or None if it is unknown or forgotten.
        reload: Load the policy anew; "" on success, else the errors.
        reset_loops: The conversations of a session ("" means all) begin anew; how many.
        revoke: That principal is refused from now on.
        desk: Approvals, and effects in doubt.
    """

    status: Callable[[], Given[dict[str, Any]]]
    ready: Callable[[], Given[list[str]]]
    metrics: Callable[[], Awaitable[bytes]]
    explain: Callable[[str], Given[dict[str, Any] | None]]
    reload: Callable[[], Awaitable[str]]
    reset_loops: Callable[[str], Given[int]]
    revoke: Callable[[str], Given[None]]
    desk: OperatorsDesk


async def given(value: Given[T]) -> T:
    """What a process says at once, or several after they were asked."""
    if isawaitable(value):
        return await value
    return value


def answer(value: Any, *, status: int = 200, kind: str = JSON) -> Response:  # noqa: ANN401 - JSON
    """Indented JSON: people read this with curl."""
    body = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    return Response(body, status_code=status, media_type=kind)


def problem(status: int, title: str, detail: str) -> Response:
    """An error of the admin listener."""
    value = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return answer(value, status=status, kind=PROBLEM)


def admin(view: AdminView) -> Starlette:  # noqa: C901 - one small function per path
    """The ASGI app of the admin listener."""

    async def root(_request: Request) -> Response:
        paths = [
            "/healthz",
            "/readyz",
            "/metrics",
            "/status",
            "/explain/{call_id}",
            "/reload (POST)",
            "/loops/reset?session=NAME or ?all=1 (POST)",
            "/revoke?principal=ID (POST)",
            "/approvals?state=pending&after=SEQ",
            "/approvals/{id}",
            "/approvals/{id}/decision (POST)",
            "/effects",
            "/effects/{key}/resolve (POST)",
        ]
        return answer({"tidegate": "admin", "paths": paths})

    async def healthz(_request: Request) -> Response:
        return Response(b"ok\n", media_type="text/plain")

    async def readyz(_request: Request) -> Response:
        missing = await given(view.ready())
        if missing:
            return problem(503, "not ready", "; ".join(missing))
        return Response(b"ready\n", media_type="text/plain")

    async def metrics(_request: Request) -> Response:
        return Response(await view.metrics(), headers={"content-type": METRICS})

    async def status(_request: Request) -> Response:
        return answer(await given(view.status()))

    async def explain(request: Request) -> Response:
        call_id = str(request.path_params["call_id"])
        record = await given(view.explain(call_id))
        if record is None:
            text = f"no call {call_id[:64]!r} in memory: it is unknown, still running or forgotten"
            return problem(404, "unknown call", text)
        return answer(record)

    async def reload(_request: Request) -> Response:
        errors = await view.reload()
        if errors:
            return problem(422, "policy refused; the old one stays in force", errors)
        state = await given(view.status())
        return answer({"reloaded": True, "policy": state.get("policy")})

    async def reset_loops(request: Request) -> Response:
        session, everyone = request.query_params.get("session"), request.query_params.get("all")
        if bool(session) == (everyone == "1"):
            return problem(400, "whose loops", "give session=NAME, or all=1 for every conversation")
        return answer({"reset": await given(view.reset_loops(session or ""))})

    async def revoke(request: Request) -> Response:
        principal = request.query_params.get("principal", "")
        if not 0 < len(principal) <= MOST_ID:
            text = "give principal=ID as the access log names it, for example key:ci"
            return problem(400, "whose credential", text)
        await given(view.revoke(principal))
        return answer({"revoked": principal})

    async def missing(request: Request, _error: Exception) -> Response:
        return problem(
            404, "not found", f"{request.url.path[:200]} is not a path of the admin listener"
        )

    return Starlette(
        routes=[
            Route("/", root),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/status", status),
            Route("/explain/{call_id}", explain),
            Route("/reload", reload, methods=["POST"]),
            Route("/loops/reset", reset_loops, methods=["POST"]),
            Route("/revoke", revoke, methods=["POST"]),
            *desk_routes(view.desk),
        ],
        exception_handlers={404: missing},
    )


def desk_routes(desk: OperatorsDesk) -> list[Route]:
    """What operators do about tool calls. Posts are JSON and say so: no web page can send them."""

    def route(path: str, method: str, act: Callable[[Request], Awaitable[Any]]) -> Route:
        async def serve(request: Request) -> Response:
            try:
                return answer(await act(request))
            except Unfit as error:
                return problem(error.status, error.title, error.detail)

        return Route(path, serve, methods=[method])

    async def approvals(request: Request) -> Any:  # noqa: ANN401 - JSON
        after = request.query_params.get("after", "0")
        if not after.isdecimal() or len(after) > 18:
            raise Unfit(400, "malformed cursor", "after is the seq of the last approval seen")
        return await desk.approvals(request.query_params.get("state", ""), int(after))

    async def decision(request: Request) -> Any:  # noqa: ANN401 - JSON
        return await desk.decide(request.path_params["id"], await posted(request))

    async def resolve(request: Request) -> Any:  # noqa: ANN401 - JSON
        return await desk.resolve(request.path_params["key"], await posted(request))

    return [
        route("/approvals", "GET", approvals),
        route("/approvals/{id}", "GET", lambda request: desk.approval(request.path_params["id"])),
        route("/approvals/{id}/decision", "POST", decision),
        route("/effects", "GET", lambda _request: desk.doubts()),
        route("/effects/{key}/resolve", "POST", resolve),
    ]


async def posted(request: Request) -> dict[str, Any]:
    """The JSON object of a post, within its bound."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != JSON:
        raise Unfit(415, "not JSON", "Send application/json.")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_POSTED:
            raise Unfit(413, "too large", f"At most {MOST_POSTED} bytes.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Unfit(400, "not JSON", "The body cannot be read.") from error
    if not isinstance(value, dict):
        raise Unfit(400, "not an object", "The body must be a JSON object.")
    return value
