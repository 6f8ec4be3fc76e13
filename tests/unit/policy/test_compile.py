"""Policy to Snapshot."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

from gateway.admission.profiles import Profile
from gateway.policy.compile import compile as compiled
from gateway.policy.compile import meter
from gateway.policy.kinds import KINDS
from gateway.policy.models import KindName, PolicyFile
from gateway.snapshot import (
    BackoffRules,
    BreakerRules,
    EdgeRules,
    HoldRules,
    LogRules,
    LoopRules,
    Mode,
    Place,
    Timeouts,
    stored_key,
)
from gateway.units import MICRO, MINUTE
from tests.unit.policy.sample import ENV, SMALL, load, snapshot

WORLD = """\
version: 1
providers:
  up:
    kind: openai
    base_url: http://127.0.0.1:9/
    keys:
      - {id: spare, value: "${UP_KEY}", weight: 0}
      - {id: main, value: "${UP_KEY}", weight: 5, models: big}
      - {id: rest, value: "${UP_KEY}", header: api-key}
    query: {api-version: "2026-01-01", key: "a b&${UP_KEY}"}
    extra_headers: {x-org: "${DEV_KEY}"}
    passthrough_pool: rest
  claude:
    kind: anthropic
    base_url: http://127.0.0.1:8
    count_tokens_pool: counting
pools:
  big: {provider: up, limits: {rpm: 100, tpm: 10k, concurrency: 8}}
  org: {provider: up, limits: {rpd: 1000}, utc_offset: "-08:00"}
  window: {provider: up, limits: {tpm: 60k}, shape: window_10s, accounting: realtime, mode: shadow}
  rest: {provider: up, limits: {rpm: 5}}
  counting: {provider: claude, limits: {rpm: 7}}
models:
  big:
    provider: up
    pool: [big, org]
    upstream: big-2026
    context_window: 128_000
    capabilities: [tools]
    created: 2026-01-01
    also: [{provider: up, pool: window, upstream: big-eu, price: {input: 9, output: 9}}]
    ladder: [mid, small]
  mid: {provider: up, pool: window, ladder: small}
  small: {provider: up, pool: per_model, downgrade: never}
  m-*: {provider: up, pool: per_model}
  cl-*: {provider: claude, pool: per_model}
prices:
  big: {input: 2.5, output: 10, cache_read: 1.25}
tiers:
  gold: {number: 1, max_wait: 3s, keepalive: {after: 1s, every: 1s}, hold: true, downgrade: false}
tenants:
  lab:
    weight: 7
    tier_cap: standard
    limits: {rpm: 60, max_wait: 5s}
    budgets: [{tokens: 9, per: day}]
agents:
  ada:
    tenant: lab
    keys: [{key: "${DEV_KEY}"}]
    tier: batch
    tier_cap: gold
    limits: {rpm: 10, concurrency: 2, max_wait: 0s, mode: shadow}
    budgets: [{money: 5 USD, per: month, utc_offset: "+01:00"}]
    models: big
    max_wait: 9s
  soak:
    keys: [{pattern: "soak-*"}]
    limits: {tpm: 100}
"""


@pytest.fixture(scope="module")
def world():
    return snapshot(WORLD, revision=4)


def test_defaults_are_those_that_the_snapshot_ships():
    found = snapshot(SMALL)
    assert found.edge == EdgeRules()
    assert found.backoff == BackoffRules()
    assert found.breaker == BreakerRules()
    assert found.loops == LoopRules()
    assert found.logs == LogRules()
    assert found.holds == HoldRules()
    assert found.providers["up"].timeouts == Timeouts()
    assert [(tier.name, tier.number) for tier in found.tiers] == [
        ("interactive", 1),
        ("standard", 2),
        ("batch", 3),
    ]


def test_every_kind_of_provider_is_known_to_both_sides():
    assert set(KINDS) == set(KindName.__args__)


def test_a_provider_takes_the_defaults_of_its_kind_and_is_overruled_by_the_file(world):
    up = world.providers["up"]
    assert up.base_url == "http://127.0.0.1:9"
    assert up.dialects == {"openai"}
    assert up.accounting.profile is Profile.UPFRONT_MAX
    assert up.query.reveal() == f"api-version=2026-01-01&key=a+b%26{ENV['UP_KEY']}"
    assert [(name, value.reveal()) for name, value in up.extra_headers] == [
        ("x-org", ENV["DEV_KEY"])
    ]
    assert "/v1/audio/*" in up.passthrough
    assert [spec.name for spec in up.passthrough_pools] == ["pool:rest"]
    claude = world.providers["claude"]
    assert (claude.header_family, claude.count_tokens) == ("anthropic", "relay")
    assert not claude.accounting.cached_input_counts


def test_credentials_stand_by_weight_with_the_header_of_their_kind(world):
    found = [(c.id, c.weight, c.header, c.models) for c in world.providers["up"].credentials]
    assert found == [
        ("main", 5, "bearer", ("big",)),
        ("rest", 1, "api-key", ("*",)),
        ("spare", 0, "bearer", ("*",)),
    ]


def test_no_repr_of_a_snapshot_shows_a_secret(world):
    text = repr(world)
    assert "-secret" not in text
    assert ENV["UP_KEY"] not in text


def test_a_pool_keeps_the_rule_id_of_each_limit(world):
    specs = world.models["big"].deployments[0].pools
    assert [spec.name for spec in specs] == ["pool:big", "pool:org"]
    assert [d.because for d in specs[0].dimensions] == [
        "pools.big.limits.rpm",
        "pools.big.limits.tpm",
    ]
    assert specs[0].concurrency == 8
    assert specs[0].concurrency_because == "pools.big.limits.concurrency"
    assert specs[0].revision == 4
    assert specs[1].dimensions[0].calendar_offset == -8 * 60 * MINUTE
    assert world.place("pools.big.limits.tpm") == Place(file="1.yaml", line=18, column=42)


def test_a_rule_that_was_not_written_stands_at_its_parent(world):
    assert world.place("tiers.gold.keepalive.after.x").line == world.place("tiers.gold").line
    assert world.place("retry") is None


def test_a_shape_names_its_window():
    assert meter("window_10s")[1] == 10 * MICRO
    assert meter("window_2m")[1] == 2 * MINUTE
    assert meter("bucket")[1] is None


def test_a_short_window_shrinks_the_limit_in_proportion(world):
    (spec,) = world.models["mid"].deployments[0].pools
    (tokens,) = spec.dimensions
    assert (tokens.window, tokens.limit) == (10 * MICRO, 10_000 * MICRO)
    assert spec.mode is Mode.SHADOW
    assert world.models["mid"].deployments[0].accounting.profile is Profile.REALTIME


def test_ceilings_follow_tiers_and_a_pools_own_win():
    text = WORLD.replace("hold: true,", "hold: true, ceiling: 100%,").replace(
        "tiers:", "tiers:\n  low: {number: 3, ceiling: 40%}"
    )
    text = text.replace("shape: window_10s,", "shape: window_10s, ceilings: {low: 10%},")
    text = text.replace("tier: batch", "tier: low")
    found = snapshot(text)
    bucket = found.models["big"].deployments[0].pools[0].dimensions[1]
    window = found.models["mid"].deployments[0].pools[0].dimensions[0]
    assert bucket.depth[1:] == (10_000 * MICRO, 10_000 * MICRO, 4_000 * MICRO)
    assert window.cap[3] * 10 == pytest.approx(window.cap[1], rel=1e-6)


def test_the_ladder_lists_each_rung_once_in_order_with_the_name_to_send(world):
    rungs = [(d.id, d.model, d.upstream_model) for d in world.models["big"].deployments]
    assert rungs == [
        ("up/big-2026", "big", "big-2026"),
        ("up/big-eu", "big", "big-eu"),
        ("up/mid", "mid", "mid"),
        ("up/small", "small", "small"),
    ]
    assert world.models["mid"].deployments[0].upstream_model is None
    assert world.models["small"].downgrade == "never"


def test_prices_come_from_the_rung_else_from_the_table(world):
    first, second, third, _ = world.models["big"].deployments
    assert (first.price.input, first.price.cache_read, first.price.cache_write) == (
        2_500_000,
        1_250_000,
        2_500_000,
    )
    assert second.price.output == 9_000_000
    assert third.price.input == 0


def test_a_family_makes_a_model_of_its_own_for_each_name(world):
    one, two = world.model("m-1"), world.model("m-2")
    assert one.deployments[0].id == "up/m-1"
    assert one.deployments[0].pools[0].name == "model:up/m-1"
    assert not one.deployments[0].pools[0].dimensions
    assert two.deployments[0].pools[0].name != one.deployments[0].pools[0].name
    assert world.model("m-1") is one
    assert world.model("other") is None
    assert world.models["big"].created == 1_767_225_600


def test_an_agent_has_budgets_before_limits_and_its_tenants_beside(world):
    ada = world.agents["ada"]
    budget, limits = ada.pools
    assert (budget.name, budget.queue, budget.dimensions[0].calendar) == (
        "agent:ada:money:month",
        False,
        "month",
    )
    assert budget.dimensions[0].limit == 5 * MICRO * MICRO
    assert budget.dimensions[0].because == "agents.ada.budgets[0].money"
    assert budget.dimensions[0].calendar_offset == 60 * MINUTE
    assert (limits.name, limits.queue, limits.mode, limits.concurrency) == (
        "agent:ada",
        False,
        Mode.SHADOW,
        2,
    )
    assert [spec.name for spec in ada.tenant_pools] == ["tenant:lab:tokens:day", "tenant:lab"]
    assert (ada.own_wait, ada.tenant_wait, ada.max_wait) == (0, 5 * MICRO, 9 * MICRO)
    assert ada.accounting.profile is Profile.RESERVE_SETTLE


def test_own_limits_are_usable_all_at_once(world):
    (spec,) = world.agents["soak"].pools
    (tokens,) = spec.dimensions
    assert set(tokens.depth) == {100 * MICRO}
    assert spec.queue


def test_an_agent_of_patterns_stands_for_many_and_is_bound_to_this_machine(world):
    (pattern,) = world.key_patterns
    assert pattern.agent.many
    assert pattern.agent.loopback_only
    assert pattern.agent.pools[0].name == "agent:{id}"
    assert not world.agents["ada"].many


def test_rights_are_capped_by_agent_and_tenant(world):
    ada, soak = world.agents["ada"], world.agents["soak"]
    assert (ada.default_tier, ada.tier_cap) == (3, 2)
    assert (soak.default_tier, soak.tier_cap) == (2, 2)


def test_fairness_is_by_tenant_where_there_are_tenants(world):
    assert (world.agents["ada"].fair_by, world.agents["ada"].weight) == ("tenant", 7)
    found = snapshot(SMALL.replace("  dev:\n", "  dev:\n    weight: 3\n")).agents["dev"]
    assert (found.fair_by, found.weight, found.tenant) == ("agent", 3, "default")


def test_a_key_is_found_by_its_text_and_never_kept(world):
    key = world.find_key(ENV["DEV_KEY"])
    assert (key.id, key.agent.id) == ("d1", "ada")
    assert world.find_key(ENV["DEV_KEY"] + "x") is None
    assert world.find_key("") is None
    assert world.find_key("tg_d1_\udc80") is None


def test_stored_keys_are_found_with_and_without_an_id():
    def line(key: str, salt: bytes) -> str:
        return stored_key(salt, sha256(salt + key.encode()).digest())

    keys = (
        f'keys: ["{line("plain", b"1" * 16)}", '
        f'{{hash: "{line("tg_k2_x", b"2" * 16)}", id: k2, expires: 2027-01-01}}]'
    )
    found = snapshot(SMALL.replace('keys: [{key: "${DEV_KEY}"}]', keys))
    assert found.find_key("plain").id == "dev-1"
    assert found.find_key("tg_k2_x").expires == 1_798_761_600.0
    assert found.find_key("tg_k2_y") is None
    assert found.find_key("tg_dev-1_x") is None


def test_the_files_mode_weakens_every_rule_and_strengthens_none():
    found = snapshot(WORLD + "mode: shadow\nloops: {mode: enforce}\nretry: {mode: off}\n")
    assert found.loops.mode is Mode.SHADOW
    assert found.backoff.mode is Mode.OFF
    assert found.breaker.mode is Mode.SHADOW
    specs = [
        *found.models["big"].deployments[0].pools,
        *found.agents["ada"].pools,
        *found.agents["ada"].tenant_pools,
        *found.model("m-1").deployments[0].pools,
    ]
    assert {spec.mode for spec in specs} == {Mode.SHADOW}


def test_an_issuer_knows_its_agents_in_file_order():
    text = SMALL + (
        "  one: {jwt: {issuer: i, match: {sub: a/b}}, limits: {rpm: 1}}\n"
        '  many: {jwt: {issuer: i, match: {sub: "a/*"}}, limits: {rpm: 1}}\n'
        "issuers:\n"
        "  i: {issuer: x, audience: gw, jwks_file: /f, claims: {tenant: org.id, session: sid}}\n"
    )
    (issuer,) = snapshot(text).jwt
    assert [(a.id, a.many, a.pools[0].name) for a in issuer.agents] == [
        ("one", False, "agent:one"),
        ("many", True, "agent:{id}"),
    ]
    assert issuer.agents[1].match == (("sub", "a/*"),)
    assert dict(issuer.claims) == {"agent": "sub", "tenant": "org.id", "session": "sid"}


def test_amounts_of_a_conversation_are_carried_over_in_our_units():
    text = SMALL + (
        "prices: {m-*: {input: 1, output: 2}}\n"
        "loops: {max_iterations: 50, tokens_per_minute: 30k, max_tokens: 2M, max_money: 5 USD}\n"
    )
    loops = snapshot(text).loops
    assert (loops.max_iterations, loops.tokens_per_minute) == (50, 30_000)
    assert (loops.max_tokens, loops.max_money) == (2_000_000, 5_000_000)
    assert loops.meters


def test_the_process_rules_are_carried_over():
    text = SMALL + (
        "listeners: {data: '127.0.0.1:0'}\n"
        "edge: {max_body: 1MiB, cors_origins: ['https://app.example'], allowed_hosts: [gw.x]}\n"
        "retry: {attempts: 1, max_retry_after: 3s, budget: {ratio: 20%}}\n"
        "breakers: {in_a_row: 9}\n"
        "loops: {mode: enforce, same_call: 5, polling_tools: [poll]}\n"
        "holds:\n"
        "  longest: 1h\n"
        "  rate: 7\n"
        "  webhooks:\n"
        "    signing_key: whsec_0123456789abcdef0123456789\n"
        "    hosts: [hooks.example, '*.CI.example:8443']\n"
        "    networks: [10.1.0.0/16]\n"
        "tokenizer: required\n"
    )
    found = snapshot(text)
    assert found.listeners.data == ("127.0.0.1", 0)
    assert found.listeners.admin is None
    assert (found.edge.max_body, found.edge.cors_origins) == (1 << 20, ("https://app.example",))
    assert (found.backoff.attempts, found.backoff.budget_ratio_ppm) == (1, 200_000)
    assert found.breaker.in_a_row == 9
    assert (found.loops.same_call, found.loops.polling_tools) == (5, ("poll",))
    assert not found.loops.meters
    assert (found.holds.longest, found.holds.rate) == (3_600_000_000, 7)
    assert found.holds.webhooks.hosts == ("hooks.example", "*.ci.example:8443")
    assert found.holds.webhooks.networks == ("10.1.0.0/16",)
    assert found.tokenizer == "required"
    assert (found.fleet.redis, found.fleet.when_away) == (None, "local")


def test_a_fleet_names_its_store_and_what_holds_without_it():
    text = WORLD + "\nfleet: {redis: 'redis://u:secret@h:1/0', when_away: closed, prefix: 'a:'}\n"
    fleet = snapshot(text).fleet
    assert fleet.redis.reveal() == "redis://u:secret@h:1/0"
    assert "secret" not in repr(fleet)
    assert (fleet.when_away, fleet.prefix) == ("closed", "a:")


def test_compiling_twice_gives_the_same_rules():
    policy = load(WORLD)
    one, two = compiled(policy, revision=1), compiled(policy, revision=1)
    assert one.models == two.models
    assert one.keys == two.keys
    assert one.agents == two.agents


def test_an_edit_of_a_limit_keeps_names_and_dimensions_so_that_levels_survive():
    before = snapshot(WORLD).agents["ada"].pools
    after = snapshot(WORLD.replace("rpm: 10,", "rpm: 20,")).agents["ada"].pools
    assert [spec.name for spec in before] == [spec.name for spec in after]
    strip = [replace(d, limit=0, depth=(0,) * 4, cap=(0,) * 4) for d in before[1].dimensions]
    assert strip == [replace(d, limit=0, depth=(0,) * 4, cap=(0,) * 4) for d in after[1].dimensions]


def test_every_section_of_the_file_is_compiled_or_named_here():
    assert set(PolicyFile.model_fields) == {
        "version", "mode", "listeners", "edge", "providers", "pools", "models", "prices", "tiers",
        "fairness", "tenants", "agents", "issuers", "retry", "breakers", "loops", "holds",
        "logging", "tokenizer", "servers", "fleet", "approvals", "effects", "screen",
    }  # fmt: skip


def test_a_providers_concurrency_is_the_last_pool_of_everything_it_serves():
    made = snapshot(SMALL.replace("    kind: other\n", "    kind: other\n    concurrency: 7\n"))
    model = made.model("m-1")
    assert model is not None
    own, whole = model.deployments[0].pools
    assert own.name == "model:up/m-1"
    assert (whole.name, whole.concurrency) == ("provider:up", 7)
    assert whole.concurrency_because == "providers.up.concurrency"
    assert made.providers["up"].passthrough_pools == (whole,)


def test_slopes_are_compiled_for_pools_that_they_can_hold_back():
    text = WORLD.replace("limits: {rpm", "ramp: {floor: 5k, growth: 20%}, limits: {rpm", 1)
    assert snapshot(WORLD).ramps == {}
    ramp = snapshot(text).ramps["pool:big"]
    assert (ramp.floor, ramp.growth_ppm, ramp.most) == (5_000, 200_000, 10_000)
    assert (ramp.always, ramp.because) == (False, "pools.big.ramp")
    off = text.replace("growth: 20%", "mode: off")
    assert snapshot(off).ramps == {}
