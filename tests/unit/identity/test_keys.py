"""gateway/identity: API keys, anonymous callers, what is remembered and for how long."""

from __future__ import annotations

import pytest

from gateway import identity
from gateway.admission.core import PoolSpec
from gateway.errors import Forbidden, MalformedCall, Unauthenticated
from gateway.identity import presented
from gateway.snapshot import AgentRule, EdgeRules, KeyPattern
from tests.unit.identity.ground import NOW, RULE, bearer, identities, snapshot, stored

KEY = "tg_k_0123456789abcdef"
AWAY = "192.0.2.7"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer " + KEY.encode())],
        [(b"authorization", b"bearer  " + KEY.encode() + b" ")],
        [(b"x-api-key", KEY.encode())],
        [(b"x-api-key", KEY.encode()), (b"authorization", b"Bearer " + KEY.encode())],
        [(b"x-api-key", b""), (b"authorization", b"Bearer " + KEY.encode())],
        [(b"authorization", b""), (b"x-api-key", KEY.encode())],
        [(b"authorization", b"Bearer "), (b"x-api-key", KEY.encode())],
    ],
)
def test_a_key_is_found_in_either_header(headers):
    principal = identities().principal(snapshot(stored(KEY)), headers, AWAY, NOW)
    assert (principal.id, principal.agent, principal.tenant) == ("key:k", "worker", "acme")


def test_two_different_credentials_are_malformed():
    headers = [(b"x-api-key", b"one"), (b"authorization", b"Bearer two")]
    with pytest.raises(MalformedCall) as caught:
        identities().principal(snapshot(), headers, AWAY, NOW)
    assert caught.value.code == "conflicting_credentials"


@pytest.mark.parametrize(
    "value",
    [
        b"Basic dXNlcjpw",
        b"tg_k_0123",
        b"Bearer two words",
        b"Bearer \xff\xfe",
        b"Bearer " + b"x" * 20_000,
    ],
)
def test_an_authorization_of_another_form_is_refused_without_repeating_it(value):
    with pytest.raises(Unauthenticated) as caught:
        identities().principal(snapshot(stored(KEY)), [(b"authorization", value)], "127.0.0.1", NOW)
    secret = value.split()[-1].decode("latin-1")
    assert secret not in caught.value.message


def test_an_unknown_key_is_refused_without_repeating_it():
    with pytest.raises(Unauthenticated) as caught:
        identities().principal(snapshot(stored(KEY)), bearer("tg_k_wrong"), AWAY, NOW)
    assert "wrong" not in caught.value.message
    assert caught.value.code == "invalid_api_key"


def test_keys_of_any_form_are_found_whatever_their_salt():
    keys = [stored(f"sk-any-{n}", name=f"k{n}", salt=bytes([n % 3])) for n in range(9)]
    for n in range(9):
        principal = identities().principal(snapshot(*keys), bearer(f"sk-any-{n}"), AWAY, NOW)
        assert principal.id == f"key:k{n}"


def test_in_rotation_both_keys_of_an_id_are_valid_and_the_old_one_ends():
    old, new = "tg_k_old0000000", "tg_k_new0000000"
    policy = snapshot(stored(old, salt=b"1", expires=NOW + 10), stored(new, salt=b"2"))
    who = identities()
    for key in (old, new):
        assert who.principal(policy, bearer(key), AWAY, NOW).agent == "worker"
    with pytest.raises(Unauthenticated, match="expired"):
        who.principal(policy, bearer(old), AWAY, NOW + 10)
    assert who.principal(policy, bearer(new), AWAY, NOW + 10).agent == "worker"


def test_a_reload_revokes_at_once_and_calls_still_pinned_keep_their_policy():
    before, after = snapshot(stored(KEY)), snapshot(revision=2)
    who = identities()
    assert who.principal(before, bearer(KEY), AWAY, NOW).agent == "worker"
    with pytest.raises(Unauthenticated):
        who.principal(after, bearer(KEY), AWAY, NOW)
    assert who.principal(before, bearer(KEY), AWAY, NOW).agent == "worker"
    with pytest.raises(Unauthenticated):
        who.principal(after, bearer(KEY), AWAY, NOW)


def test_a_reload_admits_a_key_that_was_just_refused():
    who = identities()
    with pytest.raises(Unauthenticated):
        who.principal(snapshot(), bearer(KEY), AWAY, NOW)
    assert (
        who.principal(snapshot(stored(KEY), revision=2), bearer(KEY), AWAY, NOW).agent == "worker"
    )


class Counting:
    """A snapshot's keys that count how often they are searched."""

    def __init__(self, policy) -> None:
        self.policy = policy
        self.searches = 0

    def __getattr__(self, name):
        if name == "find_key":
            self.searches += 1
        return getattr(self.policy, name)


def test_a_good_key_is_searched_once_in_five_minutes():
    policy, who = Counting(snapshot(stored(KEY))), identities()
    for second in range(0, 299, 13):
        who.principal(policy, bearer(KEY), AWAY, NOW + second)
    assert policy.searches == 1
    who.principal(policy, bearer(KEY), AWAY, NOW + 300)
    assert policy.searches == 2


def test_a_bad_key_is_searched_once_in_ten_seconds():
    policy, who = Counting(snapshot(stored(KEY))), identities()
    for second in (0, 1, 9.9, 10, 11):
        with pytest.raises(Unauthenticated):
            who.principal(policy, bearer("bad"), AWAY, NOW + second)
    assert policy.searches == 2


def test_what_is_remembered_of_callers_is_bounded(monkeypatch):
    monkeypatch.setattr(identity, "CACHED", 20)
    monkeypatch.setattr(identity, "REFUSED", 20)
    policy = snapshot(key_patterns=(KeyPattern(pattern="soak-*", agent=MANY),))
    who = identities()
    for n in range(500):
        who.principal(policy, bearer(f"soak-{n}"), AWAY, NOW)
        with pytest.raises(Unauthenticated):
            who.principal(policy, bearer(f"bad-{n}"), AWAY, NOW)
    assert len(who._book.new) + len(who._book.old) <= 20
    assert len(who._book.refused) <= 20


MANY = AgentRule(
    id="soak",
    tenant="load",
    many=True,
    pools=(PoolSpec(name="agent:{id}:rpm"),),
    tenant_pools=(PoolSpec(name="tenant:load"),),
)


def test_each_key_of_a_pattern_is_an_agent_with_pools_of_its_own():
    policy = snapshot(key_patterns=(KeyPattern(pattern="soak-*", agent=MANY),))
    principal = identities().principal(policy, bearer("soak-17"), AWAY, NOW)
    assert principal.agent == principal.rule.id == "soak-17"
    assert [pool.name for pool in principal.pools] == ["agent:soak-17:rpm", "tenant:load"]
    assert principal.pools == (*principal.rule.pools, *principal.rule.tenant_pools)


def test_patterns_respect_case_and_come_after_exact_keys():
    policy = snapshot(
        stored("soak-1", name="exact"), key_patterns=(KeyPattern(pattern="soak-*", agent=MANY),)
    )
    assert identities().principal(policy, bearer("soak-1"), AWAY, NOW).id == "key:exact"
    with pytest.raises(Unauthenticated):
        identities().principal(policy, bearer("SOAK-1"), AWAY, NOW)


@pytest.mark.parametrize("key", ["soak-" + "x" * 200, "soak-{id}", "soak-\u00e9", "soak-a:b"])
def test_a_pattern_key_that_could_spoil_names_is_named_by_its_hash(key):
    policy = snapshot(key_patterns=(KeyPattern(pattern="soak-*", agent=MANY),))
    name = identities().principal(policy, bearer(key), AWAY, NOW).agent
    assert name.startswith("key-")
    assert len(name) == 20


ANONYMOUS = EdgeRules(anonymous=AgentRule(id="me", tenant="home"))


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_a_caller_without_key_on_this_machine_may_be_anonymous(peer):
    principal = identities().principal(snapshot(edge=ANONYMOUS), [], peer, NOW)
    assert (principal.id, principal.agent) == ("anonymous", "me")


@pytest.mark.parametrize("peer", [AWAY, "", "::2", "10.0.0.1", "unix:"])
def test_a_caller_without_key_from_elsewhere_is_refused(peer):
    with pytest.raises(Unauthenticated, match="No API key"):
        identities().principal(snapshot(edge=ANONYMOUS), [], peer, NOW)


@pytest.mark.parametrize("name", [b"x-forwarded-for", b"forwarded", b"x-real-ip"])
def test_a_caller_behind_a_proxy_on_this_machine_is_from_elsewhere(name):
    with pytest.raises(Unauthenticated):
        identities().principal(snapshot(edge=ANONYMOUS), [(name, b"192.0.2.1")], "127.0.0.1", NOW)


def test_a_wrong_key_does_not_become_anonymous():
    with pytest.raises(Unauthenticated):
        identities().principal(snapshot(edge=ANONYMOUS), bearer("wrong"), "127.0.0.1", NOW)


def test_without_an_anonymous_rule_nobody_is():
    with pytest.raises(Unauthenticated):
        identities().principal(snapshot(), [], "127.0.0.1", NOW)


def test_a_key_bound_to_this_machine_is_forbidden_elsewhere_even_when_remembered():
    rule = AgentRule(id="dev", tenant="home", loopback_only=True, because="agents.dev")
    policy, who = snapshot(stored(KEY, rule=rule)), identities()
    assert who.principal(policy, bearer(KEY), "127.0.0.1", NOW).agent == "dev"
    with pytest.raises(Forbidden, match="this machine") as caught:
        who.principal(policy, bearer(KEY), AWAY, NOW)
    assert caught.value.because == "agents.dev"
    with pytest.raises(Forbidden):
        who.principal(policy, [*bearer(KEY), (b"x-forwarded-for", b"x")], "127.0.0.1", NOW)


def test_no_credential_is_the_empty_one():
    assert presented([(b"host", b"x"), (b"x-api-key", b" ")]) == ""


def test_a_rule_of_one_keeps_its_own_object():
    assert identities().principal(snapshot(stored(KEY)), bearer(KEY), AWAY, NOW).rule is RULE
