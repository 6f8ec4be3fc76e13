"""The httpx transport in front of an app in process."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gateway.upstream import Outgoing, TransportFault
from gateway.upstream_httpx import HttpxTransport


async def echo(scope, receive, send):
    body = (await receive())["body"]
    headers = [(b"X-Target", scope["raw_path"]), (b"X-Query", scope["query_string"])]
    await send({"type": "http.response.start", "status": 207, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def out(**changes):
    fields = {"method": "POST", "base_url": "http://h", "target": b"/a?b=c", "headers": []}
    return Outgoing(**fields | changes)


def test_an_app_in_process_answers_like_an_upstream():
    async def main():
        transport = HttpxTransport(httpx.ASGITransport(app=echo))
        answer = await transport.send(out(body=b"hello"))
        assert answer.status == 207
        assert answer.headers == [(b"x-target", b"/a"), (b"x-query", b"b=c")]
        assert b"".join([chunk async for chunk in answer.chunks()]) == b"hello"
        await answer.close(reuse=True)
        await answer.close(reuse=False)
        await transport.close()

    asyncio.run(main())


def test_an_abort_fails_the_next_read():
    async def main():
        transport = HttpxTransport(httpx.ASGITransport(app=echo))
        answer = await transport.send(out(body=b"hello"))
        answer.abort("idle")
        with pytest.raises(TransportFault, match="idle"):
            await anext(answer.chunks())
        await answer.close(reuse=False)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "kind", "sent"),
    [
        (httpx.ConnectError("no"), "connect", "nothing"),
        (httpx.ConnectTimeout("no"), "connect_timeout", "nothing"),
        (httpx.PoolTimeout("no"), "pool_timeout", "nothing"),
        (httpx.ReadError("no"), "reset", "unknown"),
        (httpx.RemoteProtocolError("Server disconnected without …"), "reset", "unknown"),
        (httpx.RemoteProtocolError("illegal status line"), "malformed", "unknown"),
        (httpx.LocalProtocolError("illegal header"), "malformed", "nothing"),
    ],
)
def test_each_failure_of_httpx_says_what_may_have_left(error, kind, sent):
    def fail(_):
        raise error

    async def main():
        with pytest.raises(TransportFault) as caught:
            await HttpxTransport(httpx.MockTransport(fail)).send(out())
        assert (caught.value.kind, caught.value.sent) == (kind, sent)

    asyncio.run(main())


@pytest.mark.parametrize("base_url", ["", "ftp://h", "http://u:p@h", "http://"])
def test_a_base_url_that_is_none_sent_nothing(base_url):
    async def main():
        with pytest.raises(TransportFault) as caught:
            await HttpxTransport(httpx.MockTransport(lambda _: None)).send(out(base_url=base_url))
        assert (caught.value.kind, caught.value.sent) == ("connect", "nothing")

    asyncio.run(main())
