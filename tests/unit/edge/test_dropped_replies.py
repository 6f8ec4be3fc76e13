"""A layer that fails with a reply in its hand: the permit behind it comes back all the same."""

from __future__ import annotations

import pytest

from gateway.call import End, Reply
from tests.fixtures.asgi import CHAT, Stage
from tests.fixtures.fake_service import Answer, FakeService, FakeSource
from tests.sim.loop import run


def test_a_layer_that_fails_after_the_answer_came_leaks_no_permit():
    service = FakeService(Answer())

    async def clumsy(call):
        call.answer = await service(call)
        raise TypeError("a defect")

    async def main():
        async with Stage(clumsy) as stage:
            assert (await stage.ask(body=CHAT)).status == 500

    run(main())
    [(_, source, ends)] = service.replies
    assert ends == [End.FAILED]
    assert source.closed == [False]


def test_a_closer_that_fails_keeps_no_other_from_giving_back():
    told = []

    def broken(_end: End) -> None:
        raise ZeroDivisionError

    reply = Reply(status=200, headers=[], source=FakeSource([]))
    reply.on_close(told.append)
    reply.on_close(broken)
    reply.on_close(told.append)
    with pytest.raises(ZeroDivisionError):
        reply.finish(End.CUT)
    reply.finish(End.COMPLETE)
    assert told == [End.CUT, End.CUT]
