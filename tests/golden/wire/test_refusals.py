"""Every error in every dialect for every client, pinned: status, headers, body, in-band form.

A change of `refusals.json` is a change of what clients *do*: read `protocols.md` §4 first. To write
it anew: `python -m tests.golden.wire.test_refusals`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway import errors
from gateway.call import ClientKind, Dialect, Family
from gateway.wire import refusals

GOLDEN = Path(__file__).with_name("refusals.json")

SECOND = 1_000_000
ERRORS: dict[str, errors.GatewayError] = {
    "malformed": errors.MalformedCall("messages must be a list", param="messages"),
    "malformed params": errors.MalformedCall("name is missing", param="params.name"),
    "unauthenticated": errors.Unauthenticated("The key is unknown"),
    "forbidden": errors.Forbidden("This key may not use gpt-x", because="agents.dev.models"),
    "no route": errors.NoSuchRoute("No such path"),
    "method": errors.MethodNotAllowed("Use POST", allow="POST, OPTIONS"),
    "body too large": errors.BodyTooLarge("The body is above 40 MiB"),
    "unknown coding": errors.UnknownCoding("The coding lzma is unknown"),
    "upgrade": errors.UpgradeRefused("WebSockets are not spoken here"),
    "never fits": errors.NeverFits("5,000 tokens exceed 1,000", because="pools.gpt.limits.tpm"),
    "contract": errors.ContractBreach("amount must not be negative", param="params.arguments"),
    "key conflict": errors.KeyConflict("The key was used with other arguments"),
    "loop": errors.LoopDetected("The call search({}) came four times", because="loops.same_call"),
    "queue full": errors.QueueFull(
        "120 calls wait", because="pools.gpt.limits.tpm", retry_after=12 * SECOND, place="ticket"
    ),
    "queue full, short": errors.QueueFull("Soon", retry_after=700_000),
    "deadline": errors.DeadlinePassed("It waited 120 s", retry_after=60 * SECOND),
    "wait above a minute": errors.QueueFull(
        "120 calls wait", retry_after=7_200 * SECOND, place="ticket"
    ),
    "budget": errors.BudgetSpent(
        "The daily budget of agent dev is spent", because="agents.dev.budgets.day",
        retry_after=5 * 3600 * SECOND,
    ),
    "upstream timeout": errors.UpstreamTimeout("No byte came within 180 s"),
    "upstream unreachable": errors.UpstreamUnreachable("The connection was refused"),
    "upstream malformed": errors.UpstreamMalformed("The answer was not HTTP"),
    "stream cut": errors.StreamCut("The stream ended without its end mark"),
    "breaker, soft": errors.BreakerOpen("openai/gpt-x is sick", retry_after=20 * SECOND),
    "breaker, hard": errors.BreakerOpen("The account has no money"),
    "store away": errors.StoreUnavailable("The shared store is away"),
    "store conflict": errors.StoreConflict("Another revision is stored"),
    "draining": errors.Draining("The process is stopping"),
    "escape": errors.GatewayError("Something unforeseen happened"),
}  # fmt: skip
CLIENTS = [
    (Dialect.CHAT, Family.OPENAI, ClientKind.SDK),
    (Dialect.EMBEDDINGS, Family.OPENAI, ClientKind.SDK),
    (Dialect.RESPONSES, Family.OPENAI, ClientKind.SDK),
    (Dialect.RESPONSES, Family.OPENAI, ClientKind.CODEX),
    (Dialect.MESSAGES, Family.ANTHROPIC, ClientKind.SDK),
    (Dialect.MESSAGES, Family.ANTHROPIC, ClientKind.CLAUDE_CODE),
    (Dialect.MCP, Family.MCP, ClientKind.SDK),
    (Dialect.MCP, Family.MCP, ClientKind.CODEX),
    (Dialect.PASSTHROUGH, Family.TIDEGATE, ClientKind.SDK),
]


def shown(
    error: errors.GatewayError, dialect: Dialect, family: Family, client: ClientKind
) -> dict[str, Any]:
    refusal = refusals.refusal(
        error, dialect=dialect, family=family, client=client, request_id="call_1", rpc_id="0"
    )
    name, body = refusals.in_band(
        error, dialect=dialect, request_id="call_1", response_id="resp_1", model="m", sequence=3,
        now=5 * SECOND, rpc_id="0",
    )  # fmt: skip
    return {
        "status": refusal.status,
        "headers": [f"{key.decode()}: {value.decode()}" for key, value in refusal.headers],
        "body": refusal.body,
        "in band": {"event": name, "data": body},
    }


def current() -> dict[str, Any]:
    return {
        f"{name} / {dialect} / {family} / {client}": shown(error, dialect, family, client)
        for name, error in ERRORS.items()
        for dialect, family, client in CLIENTS
    }


EXPECTED: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def test_nothing_is_pinned_that_no_longer_exists() -> None:
    assert EXPECTED.keys() == current().keys()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: "-".join(client))
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_looks_as_pinned(name: str, client: tuple[Dialect, Family, ClientKind]) -> None:
    dialect, family, kind = client
    key = f"{name} / {dialect} / {family} / {kind}"
    assert json.loads(json.dumps(shown(ERRORS[name], *client))) == EXPECTED[key]


if __name__ == "__main__":
    lines = (f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in current().items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line for each: readable diffs
