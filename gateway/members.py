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

Ask: TypeAlias = "Callable[..., Awaitable[dict[int, _Said | None]]]"

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
            desk=Desks(self._ask),
        )

    async def _ask(
        self, method: str, path: str, body: bytes | None = None
    ) -> dict[int, _Said | None]:
        """Every worker's answer; None from those that gave none."""
        workers = self._workers()
        asked = (asyncio.to_thread(_one, method, one.port, path, body) for one in workers)
        found = await asyncio.gather(*asked)
        return {one.number: said for one, said in zip(workers, found, strict=True)}

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
    """The desks of all workers as one: each keeps the approvals and effects of its own calls."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def approvals(self, state: str, after: int) -> dict[str, Any]:
        """The first of each worker, oldest first. Workers count apart, so there is no cursor."""
        if after:
            raise Unfit(400, "no cursor", "Workers count their approvals apart; list by state.")
        query = f"?state={quote(state, safe='')}" if state else ""
        return {"approvals": await self._all("/approvals" + query, "approvals", "requested")}

    async def approval(self, approval: str) -> dict[str, Any]:
        """From the worker that keeps it."""
        return self._whose(await self._ask("GET", f"/approvals/{quote(approval, safe='')}"))

    async def decide(self, approval: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """By the worker that keeps it; the others know nothing of it."""
        path = f"/approvals/{quote(approval, safe='')}/decision"
        return self._whose(await self._ask("POST", path, orjson.dumps(body)))

    async def doubts(self) -> dict[str, Any]:
        """Of all workers."""
        return {"effects": await self._all("/effects", "effects", "")}

    async def resolve(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """By the worker that keeps it."""
        path = f"/effects/{quote(key, safe='')}/resolve"
        return self._whose(await self._ask("POST", path, orjson.dumps(body)))

    async def _all(self, path: str, name: str, order: str) -> list[dict[str, Any]]:
        said = await self._ask("GET", path)
        found: list[dict[str, Any]] = []
        for number, one in said.items():
            if one is None:
                raise Unfit(503, "incomplete", f"worker {number} did not answer")
            if one.status != 200:
                raise _unfit(one)
            found += orjson.loads(one.body)[name]
        return sorted(found, key=lambda row: row[order]) if order else found

    @staticmethod
    def _whose(said: dict[int, _Said | None]) -> dict[str, Any]:
        known = [one for one in said.values() if one is not None and one.status != 404]
        done = next((one for one in known if one.status == 200), None)
        if done is not None:
            value: dict[str, Any] = orjson.loads(done.body)
            return value
        if known:
            raise _unfit(known[0])
        silent = [str(number) for number, one in said.items() if one is None]
        if silent:
            raise Unfit(503, "incomplete", f"no answer from worker {', '.join(silent)}")
        raise Unfit(404, "unknown", "No worker knows it.")


def _unfit(said: _Said) -> Unfit:
    problem = orjson.loads(said.body)
    return Unfit(said.status, problem.get("title", "refused"), problem.get("detail", ""))


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
