"""Responses that continue one which the provider remembers (`previous_response_id`).

Such a request brings only what the tools returned; which calls it answers stood in the answer
before. So the end of an answer is read for its id and its calls, once, from a plain body or from
the terminal event of a stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

from gateway.call import Dialect
from gateway.wire import turns
from gateway.wire.openai_responses import TERMINAL
from gateway.wire.sse import Event
from gateway.wire.stream import Reader

Body: TypeAlias = Mapping[str, Any]


MOST_MADE = 50_000
"""Responses whose maker is remembered."""


def name_of(tenant: str, response: str) -> int:
    """What a tenant's response is called, in every process."""
    return turns.hash64(f"{tenant}\0{response}")


class Makers:
    """Which provider made which response (`name_of`); the ones made longest ago are forgotten.

    Weakness: a response made before this process began belongs to the first provider of the policy,
    unless a fleet knows better.
    """

    __slots__ = ("_heard", "_limit", "_made")

    def __init__(self, limit: int = MOST_MADE) -> None:
        self._made: OrderedDict[int, str] = OrderedDict()
        self._heard: OrderedDict[int, str] = OrderedDict()
        self._limit = limit

    def note(self, name: int, provider: str) -> int:
        """The provider made that response, here; the name of one that is forgotten, 0 if none."""
        self._made[name] = provider
        return self._made.popitem(last=False)[0] if len(self._made) > self._limit else 0

    def heard(self, name: int, provider: str) -> None:
        """The provider made that response, by way of another gateway."""
        self._heard[name] = provider
        if len(self._heard) > self._limit:
            self._heard.popitem(last=False)

    def of(self, name: int) -> str:
        """The name of its provider; "" where it is not known."""
        return self._made.get(name) or self._heard.get(name, "")


def remembered(body: Body) -> bool:
    """Whether the provider will remember the answer, so that a request may continue it."""
    return body.get("store") is not False


def outputs(body: Body) -> dict[str, object]:
    """What tools returned to calls of the response before, by call id; empty where none is named.

    The caller has made sure that no person spoke last and that the request brings no calls itself.
    """
    previous, items = body.get("previous_response_id"), body.get("input")
    if not isinstance(previous, str) or not previous or not isinstance(items, list):
        return {}
    found: dict[str, object] = {}
    for item in items:
        if isinstance(item, dict):
            if item.get("role") == "user":
                found.clear()  # a person spoke in between: what follows is what counts
            kind, key = item.get("type"), item.get("call_id")
            if isinstance(kind, str) and kind.endswith("_call_output") and isinstance(key, str):
                found[key] = item.get("output")
    return found


def asked(response: Body) -> tuple[str, tuple[turns.ToolCall, ...]]:
    """The id of a response and the calls it waits for; ("", ()) of a failed one or of none."""
    name = response.get("id")
    if not isinstance(name, str) or response.get("status") not in ("completed", "incomplete"):
        return "", ()
    output = response.get("output")
    # Built-in tools name no `call_id`: the provider runs them, so no result will be sent.
    waiting = [
        item
        for item in (output if isinstance(output, list) else ())
        if isinstance(item, dict) and item.get("call_id")
    ]
    calls: tuple[turns.ToolCall, ...] = ()
    for said in turns.of(Dialect.RESPONSES, {"input": waiting}):
        calls = (*said.calls, *calls)
    return name, calls


class EndReader(Reader):
    """The fold that keeps the response of a stream's terminal event and decodes nothing else."""

    __slots__ = ("response",)

    def __init__(self) -> None:
        super().__init__()
        self.response: Body = {}

    def skim(self, event: Event) -> bool:
        """True for terminal events."""
        if event.overflow:
            return False
        if event.name:
            return event.name in TERMINAL
        return b'"response.completed"' in event.data or b'"response.incomplete"' in event.data

    def feed(self, name: bytes, body: Body) -> None:  # noqa: ARG002 - the fold's own shape
        """Keep the response."""
        response = body.get("response")
        if isinstance(response, dict):
            self.response = response
