"""Two gateways as an operator starts them, two providers and a store: what they know together."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.integration.gateway import (
    WIDE,
    Emulator,
    Gateway,
    ask,
    emulation,
    policy,
    request,
    scratch,
    until,
)

pytestmark = pytest.mark.integration

TASK = 60_000
"""Tokens of a task."""


def chosen(url: str, prefix: str, second: int):
    provider = {
        "kind": "other", "base_url": f"http://127.0.0.1:{second}", "dialects": ["openai"],
        "keys": [{"id": "any", "value": "${UPSTREAM_KEY}"}], "headers": "openai",
    }  # fmt: skip
    return policy(
        providers={"second": provider},
        pools={"other": {"provider": "second", "limits": WIDE, "shape": "window_60s",
                         "accounting": "realtime"}},
        models={"gpt-b": {"provider": "second", "pool": "other"}},
        loops={"mode": "enforce", "task_tokens": TASK},
        fleet={"redis": url, "prefix": prefix},
    )  # fmt: skip


@contextlib.asynccontextmanager
async def pair(url: str, prefix: str):
    """Both gateways; they end with status 0."""
    with scratch() as folder:
        providers = [Emulator(folder, name) for name in ("first", "second")]
        members = []
        try:
            for each in providers:
                await each.serve(emulation())
            for name in ("one", "two"):
                (folder / name).mkdir()
                each = Gateway(folder / name, name)
                members.append(each)
                await each.serve(chosen(url, prefix, providers[1].port), upstream=providers[0].port)
            yield members
            for each in members:
                assert await each.stop() == 0, each.err.read_text()[-3000:]
                assert each.crashes() == []
        finally:
            for each in (*members, *providers):
                await each.kill()


async def asked(each: Gateway, path: str, body=None, *, method: str = "", workflow: str = ""):
    headers = {"connection": "close"}
    if workflow:
        headers["baggage"] = f"workflow.id={workflow}"
    method = method or ("POST" if body else "GET")
    said = request(path, body, key=each.key, method=method, headers=headers)
    return await ask(each.port, said, method=method)


def told(text: str):
    return {"model": "gpt-a", "messages": [{"role": "user", "content": text}], "max_tokens": 20}


def test_two_gateways_know_together_what_one_would(valkey, prefix):
    async def run():
        async with pair(valkey.url, prefix) as (one, two):
            await stored(one, two)
            await rally(one, two)
            await budget(one, two)

    async def stored(one, two):
        made = await asked(one, "/v1/responses", {"model": "gpt-b", "input": "hello"})
        name = made.json()["id"]
        assert (await asked(two, f"/v1/responses/{name}")).status == 200
        following = {"model": "gpt-b", "input": "more", "previous_response_id": name}
        assert (await asked(two, "/v1/responses", following)).status == 200
        gone = await asked(two, f"/v1/responses/{name}", method="DELETE")
        assert gone.status == 200
        assert (await asked(one, "/v1/responses/resp_never")).status == 404

    async def rally(one, two):
        async def refused() -> bool:
            for each, text in ((one, "please check"), (two, "done")):
                answer = await asked(
                    each, "/v1/chat/completions", told(text), workflow=f"rally,agent.id={text[:4]}"
                )
                if answer.status != 200:
                    assert b"Two agents of the workflow" in answer.body
                    return True
            return False

        await until(refused)

    async def budget(one, two):
        number = 0

        async def spent(each) -> bool:
            nonlocal number
            number += 1
            body = told(f"{number} " + "word " * 4_000)
            answer = await asked(each, "/v1/chat/completions", body, workflow="task")
            return answer.status != 200 and b"The task used" in answer.body

        await until(lambda: spent(one))
        await until(lambda: spent(two))
        assert number <= 40
        with valkey.client() as client:
            client.flushall()
        await asyncio.sleep(1.1)
        assert await spent(one)
        assert await spent(two)

    asyncio.run(run())
