"""The admin listener of `serve --workers N`: what it shows and orders is asked of every worker.

Workers listen on loopback ports of their own; each is asked in a thread with the standard library's
client, since nothing here is hot. A worker that does not answer is named, never left out silently.
"""

from __future__ import annotations

import asyncio
import http.client
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import quote

import orjson

from gateway.admin import AdminView
from gateway.desk import Unfit
from gateway.telemetry.merge import merged

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

Ask: TypeAlias = "Callable[[str, str, bytes | None], Awaitable[_Said | None]]"

PATIENCE_S = 5.0
MOST_BYTES = 32 << 20


class Member(NamedTuple):
    """One worker; port 0 while it is not ready."""

    number: int
    port: int


class _Said(NamedTuple):
    status: int
    body: bytes


class Members:
    """All workers, asked together."""

    def __init__(self, workers: Callable[[], list[Member]]) -> None:
        self._workers = workers

    def view(self) -> AdminView:
        """For `admin.admin`."""
        return AdminView(
            status=self.status,
            ready=self.ready,
            metrics=self.metrics,
            explain=self.explain,
            reload=self.reload,
            reset_loops=self.reset_loops,
            revoke=self.revoke,
            desk=Desks(self._ask_one),
        )

    async def _ask(self, method: str, path: str) -> dict[int, _Said | None]:
        """Every worker's answer; None from those that gave none."""
        workers = self._workers()
        asked = (asyncio.to_thread(_one, method, one.port, path, None) for one in workers)
        found = await asyncio.gather(*asked)
        return {one.number: said for one, said in zip(workers, found, strict=True)}

    async def _ask_one(self, method: str, path: str, body: bytes | None) -> _Said | None:
        """The first answer of a worker; a post is repeated only where it could not be made."""
        for one in self._workers():
            said = await asyncio.to_thread(_one, method, one.port, path, body)
            if said is not None or (method != "GET" and one.port):
                return said
        return None

    async def status(self) -> dict[str, Any]:
        """Each worker's state under its number, and what all have in sum."""
        said = await self._ask("GET", "/status")
        workers = {
            str(number): orjson.loads(one.body) if one is not None and one.status == 200 else None
            for number, one in said.items()
        }
        known = [one for one in workers.values() if one is not None]
        first = known[0] if known else {}
        return {
            **{name: first.get(name) for name in ("version", "policy", "models")},
            "in_flight": sum(one["in_flight"] for one in known),
            "waiting": sum(one["waiting"] for one in known),
            "draining": any(one["draining"] for one in known),
            "uptime_us": max((one["uptime_us"] for one in known), default=0),
            "tokenizer_exact": all(one["tokenizer_exact"] for one in known),
            "store": first.get("store"),
            "pools": _pools(known),
            "breakers": first.get("breakers", []),
            "conversations": sum(one["conversations"] for one in known),
            "holds": first.get("holds"),
            "not_ready": await self.ready(),
            "workers": workers,
        }

    async def ready(self) -> list[str]:
        """What readiness misses, of whom."""
        said = await self._ask("GET", "/readyz")
        missing = []
        for number, one in said.items():
            if one is None:
                missing.append(f"worker {number}: no answer")
            elif one.status != 200:
                missing.append(f"worker {number}: {orjson.loads(one.body).get('detail', '')}")
        return missing

    async def metrics(self) -> bytes:
        """Every worker's samples, each with the worker's number."""
        said = await self._ask("GET", "/metrics")
        return merged({str(number): one.body for number, one in said.items() if one is not None})

    async def explain(self, call_id: str) -> dict[str, Any] | None:
        """The record of a call, from whoever served it."""
        said = await self._ask("GET", f"/explain/{quote(call_id, safe='')}")
        for number, one in said.items():
            if one is not None and one.status == 200:
                record: dict[str, Any] = orjson.loads(one.body)
                return {"worker": number, **record}
        return None

    async def reload(self) -> str:
        """Every worker loads the policy anew; the errors, "" where all took it."""
        said = await self._ask("POST", "/reload")
        errors = []
        for number, one in said.items():
            if one is None:
                errors.append(f"worker {number}: no answer")
            elif one.status != 200:
                errors.append(f"worker {number}: {orjson.loads(one.body).get('detail', '')}")
        return "\n".join(errors)

    async def reset_loops(self, session: str) -> int:
        """The conversations begin anew everywhere; how many."""
        query = f"session={quote(session, safe='')}" if session else "all=1"
        said = await self._ask("POST", f"/loops/reset?{query}")
        return sum(
            int(orjson.loads(one.body)["reset"])
            for one in said.values()
            if one is not None and one.status == 200
        )

    async def revoke(self, principal: str) -> None:
        """Refused everywhere."""
        await self._ask("POST", f"/revoke?principal={quote(principal, safe='')}")


class Desks:
    """Approvals and effects: workers share the file that keeps them, so any one may answer."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def approvals(self, state: str, after: int) -> dict[str, Any]:
        """As the first worker that answers lists them."""
        return await self._said("GET", f"/approvals?state={quote(state, safe='')}&after={after}")

    async def approval(self, approval: str) -> dict[str, Any]:
        """One approval."""
        return await self._said("GET", f"/approvals/{quote(approval, safe='')}")

    async def decide(self, approval: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Decided by one worker; calls that wait at others look for it themselves."""
        path = f"/approvals/{quote(approval, safe='')}/decision"
        return await self._said("POST", path, orjson.dumps(body))

    async def doubts(self) -> dict[str, Any]:
        """Effects in doubt."""
        return await self._said("GET", "/effects")

    async def resolve(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Resolved by one worker."""
        path = f"/effects/{quote(key, safe='')}/resolve"
        return await self._said("POST", path, orjson.dumps(body))

    async def _said(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        said = await self._ask(method, path, body)
        if said is None:
            raise Unfit(503, "no worker answers", "Ask again once a worker is ready.")
        value: dict[str, Any] = orjson.loads(said.body)
        if said.status != 200:
            raise Unfit(said.status, value.get("title", "refused"), value.get("detail", ""))
        return value


def _pools(known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pools are shared: of each the view of the worker that saw it last, which has most waiting."""
    best: dict[str, dict[str, Any]] = {}
    for one in known:
        for pool in one["pools"]:
            held = best.get(pool["name"])
            if held is None or sum(pool["waiting"]) > sum(held["waiting"]):
                best[pool["name"]] = pool
    return list(best.values())


def _one(method: str, port: int, path: str, body: bytes | None) -> _Said | None:
    if not port:
        return None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        headers = {"content-type": "application/json"} if body is not None else {}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return _Said(answer.status, answer.read(MOST_BYTES))
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
