"""Who a held call acts for, asked of policy by name."""

from __future__ import annotations

import pytest

from gateway.call import Remembered
from gateway.errors import Forbidden
from gateway.identity.again import reinstated
from gateway.snapshot import AgentRule, ApiKey, EdgeRules, JwtIssuer, KeyPattern, Snapshot

DEV = AgentRule(id="dev", tenant="t", because="agents.dev", tier_cap=2)
LOAD = AgentRule(id="load", tenant="t", because="agents.load", many=True, loopback_only=True)
CORP = AgentRule(id="corp", tenant="t", because="agents.corp", many=True)


def key(name: str, agent: AgentRule, expires: float = 0.0) -> ApiKey:
    return ApiKey(id=name, salt=b"s", digest=name.encode().ljust(32), agent=agent, expires=expires)


POLICY = Snapshot(
    revision=1, digest="d", keys=(key("dev", DEV), key("old", DEV, 100.0), key("old", DEV, 300.0)),
    key_patterns=(KeyPattern(pattern="load-*", agent=LOAD),),
    jwt=(JwtIssuer(name="corp", issuer="https://i", audience="a", agents=(CORP,)),),
)  # fmt: skip
EMPTY = Snapshot(revision=2, digest="e")


def who(name: str, rule: str, agent: str = "x") -> Remembered:
    return Remembered(id=name, agent=agent, rule=rule, tier=2, until=0)


def again(one: Remembered, snapshot: Snapshot = POLICY, *, peer: str = "127.0.0.1", now: float = 0):
    return reinstated(snapshot, one, [], peer, now)


@pytest.mark.parametrize(
    ("name", "rule", "agent", "named"),
    [
        ("key:dev", "agents.dev", "dev", "dev"),
        ("key:load-7", "agents.load", "load-7", "load-7"),
        ("key:key-0123456789abcdef", "agents.load", "x", "key-0123456789abcdef"),
        ("jwt:corp:bob", "agents.corp", "bob", "bob"),
    ],
)
def test_who_policy_still_knows_is_the_same_principal(name, rule, agent, named):
    principal = again(who(name, rule, agent))
    assert (principal.id, principal.agent, principal.rule.because) == (name, named, rule)


@pytest.mark.parametrize(
    "one",
    [
        who("key:dev", "agents.other"), who("key:gone", "agents.dev"), who("key:dev", ""),
        who("key:evil-7", "agents.load"), who("jwt:corp:bob", "agents.dev"), who("", "agents.dev"),
        who("anonymous", "agents.dev"), who("spiffe:x", "agents.corp"),
    ],
    ids=lambda one: f"{one.id}-{one.rule}",
)  # fmt: skip
def test_who_policy_does_not_know_any_more_is_refused(one):
    with pytest.raises(Forbidden) as refused:
        again(one)
    assert refused.value.code == "identity_revoked"


def test_an_empty_policy_knows_nobody():
    for one in (who("key:dev", "agents.dev"), who("jwt:corp:b", "agents.corp")):
        with pytest.raises(Forbidden):
            again(one, EMPTY)


def test_a_key_counts_until_its_last_form_has_expired():
    assert again(who("key:old", "agents.dev"), now=200).expires == 300.0
    with pytest.raises(Forbidden):
        again(who("key:old", "agents.dev"), now=300)


def test_an_agent_of_this_machine_is_not_one_of_another():
    with pytest.raises(Forbidden, match="this machine"):
        again(who("key:load-7", "agents.load"), peer="10.0.0.1")


def test_the_anonymous_agent_is_known_while_policy_has_one():
    here = Snapshot(revision=1, digest="d", edge=EdgeRules(anonymous=DEV))
    assert again(who("anonymous", "agents.dev"), here).id == "anonymous"
