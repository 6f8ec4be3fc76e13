from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.call import SAYS
from gateway.errors import Forbidden, MalformedCall, NoSuchRoute, Unauthenticated
from gateway.identity import HINTS, Identities
from gateway.layers.identify import Recognizer, identify, standing
from gateway.snapshot import AgentRule, ApiKey, Model, Snapshot, Tier, hash_key
from gateway.units import MICRO
from gateway.wire import keepalive
from tests.sim.loop import run
from tests.unit.layers.ground import answering, deployment, made, reply, the_clock

KEY = "tg_dev_0123456789abcdef0123456789abcdef"
RULE = AgentRule(
    id="dev", tenant="acme", default_tier=3, tier_cap=2, models=("m", "gone"), because="agents.dev"
)
TIERS = (
    Tier(name="interactive", number=1, max_wait=10 * MICRO),
    Tier(name="standard", number=2, max_wait=20 * MICRO),
    Tier(name="batch", number=3, max_wait=30 * MICRO),
)


def policy(rule: AgentRule = RULE) -> Snapshot:
    salt = b"saltsalt"
    key = ApiKey(id="dev", salt=salt, digest=hash_key(salt, KEY), agent=rule)
    models = {name: Model(name=name, deployments=(deployment(),)) for name in ("m", "other")}
    return Snapshot(revision=1, digest="d", keys=(key,), models=models, tiers=TIERS)


async def asked(*headers: tuple[bytes, bytes], rule: AgentRule = RULE, body=None, key: str = KEY):
    async def no_keys(_issuer):
        raise AssertionError("no issuer is named")

    clock = the_clock()
    call = made(
        body, headers=[(b"authorization", f"Bearer {key}".encode()), *headers],
        snapshot=policy(rule),
    )  # fmt: skip
    call.principal = call.tier = None
    call.peer = "127.0.0.1"
    recognize = Recognizer(Identities(clock=clock, fetch=no_keys), clock)
    inner = answering(reply())
    await identify(recognize)(inner)(call)
    assert len(inner.seen) == 1
    return call


def test_a_stranger_is_refused_before_anything_is_done_for_it():
    async def main():
        with pytest.raises(Unauthenticated):
            await asked(key="tg_dev_wrong")

    run(main())


def test_who_calls_comes_from_the_credential():
    async def main():
        call = await asked()
        assert (call.principal.agent, call.principal.tenant) == ("dev", "acme")
        assert call.model.name == "m"

    run(main())


@pytest.mark.parametrize(
    ("wish", "tier"), [(None, 3), (b"3", 3), (b"2", 2), (b"1", 2), (b"interactive", 2)]
)
def test_a_wish_is_granted_as_far_as_policy_goes(wish, tier):
    async def main():
        headers = [] if wish is None else [(b"tidegate-tier", wish)]
        assert (await asked(*headers)).tier.number == tier

    run(main())


def test_a_wish_for_no_tier_at_all_names_those_there_are():
    async def main():
        with pytest.raises(MalformedCall, match="interactive, standard, batch"):
            await asked((b"tidegate-tier", b"x"))

    run(main())


def test_the_deadline_is_the_least_of_all_that_bound_it():
    async def main():
        call = await asked()
        assert call.deadline - call.received == 30 * MICRO
        call = await asked(rule=replace(RULE, max_wait=5 * MICRO))
        assert call.deadline - call.received == 5 * MICRO
        call = await asked((b"x-stainless-timeout", b"10"))
        assert call.deadline - call.received == 9 * MICRO

    run(main())


def test_a_model_for_others_is_forbidden_and_one_for_nobody_unknown():
    async def main():
        with pytest.raises(Forbidden) as refused:
            await asked(body={"model": "other"})
        assert refused.value.because == "agents.dev.models"
        with pytest.raises(NoSuchRoute):
            await asked(body={"model": "gone"})

    run(main())


def test_every_header_that_says_something_of_its_call_is_picked_when_the_call_begins():
    assert HINTS.union(keepalive.TIMEOUTS) <= SAYS
    assert b"x-stainless-retry-count" in SAYS  # read by the retries


def test_what_a_principal_usually_gets_is_asked_of_the_policy_anew_once_that_has_changed():
    async def main():
        first, second = made(snapshot=policy()), made(snapshot=replace(policy(), tiers=TIERS[::-1]))
        wishing = made(snapshot=policy(), headers=[(b"tidegate-tier", b"2")])
        second.principal = wishing.principal = first.principal = replace(first.principal, rule=RULE)
        for call in (first, wishing, first, second):
            standing(call)
        assert first.tier is TIERS[2]
        assert wishing.tier is TIERS[1]
        assert second.tier is TIERS[0]

    run(main())
