"""gateway/identity: JWT and JWT-SVID, key sets and their outages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import inspect
import json
from dataclasses import replace

import jwt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.core import PoolSpec
from gateway.call import Principal
from gateway.errors import Forbidden, StoreUnavailable, Unauthenticated
from gateway.identity import claims
from gateway.identity.claims import parse_jwks, read_token
from gateway.identity.keysets import KeySets
from gateway.snapshot import AgentRule, JwtIssuer, KeyPattern
from tests.unit.identity.ground import (
    CURVES,
    ISSUER,
    NOW,
    Source,
    bearer,
    identities,
    jwk,
    jwks,
    key_of,
    snapshot,
    token,
)
from tests.unit.tokens.ground import HandClock

ALL = replace(ISSUER, algorithms=tuple(sorted(claims.ALGORITHMS)))


def policy(*issuers: JwtIssuer, **more):
    return snapshot(jwt=issuers or (ISSUER,), **more)


def ask(who, snap, credential: str, now: float = NOW) -> Principal:
    """The principal, fetching if it must."""

    async def run():
        found = who.principal(snap, bearer(credential), "192.0.2.1", now)
        return await found if inspect.isawaitable(found) else found

    return asyncio.run(run())


def known(*keys: dict) -> Source:
    return Source(jwks(*(keys or (jwk("ES256", "a"),))))


@pytest.mark.parametrize("algorithm", sorted(claims.ALGORITHMS))
def test_every_algorithm_of_the_list_is_verified(algorithm):
    source = known(jwk(algorithm, "a"))
    principal = ask(identities(source), policy(ALL), token(algorithm, "a"))
    assert principal.id == "jwt:corp:worker-7"
    assert (principal.agent, principal.tenant) == ("worker", "acme")
    assert principal.expires == NOW + 600


def test_a_token_verified_before_is_answered_at_once_until_it_expires():
    source, who, snap = known(), identities(known()), policy()
    who = identities(source)
    text = token(kid="a", exp=NOW + 100)
    first = ask(who, snap, text)
    assert who.principal(snap, bearer(text), "", NOW + 99) is first
    assert source.fetches == 1
    with pytest.raises(Unauthenticated, match="expired"):
        ask(who, snap, text, NOW + 131)


def forge(header: dict, payload: dict, signature: bytes) -> str:
    def part(data: bytes) -> bytes:
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    head, body = part(json.dumps(header).encode()), part(json.dumps(payload).encode())
    return b".".join([head, body, part(signature)]).decode()


PAYLOAD = {"iss": ISSUER.issuer, "aud": "tidegate", "sub": "x", "exp": NOW + 600}


def test_a_token_without_signature_is_refused():
    for name in ("none", "None", "NONE", ""):
        with pytest.raises(Unauthenticated):
            ask(identities(known()), policy(ALL), forge({"alg": name, "kid": "a"}, PAYLOAD, b""))


def test_a_public_key_is_no_hmac_secret():
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = key_of("RS256").public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    unsigned = forge({"alg": "HS256", "kid": "a"}, PAYLOAD, b"").rstrip(".")
    signature = hmac.new(pem, unsigned.encode(), hashlib.sha256).digest()
    text = unsigned + "." + base64.urlsafe_b64encode(signature).rstrip(b"=").decode()
    with pytest.raises(Unauthenticated):
        ask(identities(known(jwk("RS256", "a"))), policy(ALL), text)


def test_an_algorithm_its_issuer_does_not_use_is_refused():
    with pytest.raises(Unauthenticated):
        ask(identities(known(jwk("ES384", "a"))), policy(), token("ES384", "a"))


def test_a_key_fixed_to_one_algorithm_verifies_no_other():
    source = known(jwk("RS256", "a", alg="RS256"))
    assert ask(identities(source), policy(ALL), token("RS256", "a")).agent == "worker"
    with pytest.raises(Unauthenticated, match="signed by no key"):
        ask(identities(source), policy(ALL), token("PS256", "a"))


def test_an_ec_key_verifies_only_the_algorithm_of_its_curve():
    (key,) = parse_jwks(jwks(jwk("ES384")))
    assert [name for name in sorted(claims.ALGORITHMS) if key.fits(name)] == ["ES384"]


def test_a_signature_by_another_key_is_refused():
    with pytest.raises(Unauthenticated, match="signed by no key"):
        ask(identities(known()), policy(), token(kid="a", number=1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"aud": "other"}, "audience"),
        ({"aud": ["other"]}, "audience"),
        ({"aud": None}, "audience"),
        ({"exp": None}, "exp"),
        ({"exp": NOW - 31}, "expired"),
        ({"exp": "soon"}, "exp"),
        ({"exp": True}, "exp"),
        ({"exp": float("nan")}, "expired"),
        ({"nbf": NOW + 31}, "not valid yet"),
        ({"iat": NOW + 31}, "not valid yet"),
        ({"exp": 10**400}, "exp"),
        ({"exp": float("inf")}, "exp"),
        ({"nbf": 10**400}, "not valid yet"),
        ({"nbf": "now"}, "not valid yet"),
        ({"nbf": float("nan")}, "not valid yet"),
        ({"act": "someone"}, "act chain"),
        ({"act": {"sub": 5}}, "act chain"),
        ({"sub": None}, "names no agent"),
        ({"sub": ""}, "names no agent"),
        ({"sub": "x" * 300}, "names no agent"),
        ({"sub": "a\nb"}, "names no agent"),
        ({"iss": "https://other"}, "no issuer"),
        ({"iss": None}, "no issuer"),
    ],
)
def test_a_well_signed_token_with_a_bad_claim_is_refused_and_says_why(change, reason):
    payload = {**PAYLOAD, **change}
    payload = {name: value for name, value in payload.items() if value is not None}
    # Through PyJWS, because PyJWT checks some claims while signing.
    text = jwt.PyJWS().encode(
        json.dumps(payload).encode(), key_of("ES256"), algorithm="ES256", headers={"kid": "a"}
    )
    with pytest.raises(Unauthenticated, match=reason):
        ask(identities(known()), policy(), text)


@pytest.mark.parametrize("change", [{"exp": NOW - 29}, {"nbf": NOW + 29}, {"iat": NOW + 29}])
def test_clocks_may_differ_by_half_a_minute(change):
    assert ask(identities(known()), policy(), token(kid="a", **change)).agent == "worker"


def test_one_audience_among_several_is_enough():
    assert ask(identities(known()), policy(), token(kid="a", aud=["x", "tidegate"])).agent


def chain(length: int) -> dict | None:
    return {"sub": f"actor-{length}", "act": chain(length - 1)} if length else None


def test_four_actors_are_kept_outermost_first_and_five_are_refused():
    principal = ask(identities(known()), policy(), token(kid="a", act=chain(4)))
    assert principal.actors == ("actor-4", "actor-3", "actor-2", "actor-1")
    with pytest.raises(Unauthenticated, match="act chain"):
        ask(identities(known()), policy(), token(kid="a", act=chain(5)))


def test_an_issuer_without_audience_lets_nobody_in():
    with pytest.raises(Unauthenticated, match="audience"):
        ask(identities(known()), policy(replace(ISSUER, audience="")), token(kid="a", aud=""))


@pytest.mark.parametrize(
    "text",
    [
        "..", "a.b.c", "e30.e30.", "e30.e30.e30", "!.!.!", "é.é.é",
        forge({"alg": "ES256", "crit": ["x"]}, PAYLOAD, b"x"),
        forge({"alg": "ES256", "b64": False, "crit": ["b64"]}, PAYLOAD, b"x"),
        forge({"alg": "ES256", "kid": 5}, PAYLOAD, b"x"),
        forge({"alg": ["ES256"]}, PAYLOAD, b"x"),
        forge({"alg": "ES256"}, [], b"x"),
        base64.urlsafe_b64encode(b"[" * 6000).decode() + ".e30.e30",
    ],
)  # fmt: skip
def test_what_only_looks_like_a_token_is_refused(text):
    with pytest.raises(Unauthenticated):
        ask(identities(known()), policy(ALL), text)


@given(text=st.text(st.characters(codec="ascii"), max_size=60).map(lambda s: s.replace(".", "")))
def test_reading_a_token_never_fails(text):
    assert read_token(f"{text}.{text}.{text}") is None


def test_a_refused_token_does_not_pass_as_a_pattern_key():
    anyone = KeyPattern(pattern="*", agent=AgentRule(id="any", tenant="t", many=True))
    snap = policy(key_patterns=(anyone,))
    assert identities(known()).principal(snap, bearer("plain"), "", NOW).agent == "plain"
    with pytest.raises(Unauthenticated):
        ask(identities(known()), snap, token(kid="a", number=1))


# --- claims and rules -------------------------------------------------------------------------


def test_the_first_agent_whose_matches_all_fit_is_taken():
    agents = (
        AgentRule(id="ops", tenant="acme", match=(("sub", "ops-*"), ("groups", "admins"))),
        AgentRule(id="bots", tenant="acme", match=(("sub", "bot-*"),)),
    )
    issuer = replace(ISSUER, agents=agents)

    def agent(**more):
        return ask(identities(known()), policy(issuer), token(kid="a", **more)).agent

    assert agent(sub="bot-1") == "bots"
    assert agent(sub="ops-1", groups=["users", "admins"]) == "ops"
    for more in ({"sub": "ops-1", "groups": ["users"]}, {"sub": "ops-1"}, {"sub": "else"}):
        with pytest.raises(Forbidden) as caught:
            agent(**more)
        assert caught.value.because == "jwt.corp"


def test_each_agent_of_a_rule_of_many_has_pools_of_its_own():
    many = AgentRule(id="bots", tenant="acme", many=True, pools=(PoolSpec(name="agent:{id}"),))
    issuer = replace(ISSUER, agents=(many,), claims=(("agent", "act.sub"),))
    text = token(kid="a", act={"sub": "bot-9"})
    principal = ask(identities(known()), policy(issuer), text)
    assert (principal.agent, principal.pools[0].name) == ("bot-9", "agent:bot-9")
    assert principal.id == "jwt:corp:worker-7"


def test_a_mapped_tenant_must_be_the_rule_s():
    agents = (AgentRule(id="a", tenant="one"), AgentRule(id="b", tenant="two"))
    issuer = replace(ISSUER, agents=agents, claims=(("tenant", "https://corp/tenant"),))

    def tenant(value):
        text = token(kid="a", **{"https://corp/tenant": value})
        return ask(identities(known()), policy(issuer), text).agent

    assert (tenant("one"), tenant("two")) == ("a", "b")
    with pytest.raises(Forbidden):
        tenant("three")


MAPPED = replace(
    ISSUER,
    agents=(AgentRule(id="w", tenant="t", tier_cap=2, models=("gpt-4*", "claude")),),
    claims=(
        ("tier", "tier"), ("models", "models"), ("tools", "tools"),
        ("session", "sid"), ("workflow", "wf"),
    ),
)  # fmt: skip


@pytest.mark.parametrize(("claimed", "cap"), [(1, 2), (3, 3), ("batch", 3), ("interactive", 2)])
def test_a_claimed_tier_only_takes_away(claimed, cap):
    principal = ask(identities(known()), policy(MAPPED), token(kid="a", tier=claimed))
    assert principal.rule.tier_cap == cap


@pytest.mark.parametrize(
    ("claimed", "kept"),
    [
        (["gpt-4o", "gpt-5", "claude"], ("gpt-4o", "claude")),
        (["gpt-*"], ()),
        (["*"], ()),
        (["gpt-4?"], ()),
        (["gpt-4*", 5, None], ("gpt-4*",)),
        ([], ()),
    ],
)
def test_claimed_models_only_take_away(claimed, kept):
    principal = ask(identities(known()), policy(MAPPED), token(kid="a", models=claimed))
    assert principal.rule.models == kept
    assert principal.rule.tools == ("*",)


@pytest.mark.parametrize(
    "bad",
    [{"tier": 0}, {"tier": "x"}, {"tier": True}, {"tier": 2.0}, {"tier": []}, {"models": "gpt"}],
)
def test_a_mapped_claim_that_cannot_be_read_is_refused(bad):
    with pytest.raises(Unauthenticated, match="unreadable"):
        ask(identities(known()), policy(MAPPED), token(kid="a", **bad))


def test_session_and_workflow_come_from_mapped_claims():
    principal = ask(identities(known()), policy(MAPPED), token(kid="a", sid="s1", wf="w" * 500))
    assert principal.session == "s1"
    assert principal.workflow.startswith("h-")
    assert ask(identities(known()), policy(MAPPED), token(kid="a", sid=5)).session == ""


# --- JWT-SVID ---------------------------------------------------------------------------------

SPIFFE = JwtIssuer(
    name="mesh",
    issuer="example.org",
    audience="tidegate",
    jwks_file="/run/bundle.json",
    spiffe=True,
    agents=(AgentRule(id="svc", tenant="mesh", match=(("sub", "spiffe://example.org/*"),)),),
)


def test_a_jwt_svid_needs_no_issuer_and_keys_of_its_own_use_are_taken():
    bundle = known(jwk("ES256", "a", use="jwt-svid"), jwk("ES256", "x", number=1, use="x509-svid"))
    text = token(kid="a", iss=None, sub="spiffe://example.org/agent/7")
    principal = ask(identities(bundle), policy(SPIFFE), text)
    assert (principal.id, principal.agent) == ("jwt:spiffe://example.org/agent/7", "svc")


def test_a_key_for_certificates_verifies_no_token():
    bundle = known(jwk("ES256", "a", use="jwt-svid"), jwk("ES256", "x", number=1, use="x509-svid"))
    text = token(kid="x", number=1, iss=None, sub="spiffe://example.org/agent/7")
    with pytest.raises(Unauthenticated, match="signed by no key"):
        ask(identities(bundle), policy(SPIFFE), text)


@pytest.mark.parametrize(
    "subject",
    [
        "spiffe://other.org/agent",
        "spiffe://example.org.evil/agent",
        "spiffe://example.org",
        "agent",
    ],
)
def test_the_keys_of_a_trust_domain_speak_for_no_other(subject):
    with pytest.raises(Unauthenticated, match="no issuer"):
        ask(identities(known()), policy(SPIFFE), token(kid="a", iss=None, sub=subject))


# --- key sets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"null", b'{"keys":{}}', b'{"keys":[]}', b'{"keys":[5,null]}', b"\xff",
        b'{"keys":[{"kty":"oct","k":"c2VjcmV0"}]}', b'{"keys":[{"kty":"RSA"}]}', b"[" * 100_000,
        b'{"keys":[{"kty":"RSA","n":"AQAB","e":"AQAB"}]}', b'{"keys":[{"kty":"EC","crv":"P-256"}]}',
        b'{"keys":[{"kty":["RSA"]}]}',
    ],
)  # fmt: skip
def test_a_body_without_a_usable_key_is_no_key_set(body):
    with pytest.raises(ValueError, match=r"key set|JSON|Expecting|decode"):
        parse_jwks(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
FIELDS = ["kty", "use", "alg", "kid", "n", "e", "d", "crv", "x", "y"]


@settings(max_examples=50)
@given(field=st.sampled_from(FIELDS), value=JSON, algorithm=st.sampled_from(["RS256", "ES256"]))
def test_a_key_with_any_field_spoilt_is_used_or_left_out(field, value, algorithm):
    body = jwks({**jwk(algorithm, "a"), field: value}, jwk("ES384", "good"))
    assert parse_jwks(body)[-1].kid == "good"


@given(claims_=st.dictionaries(st.sampled_from([*PAYLOAD, "act", "nbf", "iat", "tier"]), JSON))
def test_any_well_signed_claims_give_a_principal_or_a_refusal(claims_):
    who, snap = WARM
    body = json.dumps({**PAYLOAD, **claims_}).encode()
    text = jwt.PyJWS().encode(body, key_of("ES256"), algorithm="ES256", headers={"kid": "a"})
    with contextlib.suppress(Unauthenticated, Forbidden):
        assert who.principal(snap, bearer(text), "", NOW).agent == "w"


WARM = (identities(known()), policy(MAPPED))
ask(*WARM, token(kid="a"))  # from here on the key set is there


def test_an_unusable_key_does_not_cost_the_others():
    encryption = jwk("ES384", "e", use="enc")
    keys = parse_jwks(jwks({"kty": "RSA", "n": 5, "e": "AQAB"}, encryption, jwk("ES256", "a")))
    assert [key.kid for key in keys] == ["a"]


def test_a_private_key_in_a_set_is_used_as_its_public_half():
    from jwt.algorithms import ECAlgorithm

    private = json.loads(ECAlgorithm.to_jwk(key_of("ES256")))
    private.pop("key_ops", None)
    source = known({**private, "kid": "a"})
    assert ask(identities(source), policy(), token(kid="a")).agent == "worker"


def test_a_new_key_is_fetched_when_a_token_names_it():
    source, snap = known(), policy()
    who = identities(source)
    ask(who, snap, token(kid="a"))
    source.body = jwks(jwk("ES256", "b", number=1))
    later = NOW + 31
    assert ask(who, snap, token(kid="b", number=1, exp=later + 60), later).agent == "worker"
    assert source.fetches == 2


def test_tokens_that_name_unknown_keys_cause_one_fetch_in_thirty_seconds():
    source, snap = known(), policy()
    who = identities(source)
    for n in range(100):
        with pytest.raises(Unauthenticated):
            ask(who, snap, token(kid=f"made-up-{n}", number=1), NOW + n % 30)
    assert source.fetches == 1
    with pytest.raises(Unauthenticated):
        ask(who, snap, token(kid="one-more", number=1), NOW + 31)
    assert source.fetches == 2


def test_a_token_refused_for_its_unknown_key_passes_once_the_key_is_there():
    source, snap = known(), policy()
    who = identities(source)
    text = token(kid="b", number=1)
    with pytest.raises(Unauthenticated):
        ask(who, snap, text)
    source.body = jwks(jwk("ES256", "b", number=1))
    assert ask(who, snap, text, NOW + 31).agent == "worker"


def test_an_outage_keeps_the_last_set_for_a_day():
    source, snap = known(), policy()
    who = identities(source)
    ask(who, snap, token(kid="a"))
    source.body = OSError("unreachable")
    day = NOW + 24 * 3600
    assert ask(who, snap, token(kid="a", exp=day + 60), day - 1).agent == "worker"
    assert who.key_set_faults(snap) == {"corp": "unreachable"}
    with pytest.raises(StoreUnavailable) as caught:
        ask(who, snap, token(kid="a", exp=day + 160), day + 31)
    assert caught.value.retry_after


def test_a_set_that_was_never_there_is_our_fault_and_tried_again_soon():
    source, snap = Source(OSError("refused")), policy()
    who = identities(source)
    for second in (0, 1, 4):
        with pytest.raises(StoreUnavailable, match="corp"):
            ask(who, snap, token(kid="a"), NOW + second)
    assert source.fetches == 1
    source.body = jwks(jwk("ES256", "a"))
    assert ask(who, snap, token(kid="a"), NOW + 5).agent == "worker"
    assert who.key_set_faults(snap) == {}


def test_a_key_dropped_by_its_issuer_is_gone_after_ten_minutes():
    source, snap = known(), policy()
    who = identities(source)
    ask(who, snap, token(kid="a"))
    source.body = jwks(jwk("ES256", "b", number=1))
    with pytest.raises(Unauthenticated):
        ask(who, snap, token(kid="a", exp=NOW + 999), NOW + 601)


def test_callers_that_come_together_share_one_fetch():
    async def run():
        source, snap = known(), policy()
        source.gate = asyncio.Event()
        who = identities(source)
        calls = [
            asyncio.ensure_future(who.principal(snap, bearer(token(kid="a", n=n)), "", NOW))
            for n in range(20)
        ]
        await asyncio.sleep(0)
        source.gate.set()
        assert {principal.agent for principal in await asyncio.gather(*calls)} == {"worker"}
        assert source.fetches == 1

    asyncio.run(run())


def test_when_the_caller_that_fetches_hangs_up_the_next_one_does():
    async def run():
        source, snap = known(), policy()
        source.gate = asyncio.Event()
        who = identities(source)
        first, second = (
            asyncio.ensure_future(who.principal(snap, bearer(token(kid="a", n=n)), "", NOW))
            for n in range(2)
        )
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        source.gate.set()
        assert (await second).agent == "worker"
        assert first.cancelled()
        assert source.fetches == 2

    asyncio.run(run())


def test_a_source_that_sends_byte_by_byte_is_given_up():
    async def run():
        source, snap, clock = known(), policy(), HandClock()
        source.gate = asyncio.Event()
        who = identities(source, clock)
        call = asyncio.ensure_future(who.principal(snap, bearer(token(kid="a")), "", NOW))
        await asyncio.sleep(0)
        clock.fire()
        with pytest.raises(StoreUnavailable):
            await call
        assert "in time" in who.key_set_faults(snap)["corp"]

    asyncio.run(run())


def test_a_stale_set_serves_others_while_one_fetches_it_anew():
    async def run():
        source, snap = known(), policy()
        who = identities(source)
        late = NOW + 601
        await who.principal(snap, bearer(token(kid="a")), "", NOW)
        source.gate = asyncio.Event()
        one = asyncio.ensure_future(
            who.principal(snap, bearer(token(kid="a", n=1, exp=late + 60)), "", late)
        )
        await asyncio.sleep(0)
        other = who.principal(snap, bearer(token(kid="a", n=2, exp=late + 60)), "", late)
        assert isinstance(other, Principal)
        source.gate.set()
        assert (await one).agent == "worker"

    asyncio.run(run())


def test_sets_of_issuers_that_left_the_policy_are_forgotten():
    async def run():
        source = known()
        who = identities(source)
        for n in range(50):
            issuer = replace(ISSUER, jwks_url=f"https://id.corp/{n}")
            await who.principal(policy(issuer, revision=n), bearer(token(kid="a")), "", NOW)
        assert len(who._sets._sets) <= 2

    asyncio.run(run())


def test_a_wall_clock_that_steps_back_does_not_stop_fetching():
    async def run():
        source = Source(OSError("away"))
        sets = KeySets(source, HandClock())
        await sets.fetch(ISSUER, NOW)
        assert sets.of(ISSUER).due("a", NOW - 3600)

    asyncio.run(run())


def test_a_token_bound_to_this_machine_is_forbidden_elsewhere():
    local = replace(ISSUER, agents=(AgentRule(id="w", tenant="t", loopback_only=True),))
    with pytest.raises(Forbidden):
        ask(identities(known()), policy(local), token(kid="a"))


def test_curves_are_those_of_the_algorithms():
    assert set(CURVES) == {name for name in claims.ALGORITHMS if name.startswith("ES")}
