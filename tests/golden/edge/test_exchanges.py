"""What a client reads, byte for byte, when the edge itself speaks.

The record stands in `exchanges.txt`; call ids and instants are masked. To accept a change, write
the text the failing test prints.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.errors import QueueFull
from gateway.snapshot import EdgeRules, Snapshot
from tests.fixtures.asgi import CHAT_STREAM, MESSAGES_STREAM, RESPONSES_STREAM, Exchange, Stage
from tests.fixtures.fake_service import CUT, SSE, Answer, FakeService
from tests.sim.loop import run

RECORD = Path(__file__).with_name("exchanges.txt")
FULL = QueueFull("The queue of pool gpt is full", because="pools.gpt", retry_after=7_000_000)
STREAMS = {
    "chat": ("/v1/chat/completions", CHAT_STREAM),
    "messages": ("/v1/messages", MESSAGES_STREAM),
    "responses": ("/v1/responses", RESPONSES_STREAM),
}
EVENT = b'event: x\ndata: {"a":1}\n\n'
CODEX = [(b"originator", b"codex_exec")]
PAGE = [(b"origin", b"https://app.example")]


def text(one: Exchange) -> str:
    headers = "\n".join(f"{name.decode()}: {value.decode()}" for name, value in one.headers)
    end = "complete" if one.complete else "broken off"
    whole = f"{one.status}\n{headers}\n\n{one.body.decode()}\n[{end}]\n"
    whole = whole.replace(dict(one.headers)[b"tidegate-call-id"].decode(), "{id}")
    return re.sub(r'"created_at":\d+', '"created_at":{at}', whole)


def ask(answer: Answer, *args: object, **kwargs: object) -> str:
    rules = EdgeRules(cors_origins=("https://app.example",))

    async def main():
        snapshot = Snapshot(revision=1, digest="d", edge=rules)
        async with Stage(FakeService(answer), snapshot=snapshot) as stage:
            return text(await stage.ask(*args, **kwargs))

    return run(main())


def exchanges() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (path, body) in STREAMS.items():
        found[f"{name} refused"] = ask(Answer(error=FULL), path=path, body=body)
        found[f"{name} refused while kept alive"] = ask(
            Answer(wait=30, error=FULL), path=path, body=body
        )
        found[f"{name} cut"] = ask(
            Answer(headers=list(SSE), body=[EVENT, CUT]), path=path, body=body
        )
        found[f"{name} not json"] = ask(Answer(), path=path, body=b"{")
        found[f"{name} too large"] = ask(
            Answer(), path=path, headers=[(b"content-length", b"99999999")], body=b""
        )
        found[f"{name} escaped"] = ask(Answer(error=ValueError()), path=path, body=body)
        found[f"{name} HEAD"] = ask(Answer(), "HEAD", path, body=[])
    found["codex refused"] = ask(
        Answer(error=FULL), path="/v1/responses", headers=CODEX, body=RESPONSES_STREAM
    )
    found["codex refused while kept alive"] = ask(
        Answer(wait=30, error=FULL), path="/v1/responses", headers=CODEX, body=RESPONSES_STREAM
    )
    found["upgrade"] = ask(Answer(), "GET", "/v1/responses", body=[])
    found["reserved"] = ask(Answer(), "POST", "/v1/tasks", body=b"{}")
    found["nowhere"] = ask(Answer(), "GET", "/v2/chat", body=[])
    found["two hosts"] = ask(Answer(), headers=[(b"host", b"localhost")] * 2)
    found["page refused"] = ask(Answer(error=FULL), headers=PAGE)
    found["preflight"] = ask(
        Answer(), "OPTIONS", "/v1/messages",
        [*PAGE, (b"access-control-request-headers", b"x-api-key")], [],
    )  # fmt: skip
    return found


def recorded() -> dict[str, str]:
    parts = re.split(r"^=== (.*)\n", RECORD.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.slow
def test_every_word_of_the_edge_is_as_recorded():
    found = exchanges()
    assert "".join(f"=== {name}\n{said}" for name, said in found.items()) == RECORD.read_text()
    assert recorded() == found
