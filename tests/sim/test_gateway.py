"""Laws of the whole gateway in virtual time: order, fairness, deadlines, nothing left over."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import orjson
import pytest

from gateway.call import End, Kind
from gateway.errors import BreakerOpen, DeadlinePassed, NeverFits, QueueFull
from gateway.simulate.meters import Quota, Shape
from gateway.units import MICRO
from gateway.upstream import TransportFault
from tests.fixtures.asgi import Stage
from tests.fixtures.fake_transport import PLAIN, Act, FakeProvider, prompt, refusal
from tests.sim.loop import run
from tests.sim.world import Told, World, policy, sim_clock, snapshot


async def world(text: str = "", *, seed: int = 1, **provider) -> World:
    clock = sim_clock()
    up = FakeProvider(clock.now, **provider)
    return await World(snapshot(text or policy()), up, clock, seed=seed).ready()


@contextlib.asynccontextmanager
async def staged(text: str, **provider):
    """The world behind its edge, on one clock."""
    made: list[World] = []

    async def serve(call):
        return await made[0].service(call)

    rules = snapshot(text)
    async with Stage(serve, snapshot=rules) as stage:
        up = FakeProvider(stage.clock.now, **provider)
        made.append(await World(rules, up, stage.clock).ready())
        yield made[0], stage
        await stage.nothing_left()
    made[0].nothing_left()


async def at(seconds: float, coroutine):
    await asyncio.sleep(seconds)
    return await coroutine


ONE_AT_A_TIME = policy(limits="{concurrency: 1}")


# --- order


def test_the_most_urgent_go_first_and_a_tier_in_order_of_arrival():
    async def main():
        w = await world(ONE_AT_A_TIME)
        tiers = [3, 2, 3, 1, 2, 1, 3, 1]
        calls = [
            at(0.001 * n, w.ask(tier=tier, user=f"{tier}-{n}")) for n, tier in enumerate(tiers)
        ]
        told = await asyncio.gather(*calls)
        assert all(one.ok for one in told)
        w.nothing_left()
        return [user for _, user in w.transport.books.requests]

    # The first found nobody before it; all others were waiting when it ended.
    assert run(main()) == ["3-0", "1-3", "1-5", "1-7", "2-1", "2-4", "3-2", "3-6"]


def test_an_agent_with_a_thousand_calls_does_not_keep_others_waiting():
    async def main():
        w = await world(ONE_AT_A_TIME)
        hog = [w.ask(agent="sim-hog", user=f"hog-{n}") for n in range(60)]
        polite = [
            at(0.01, w.ask(agent=f"sim-{who}", user=f"{who}-{n}"))
            for who in ("ann", "bob", "cy")
            for n in range(10)
        ]
        await asyncio.gather(*hog, *polite)
        w.nothing_left()
        return [user.split("-")[0] for _, user in w.transport.books.requests]

    order = run(main())
    # Forty calls make ten rounds of four agents; whoever asked for more waits for the rest alone.
    shares = Counter(order[1:41])
    assert shares["ann"] == shares["bob"] == shares["cy"] == 10
    assert set(order[41:]) == {"hog"}


def test_weights_share_a_full_pool_in_proportion():
    agents = """
tenants:
  heavy: {weight: 3}
  light: {weight: 1}
"""
    text = policy(limits="{concurrency: 1}", more=agents)
    text = text.replace("fairness: agent", "fairness: tenant").replace(
        "agents:\n",
        "agents:\n"
        '  a: {keys: [{pattern: "heavy-*"}], tenant: heavy, loopback_only: true}\n'
        '  b: {keys: [{pattern: "light-*"}], tenant: light, loopback_only: true}\n',
        1,
    )

    async def main():
        w = await world(text)
        calls = [
            w.ask(agent=f"{who}-1234", user=f"{who}-{n}")
            for n in range(40)
            for who in ("heavy", "light")
        ]
        await asyncio.gather(*calls)
        return [user.split("-")[0] for _, user in w.transport.books.requests]

    shares = Counter(run(main())[:40])
    assert abs(shares["heavy"] - 30) <= 1


def test_a_call_refused_for_quota_goes_back_to_its_place_before_later_ones():
    async def main():
        w = await world(
            ONE_AT_A_TIME,
            script=lambda number, _body: refusal(retry_after=1.5) if number == 1 else PLAIN,
        )
        told = await asyncio.gather(
            w.ask(user="first"), *(at(0.001 * n, w.ask(user=f"later-{n}")) for n in range(1, 6))
        )
        assert all(one.ok for one in told)
        w.nothing_left()
        return told[0], [user for _, user in w.transport.books.requests]

    first, order = run(main())
    assert order == ["first", "first", *(f"later-{n}" for n in range(1, 6))]
    assert first.call.attempt == 2
    assert first.queued >= 1.4  # the pool waited as the provider had asked; nobody else slipped in


# --- books


def test_both_sides_agree_and_a_window_later_nothing_is_held():
    async def main():
        quota = Quota(shape=Shape.SLIDING, tokens=200_000, requests=1_000)
        w = await world(policy(limits="{tpm: 200000, rpm: 1000}"), quota=quota)
        draw = random.Random(5)
        calls = [
            at(draw.random() * 20, w.ask(
                agent=f"sim-{n % 7}", tier=1 + n % 3, tokens=draw.randrange(50, 2_000),
                output=draw.randrange(1, 300), stream=n % 2 == 0,
            ))
            for n in range(300)
        ]  # fmt: skip
        told = await asyncio.gather(*calls)
        assert all(one.ok for one in told)
        books = w.transport.books
        assert sum(one.call.usage.input for one in told) == books.reported_input
        assert sum(one.call.usage.output for one in told) == books.reported_output
        assert books.charged == books.reported_input + books.reported_output
        assert max(books.completed.values()) == 1
        assert not books.refused
        w.nothing_left()
        # Nothing else is charged after the last settlement: the mirror holds what the window does.
        now, held = w.clock.now(), w.view().dimensions[1].used // MICRO
        recent = sum(cost for when, cost in books.charges if now - 60 * MICRO < when)
        assert recent <= held <= recent * 1.05
        await asyncio.sleep(61)
        w.forgotten()

    run(main())


def test_the_window_of_the_provider_is_never_exceeded_whatever_leaves():
    async def main(seed: int):
        quota = Quota(shape=Shape.SLIDING, tokens=60_000, requests=500)
        w = await world(policy(limits="{tpm: 60000, rpm: 500}"), quota=quota, seed=seed)
        draw = random.Random(seed)
        tasks = []
        for n in range(400):
            call = w.ask(
                tokens=draw.randrange(20, 3_000), output=draw.randrange(1, 400), tier=1 + n % 3,
                stream=draw.random() < 0.5, agent=f"sim-{n % 11}",
            )  # fmt: skip
            task = asyncio.get_running_loop().create_task(call)
            tasks.append(task)
            if draw.random() < 0.3:
                asyncio.get_running_loop().call_later(draw.random() * 30, task.cancel)
            await asyncio.sleep(draw.random() * 0.4)
        await asyncio.gather(*tasks, return_exceptions=True)
        w.nothing_left()
        return w.transport.books.refused, w.transport.open

    for seed in (1, 2, 3):
        refused, still_open = run(main(seed))
        assert not refused
        assert still_open == 0


@pytest.mark.slow
def test_ten_thousand_calls_leave_nothing_behind_though_clients_leave_at_any_moment():
    async def main():
        draw = random.Random(11)
        acts = [
            refusal(retry_after=0.2),
            refusal(503, code="overloaded"),
            Act(fault=TransportFault("reset", sent="all")),
            Act(fault=TransportFault("connect", sent="nothing")),
            Act(cut_after=1),
            Act(error_after=0),
            Act(error_after=2),
            Act(usage=False),
            Act(head_after=1.0),
            *[PLAIN] * 80,  # most are well, or the breaker would rightly spare the upstream
        ]
        w = await world(
            policy(limits="{tpm: 30M, rpm: 100000, concurrency: 400}", wait="20s"),
            script=lambda _number, _body: draw.choice(acts),
            first_byte=0.1,
        )
        loop = asyncio.get_running_loop()
        tasks = []
        for n in range(10_000):
            task = loop.create_task(
                w.ask(
                    agent=f"sim-{n % 97}", tier=1 + n % 3, tokens=draw.randrange(10, 3_000),
                    output=draw.randrange(1, 200), stream=n % 3 == 0, user=f"u{n}",
                )
            )  # fmt: skip
            tasks.append(task)
            if n % 4 == 0:
                loop.call_later(draw.random() * draw.choice((0.01, 0.3, 3.0)), task.cancel)
            if n % 20 == 19:
                await asyncio.sleep(0.06)
        told = await asyncio.gather(*tasks, return_exceptions=True)
        w.nothing_left()
        up = w.transport
        assert up.open == 0
        assert len(w.ended) == 10_000  # each call has one end in the books, none two
        assert len({call.id for call, *_ in w.ended}) == 10_000
        ok = [one for one in told if isinstance(one, Told) and one.ok and one.error is None]
        gone = [one for one in told if isinstance(one, asyncio.CancelledError)]
        assert len(ok) > 6_000
        assert len(gone) > 300
        unexpected = [one for one in told if not isinstance(one, Told | asyncio.CancelledError)]
        assert not unexpected
        assert max(up.books.completed.values()) == 1  # no call was executed to its end twice
        await asyncio.sleep(90)
        w.forgotten()

    run(main())


def test_a_client_that_leaves_while_it_waits_costs_nothing_and_moves_nobody():
    async def main():
        w = await world(ONE_AT_A_TIME)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(w.ask(user=f"u{n}")) for n in range(5)]
        await asyncio.sleep(0.1)
        for n in (1, 3):
            tasks[n].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        w.nothing_left()
        return [user for _, user in w.transport.books.requests]

    assert run(main()) == ["u0", "u2", "u4"]


def test_a_client_that_leaves_a_stream_pays_for_what_it_got():
    async def main():
        w = await world(policy(limits="{tpm: 60000}"), per_token=0.01)
        loop = asyncio.get_running_loop()
        task = loop.create_task(w.ask(stream=True, tokens=500, output=400))
        await asyncio.sleep(2.5)  # two of four pieces are out
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        call = w.ended[0][0]
        assert call.end is End.CLIENT_GONE
        assert call.usage.estimated
        assert call.usage.input == call.estimate.input
        assert 0 < call.usage.output < 400
        assert w.transport.open == 0
        w.nothing_left()

    run(main())


# --- waiting and refusing


def test_a_wait_beyond_the_deadline_is_refused_at_once_with_a_place_in_line():
    async def main():
        w = await world(policy(limits="{tpm: 6000}", wait="10s"))
        await w.ask(tokens=5_000)
        told = await asyncio.gather(*(w.ask(tokens=2_000) for _ in range(3)))
        last = told[-1]
        assert isinstance(last.error, QueueFull)
        assert last.ended == last.asked
        assert last.error.retry_after >= MICRO
        assert last.error.place
        assert last.call.sent is False
        w.nothing_left()

    run(main())


def test_a_call_whose_turn_does_not_come_is_told_at_its_deadline():
    async def main():
        w = await world(policy(limits="{concurrency: 1}", wait="5s"), first_byte=30.0)
        first, late = await asyncio.gather(w.ask(), at(0.1, w.ask()))
        assert first.ok
        assert isinstance(late.error, DeadlinePassed)
        assert 5.0 <= late.ended - late.asked <= 5.2
        assert len(w.transport.books.requests) == 1
        w.nothing_left()

    run(main())


def test_what_can_never_fit_is_refused_before_anything_is_sent():
    async def main():
        w = await world(policy(limits="{tpm: 6000}"))
        told = await w.ask(tokens=7_000)
        assert isinstance(told.error, NeverFits)
        assert told.error.because == "pools.quota.limits.tpm"
        assert not w.transport.books.requests
        w.nothing_left()

    run(main())


def test_waiting_exactly_as_told_is_enough():
    async def main():
        w = await world(policy(limits="{tpm: 6000}", wait="10s"))
        await w.ask(tokens=5_000)
        told = await w.ask(tokens=3_000)
        if told.ok:
            return
        header = [(b"tidegate-place", told.error.place.encode())]
        await asyncio.sleep(told.error.retry_after / MICRO)
        again = await w.ask(tokens=3_000, headers=header)
        assert again.ok
        w.nothing_left()

    run(main())


# --- sickness


def faulty(begin: float, end: float, act: Act):
    """An upstream that is sick for a while, by its own loop's time."""

    def script(_number: int, _body) -> Act:
        now = asyncio.get_running_loop().time()
        return act if begin <= now < end else PLAIN

    return script


SICK = Act(status=500, body={"error": {"message": "boom", "type": "server_error"}})


def test_a_breaker_opens_within_three_seconds_and_closes_when_the_upstream_is_well():
    async def main():
        w = await world(policy(limits="{rpm: 60000}", wait="60s"), script=faulty(10, 20, SICK))
        told = await asyncio.gather(*(at(n * 0.2, w.ask()) for n in range(300)))
        assert w.swaps[0] == ("up/m", "open")
        assert w.swaps[-1] == ("up/m", "closed")
        arrived = Counter(
            int(when / MICRO) - int(w.transport.books.requests[0][0] / MICRO)
            for when, _ in w.transport.books.requests
        )
        # 5 calls a second ask; once it is open only probes reach the sick upstream.
        assert sum(arrived[second] for second in range(13, 20)) <= 8
        # Nobody who could wait was refused: those who failed did so before it opened.
        failed = [one for one in told if not one.ok]
        assert len(failed) <= 8
        assert all(one.asked < 13 for one in failed)
        w.nothing_left()

    run(main())


def test_a_few_fast_failures_among_many_calls_that_start_at_once_are_no_outage():
    def script(number: int, _body) -> Act:
        return SICK if number % 20 == 0 else PLAIN  # fails in 10 ms, while heads take a second

    async def main():
        w = await world(policy(limits="{rpm: 100M}"), script=script, first_byte=1.0)
        for _ in range(3):
            told = await asyncio.gather(*(w.ask() for _ in range(300)))
            assert sum(one.ok for one in told) >= 280
        assert not w.swaps
        w.nothing_left()

    run(main())


def test_an_outage_opens_the_breaker_however_many_calls_start_at_once():
    async def main():
        w = await world(policy(limits="{rpm: 100M}"), script=lambda _n, _b: SICK, first_byte=1.0)
        await asyncio.gather(*(at(n * 0.01, w.ask()) for n in range(300)))
        assert w.swaps[0] == ("up/m", "open")
        return len(w.transport.books.requests)

    assert run(main()) < 60


def test_a_queue_is_not_sent_to_an_upstream_that_fell_sick_meanwhile():
    async def main():
        w = await world(
            policy(limits="{rpm: 60}", wait="100s"), script=faulty(5, 25, SICK), first_byte=0.1
        )
        told = await asyncio.gather(*(w.ask(user=f"u{n}") for n in range(40)))
        requests = w.transport.books.requests
        began = requests[0][0]
        sick = [user for when, user in requests if 10 <= (when - began) / MICRO < 25]
        # One a second is granted; without eviction all fifteen would be sent, and repeated twice.
        assert len(sick) <= 12  # probes
        assert sum(one.ok for one in told) >= 34
        assert any(note.verdict == "evicted" for one in told for note in one.call.notes)
        w.nothing_left()

    run(main())


def test_a_quota_that_is_spent_keeps_its_queue_and_its_tiers():
    def script(number: int, _body) -> Act:
        return refusal(retry_after=2.0) if 5 <= number <= 9 else PLAIN

    async def main():
        w = await world(policy(limits="{tpm: 60000}"), script=script, first_byte=0.5)
        low = [at(n * 0.1, w.ask(tier=2 + n % 2, tokens=400)) for n in range(200)]
        high = [at(15 + n, w.ask(tier=1, tokens=400)) for n in range(20)]
        told = await asyncio.gather(*low, *high)
        assert all(one.ok for one in told)
        # It opens and closes, never half: no probe of a lower tier kept the most urgent waiting.
        assert {state for _, state in w.swaps} == {"open", "closed"}
        assert max(one.ended - one.asked for one in told[200:]) < 2.0
        w.nothing_left()

    run(main())


def test_a_call_in_trip_waits_for_a_probe_instead_of_being_refused_for_its_lease():
    async def main():
        w = await world(policy(limits="{rpm: 6000}", wait="12s"), script=faulty(0, 3, SICK))
        await asyncio.gather(*(w.ask() for _ in range(6)))
        told = await asyncio.gather(*(at(3.5 + 0.01 * n, w.ask()) for n in range(20)))
        assert all(one.ok for one in told), [one.error for one in told]

    run(main())


def test_a_sick_upstream_with_a_stated_end_beyond_the_deadline_is_refused_softly():
    act = Act(status=503, body={"error": {"message": "down"}}, headers=((b"retry-after", b"50"),))

    async def main():
        w = await world(policy(limits="{rpm: 6000}", wait="5s"), script=lambda _n, _b: act)
        await asyncio.gather(*(w.ask() for _ in range(12)))
        told = await w.ask()
        assert isinstance(told.error, BreakerOpen)
        assert told.error.retry_after > 5 * MICRO
        assert told.ended == told.asked
        w.nothing_left()

    run(main())


LADDER = policy(
    limits="{rpm: 600}",
    more="",
).replace(
    "models:\n  m: {provider: up, pool: quota}\n",
    "  spare:\n    provider: other\n    limits: {rpm: 600}\n"
    "models:\n  m: {provider: up, pool: quota, ladder: [little]}\n"
    "  little: {provider: other, pool: spare, upstream: small}\n",
).replace(
    "pools:\n",
    "  other:\n    kind: openai\n    base_url: http://spare.test\n"
    "    keys: [{id: s, value: sk}]\npools:\n",
    1,
)  # fmt: skip


def by_host(sick: Act):
    def script(_number: int, body) -> Act:
        return PLAIN if body["model"] == "small" else sick

    return script


@pytest.mark.parametrize(
    ("sick", "reason"),
    [
        (SICK, b"fault"),
        (refusal(429, code="insufficient_quota"), b"money"),
        (Act(status=529, body={"error": {"type": "overloaded_error"}}), b"capacity"),
    ],
)
def test_the_ladder_serves_what_the_first_choice_cannot(sick, reason):
    async def main():
        w = await world(LADDER, script=by_host(sick))
        told = await asyncio.gather(*(at(n * 0.1, w.ask(user=f"u{n}")) for n in range(40)))
        assert all(one.ok for one in told)
        call = told[0].call
        headers = dict(call.extra_headers)
        # By the time that its own attempts are used up others may have opened the breaker.
        assert headers[b"tidegate-downgrade-reason"] in (reason, b"breaker_open")
        assert headers[b"tidegate-model-requested"] == b"m"
        assert headers[b"tidegate-model-served"] == b"small"
        if reason != b"money":
            # Once its breaker is open the first choice is asked by probes only.
            assert len(w.transport.books.requests) < 40 * 2
        w.nothing_left()

    run(main())


def test_a_callers_own_fault_never_takes_the_ladder():
    bad = Act(status=400, body={"error": {"message": "bad", "type": "invalid_request_error"}})

    async def main():
        w = await world(LADDER, script=by_host(bad))
        told = [await w.ask() for _ in range(20)]
        assert {one.status for one in told} == {400}
        assert len(w.transport.books.requests) == 20
        assert not w.swaps
        w.nothing_left()

    run(main())


# --- the edge


def test_a_waiting_stream_hears_a_sign_of_life_after_twelve_seconds_and_every_ten():
    async def main():
        async with staged(ONE_AT_A_TIME, first_byte=40.0) as (_, stage):
            body = orjson.dumps(
                {"model": "m", "stream": True, "messages": [{"role": "user", "content": "t:10"}]}
            )
            headers = [(b"authorization", b"Bearer sim-1")]
            first = stage.request(headers=headers, body=body)
            waiting = stage.request(headers=headers, body=body)
            heard = []
            loop = asyncio.get_running_loop()
            for _ in range(360):
                before = len(waiting.chunks)
                await asyncio.sleep(0.1)
                if len(waiting.chunks) > before:
                    heard.append(loop.time())
            await first.done()
            await waiting.done()
            assert (first.status, waiting.status) == (200, 200)
            assert waiting.body.rstrip().endswith(b"data: [DONE]")
        return heard

    heard = run(main())
    assert len(heard) == 3
    for seen, due in zip(heard, (12.0, 22.0, 32.0), strict=True):
        assert due <= seen <= due + 0.3


def test_a_client_that_hangs_up_in_line_is_gone_at_once():
    async def main():
        async with staged(ONE_AT_A_TIME, first_byte=5.0) as (w, stage):
            body = orjson.dumps(
                {"model": "m", "messages": [{"role": "user", "content": prompt(9)}]}
            )
            headers = [(b"authorization", b"Bearer sim-1")]
            first = stage.request(headers=headers, body=body)
            others = [stage.request(headers=headers, body=body) for _ in range(200)]
            await asyncio.sleep(1)
            assert w.store.waiting() == 200
            for one in others:
                one.leave()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert w.store.waiting() == 0
            await first.done()
            await asyncio.gather(*(one.task for one in others))
        return len(w.transport.books.requests)

    assert run(main()) == 1


# --- determinism


def test_one_seed_gives_one_history():
    async def main():
        draw = random.Random(3)
        w = await world(
            policy(limits="{tpm: 60000}"),
            script=lambda n, _b: refusal(retry_after=0.5) if n % 7 == 0 else PLAIN,
        )
        await asyncio.gather(
            *(
                at(draw.random() * 30, w.ask(tokens=draw.randrange(10, 900), tier=1 + n % 3))
                for n in range(200)
            )
        )
        return w.transport.books.requests

    assert run(main()) == run(main())


def test_a_queue_let_loose_by_the_end_of_a_block_feels_its_way():
    async def main():
        w = await world(
            policy(limits="{rpm: 6000}", wait="10s"),
            script=lambda _n, _b: refusal(retry_after=1.0),
        )
        await asyncio.gather(*(at(n * 0.025, w.ask()) for n in range(400)))
        w.nothing_left()
        return len(w.transport.books.requests)

    # A provider that always refuses sees a request every second or so, not the queue each time.
    assert run(main()) <= 60


def test_kinds_that_are_nobodys_quota_leave_the_meter_alone():
    async def main():
        w = await world(policy(limits="{rpm: 600}"), script=lambda _n, _b: SICK)
        await asyncio.gather(*(w.ask() for _ in range(10)))
        assert w.view().factor_ppm == MICRO
        assert w.view().blocked_for == 0
        return w.ended[-1][0]

    call = run(main())
    assert call.upstream_status == 500
    assert Kind.FAULT == "fault"
