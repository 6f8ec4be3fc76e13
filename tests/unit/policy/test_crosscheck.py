"""Entries beside each other: names that match nothing, rules that can never act."""

from __future__ import annotations

import pytest

from gateway.policy.lookups import price_of, tier_numbers
from tests.unit.policy.sample import SMALL, load, problems, said

POOLS = SMALL.replace(
    "models:\n  m-*: {provider: up, pool: per_model}\n",
    "pools:\n"
    "  big: {provider: up, limits: {rpm: 100, tpm: 10k, concurrency: 8}}\n"
    "models:\n  m-*: {provider: up, pool: big}\n",
)


def agent(rules: str) -> str:
    return POOLS.replace('dev:\n    keys: [{key: "${DEV_KEY}"}]', f"dev: {rules}")


KEYS = 'keys: [{key: "${DEV_KEY}"}]'


def test_the_samples_hold():
    assert not problems(POOLS)
    assert not problems(agent(f"{{{KEYS}, limits: {{rpm: 100, tpm: 10k}}}}"))


# --- retry.yaml, limit-matches-nothing ---


def test_a_rule_for_a_model_that_no_route_serves_is_refused_with_its_place():
    (problem,) = problems(agent(f"{{{KEYS}, models: [gpt-x], limits: {{tpm: 10}}}}"))
    assert "'gpt-x' matches no model" in str(problem)
    assert problem.line == 12


def test_a_misspelled_key_of_a_limit_is_refused_and_the_right_one_named():
    (problem,) = problems(agent(f"{{{KEYS}, limits: {{tokens_per_minut: 5}}}}"))
    assert "tokens_per_minut" in problem.what
    assert problem.nearest == "tpm"


def test_a_limit_for_a_tier_nobody_has_is_refused():
    tiers = (
        "tiers:\n  interactive: {number: 1}\n  workflow: {number: 2}\n  background: {number: 3}\n"
    )
    text = POOLS.replace("concurrency: 8}}", "concurrency: 8}, ceilings: {gold: 90%}}")
    (problem,) = problems(text + tiers)
    assert "no tier is named 'gold'" in problem.what
    assert problem.allowed == "interactive, workflow, background"


def test_an_empty_list_of_models_is_refused():
    found = said(agent(f"{{{KEYS}, models: [], limits: {{tpm: 10}}}}"))
    assert "agents.dev.models: the list is empty" in found


# --- names ---


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("provider: up, pool: big", "provider: upp, pool: big", "no provider is named 'upp'"),
        ("pool: big", "pool: bik", "no pool is named 'bik'"),
        ("pool: big}", "pool: big, ladder: m-9}", "no model is named 'm-9'"),
        ("pool: big}", "pool: big, ladder: m-*}", "'m-*' is no name"),
        (KEYS, f"{KEYS}\n    tier: golden", "no tier is named 'golden'"),
        (KEYS, f"{KEYS}\n    tier_cap: golden", "no tier is named 'golden'"),
        (KEYS, f"{KEYS}\n    tenant: nobody", "no tenant is named 'nobody'"),
        (KEYS, "jwt: {issuer: nobody}", "no issuer is named 'nobody'"),
        ("version: 1", "version: 1\nedge: {anonymous: nobody}", "no agent is named 'nobody'"),
        ("version: 1", "version: 1\nprices: {x: {input: 1, output: 1}}", "'x' matches no model"),
        ('"${UP_KEY}"}', '"${UP_KEY}", models: [x]}', "'x' matches no model"),
    ],
)
def test_a_name_that_matches_nothing_is_refused(old, new, what):
    assert old in POOLS
    assert what in said(POOLS.replace(old, new))


def test_a_pattern_that_can_match_a_pattern_holds():
    assert not problems(agent(f'{{{KEYS}, models: ["?-1"]}}'))
    assert "matches no model" in said(agent(f'{{{KEYS}, models: ["x*"]}}'))


# --- never used ---


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("tenants: {t: {}}", "no agent belongs to this tenant"),
        ("issuers: {i: {issuer: x, audience: gw, jwks_file: /f}}", "no agent is signed by"),
        ("tiers: {a: {number: 1}, b: {number: 1}}", "the tier 'a' has this number"),
        ("tiers: {batch: {number: 1}}", "'batch' is the shipped name of another number"),
        ("retry: {base: 30s}", "retry.base: longer than cap"),
        ("breakers: {base: 90s}", "breakers.base: longer than cap"),
        (
            "breakers: {fast: {window: 10m, volume: 1, ratio: 50%}}",
            "breakers.fast.window: not shorter",
        ),
    ],
)
def test_a_rule_that_nothing_uses_is_refused(section, what):
    assert what in said(f"{POOLS}{section}\n")


def test_a_pool_that_nobody_spends_is_refused():
    text = POOLS.replace("models:", "  idle: {provider: up, limits: {rpm: 1}}\nmodels:")
    assert "pools.idle: no model spends this pool" in said(text)


def test_a_pool_of_another_provider_is_refused():
    text = POOLS.replace("pools:", "  two: {kind: other, base_url: 'http://h'}\npools:").replace(
        "m-*: {provider: up", "m-*: {provider: two"
    )
    assert "the pool 'big' is a quota of the provider 'up'" in said(text)


def test_a_provider_that_serves_nothing_is_refused_unless_it_relays_paths():
    two = "  two: {kind: openai, base_url: 'http://h'}\n"
    assert "no model is served" in said(SMALL.replace("models:", two + "models:"))
    relays = (
        "  two: {kind: openai, base_url: 'http://h', passthrough: [/v1/files], "
        "passthrough_pool: rest}\npools: {rest: {provider: two, limits: {rpm: 5}}}\n"
    )
    assert not problems(SMALL.replace("models:", relays + "models:"))


def test_a_model_behind_a_wider_pattern_is_refused_and_an_exact_name_is_not():
    text = SMALL.replace("agents:", "  m-1*: {provider: up, pool: per_model}\nagents:")
    assert "models.m-1*: never reached: 'm-*' stands before it" in said(text)
    text = SMALL.replace("agents:", "  m-1: {provider: up, pool: per_model}\nagents:")
    assert not problems(text)


def test_a_standby_needs_somebody_to_stand_by():
    assert "every key is a standby" in said(
        POOLS.replace('"${UP_KEY}"}', '"${UP_KEY}", weight: 0}')
    )


def test_an_agent_that_nobody_can_be_is_refused():
    assert "nobody can be this agent" in said(agent("{}"))


def test_two_agents_with_one_key_are_refused_without_showing_it():
    found = said(POOLS + '  twin: {keys: [{key: "${DEV_KEY}"}]}\n')
    assert "the agent 'dev' has the same key" in found
    assert "secret" not in found.replace("secrets", "")


def test_of_two_agents_for_one_token_the_second_is_never_reached():
    issuers = "issuers: {i: {issuer: x, audience: gw, jwks_file: /f}}\n"
    wide = '  wide: {jwt: {issuer: i, match: {sub: "a/*"}}}\n'
    narrow = '  narrow: {jwt: {issuer: i, match: {sub: "a/b", org: "x"}}}\n'
    assert not problems(POOLS + narrow + wide + issuers)
    assert "agents.narrow.jwt: never reached" in said(POOLS + wide + narrow + issuers)


def test_a_key_pattern_inside_another_is_never_reached():
    text = POOLS + '  a: {keys: [{pattern: "soak-*"}]}\n  b: {keys: [{pattern: "soak-1*"}]}\n'
    assert "agents.b.keys[0].pattern: never reached" in said(text)


def test_a_key_pattern_that_accepts_nearly_everything_is_refused():
    assert "accepts too much" in said(agent('{keys: [{pattern: "s*"}]}'))


def test_the_anonymous_agent_is_bound_to_this_machine():
    assert "may be called from anywhere" in said(POOLS + "edge: {anonymous: dev}\n")
    text = agent(f"{{{KEYS}, loopback_only: true}}") + "edge: {anonymous: dev}\n"
    assert not problems(text)


def test_a_default_tier_above_the_cap_is_refused():
    assert "would start above agents.dev.tier_cap" in said(
        agent(f"{{{KEYS}, tier: interactive, tier_cap: batch}}")
    )
    text = agent(f"{{{KEYS}, tier: interactive, tenant: t}}") + "tenants: {t: {tier_cap: batch}}\n"
    assert "would start above tenants.t.tier_cap" in said(text)


# --- limits that can never bind ---


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ("{}", "limits nothing"),
        ("{rpm: 101}", "can never bind: all pools it can spend hold 100 together"),
        ("{concurrency: 9}", "can never bind: all pools it can spend hold 8 together"),
        ("{tpm: 10, itpm: 11}", "can never bind: tpm 10 lets through less"),
        ("{rpm: 1, rpd: 1442}", "can never bind: rpm 1 lets through less"),
        ("{rps: 1, rpm: 62}", "can never bind: rps 1 lets through less"),
    ],
)
def test_a_limit_that_can_never_bind_is_refused(limits, what):
    assert what in said(agent(f"{{{KEYS}, limits: {limits}}}"))


def test_a_token_limit_above_the_pools_is_a_warning_because_ours_reserves_more():
    (warning,) = load(agent(f"{{{KEYS}, limits: {{tpm: 11k}}}}")).warnings
    assert "will hardly bind" in warning.what


def test_a_limit_beside_a_model_without_quota_can_bind():
    text = agent(f"{{{KEYS}, limits: {{rpm: 101}}}}").replace(
        "agents:", "  x: {provider: up, pool: per_model}\nagents:"
    )
    assert not problems(text)


def test_an_agent_limit_above_its_tenants_is_refused():
    text = (
        agent(f"{{{KEYS}, tenant: t, limits: {{rpm: 9}}}}") + "tenants: {t: {limits: {rpm: 8}}}\n"
    )
    assert "can never bind: the tenant's rpm is 8" in said(text)


def test_a_budget_in_money_needs_prices():
    text = agent(f"{{{KEYS}, budgets: [{{money: 5 USD, per: day}}]}}")
    assert "none of the models has a price" in said(text)
    assert not problems(text + "prices: {m-*: {input: 1, output: 2}}\n")


@pytest.mark.parametrize(
    ("budgets", "what"),
    [
        ("[{per: day}]", "one thing is counted"),
        ("[{tokens: 1, money: 1 USD, per: day}]", "one thing is counted"),
        ("[{tokens: 1, per: day}, {tokens: 2, per: day}]", "a second budget of tokens per day"),
        ("[{tokens: 1, per: day}, {tokens: 32, per: month}]", "one can never bind"),
        ("[{tokens: 3, per: day}, {tokens: 2, per: month}]", "one can never bind"),
    ],
)
def test_budgets_that_cannot_act_are_refused(budgets, what):
    assert what in said(agent(f"{{{KEYS}, budgets: {budgets}}}"))


def test_a_weight_that_fairness_ignores_is_refused():
    assert "never used: fairness is by tenant" in said(
        agent(f"{{{KEYS}, weight: 2}}") + "fairness: tenant\n"
    )


# --- ladders ---

LADDER = SMALL.replace(
    "models:\n  m-*: {provider: up, pool: per_model}\n",
    "models:\n"
    "  a: {provider: up, pool: per_model, ladder: LA}\n"
    "  b: {provider: up, pool: per_model, ladder: LB}\n"
    "  c: {provider: up, pool: per_model}\n",
)


def test_a_ladder_may_lead_down_twice_to_the_same_model():
    assert not problems(LADDER.replace("LA", "[b, c]").replace("LB", "[c]"))


@pytest.mark.parametrize(("a", "b"), [("[b]", "[a]"), ("[a]", "[c]"), ("[c, b]", "[c, a]")])
def test_a_ladder_that_leads_back_is_refused(a, b):
    assert "the ladder is a circle" in said(LADDER.replace("LA", a).replace("LB", b))


def test_a_rung_of_another_dialect_can_never_be_taken():
    text = LADDER.replace("LA", "[b]").replace(", ladder: LB", "")
    text = text.replace("models:", "  cl: {kind: anthropic, base_url: 'http://h'}\nmodels:")
    text = text.replace("b: {provider: up", "b: {provider: cl")
    assert "never taken: 'b' does not speak openai" in said(text)


def test_one_upstream_model_spends_one_quota():
    text = POOLS.replace("agents:", "  m-1: {provider: up, pool: big}\n  x: "
                         "{provider: up, pool: per_model, upstream: m-1}\nagents:")  # fmt: skip
    assert "'m-1' at 'up' spends big" in said(text)


# --- defaults ---


def test_shipped_tiers_fill_the_numbers_left_free():
    rules = load(SMALL + "tiers: {gold: {number: 1}}\n").rules
    assert tier_numbers(rules) == {"gold": 1, "standard": 2, "batch": 3}


def test_a_loop_rule_in_money_needs_prices():
    text = SMALL + "loops: {max_money: 2 USD}\n"
    assert "loops.max_money: can never bind: none of the models has a price" in said(text)
    assert not problems(text + "prices: {m-*: {input: 1, output: 2}}\n")


def test_the_price_of_an_exact_name_wins_over_a_pattern_before_it():
    rules = load(SMALL + "prices: {m-*: {input: 1, output: 1}, m-1: {input: 2, output: 2}}\n").rules
    found = [price_of(rules, name) for name in ("m-1", "m-2", "x")]
    assert [price and price.input for price in found] == [2_000_000, 1_000_000, None]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (KEYS, 'keys: [{id: a}]', "holds one way in"),
        (KEYS, 'keys: [{key: "${DEV_KEY}", pattern: "soak-*"}]', "holds one way in"),
        (KEYS, 'keys: [{pattern: "soak-*", id: a}]', "a pattern has neither id nor expires"),
        (KEYS, 'keys: [{pattern: "soak-*"}, {key: "${DEV_KEY}"}]', "mixes patterns with other"),
        ('"${UP_KEY}"}', '"${UP_KEY}"}, {id: main, value: "${UP_KEY}"}', "has this id"),
        ('"${UP_KEY}"}', '"${UP_KEY}", models: [m-1]}', "no key may be used for x"),
        ("kind: other", "kind: other\n    count_tokens_pool: big", "count_tokens is answered here"),
        ("kind: other", "kind: other\n    timeouts: {idle: 2h}", "timeouts.idle: can never pass"),
        ("  big: {", "  per_model: {provider: up, limits: {rpm: 1}}\n  big: {", "a word of ours"),
        ("concurrency: 8}}", "concurrency: 8}, ceilings: {}}", "names no tier"),
        ("concurrency: 8}}", "concurrency: 8}, ceilings: {batch: 5%}, reserve: interactive}",
         "reserve and ceilings say the same"),
        ("concurrency: 8}}", "concurrency: 8}, ceilings: {standard: 5%}}", "may fill more"),
        ("pool: big}", "pool: [big, per_model]}", "per_model stands alone"),
        ("pool: big}", "pool: big, context_window: 5, max_output: 6}", "larger than the context"),
        ("pool: big}", "pool: big, downgrade: never, ladder: x}", "never taken: downgrade is"),
        ("version: 1", "version: 1\nprices: {m-*: {input: 1, output: 1}, m-1*: {input: 1, output: "
         "1}}", "prices.m-1*: never reached"),
        ("version: 1", "version: 1\nissuers: {i: {audience: gw, jwks_file: /f}}",
         "issuer is missing"),
        ("version: 1", "version: 1\nissuers: {i: {issuer: x, audience: gw}}", "one source of keys"),
        (KEYS, f"{KEYS}\n    jwt: {{issuer: i}}", "stands for many agents, and the keys for one"),
    ],
)  # fmt: skip
def test_rules_that_contradict_each_other_are_refused(old, new, what):
    text = POOLS.replace("agents:", "  x: {provider: up, pool: per_model}\nagents:")
    assert old in text
    assert what in said(text.replace(old, new))


def test_pools_of_one_call_charge_alike():
    text = POOLS.replace(
        "models:", "  org: {provider: up, limits: {tpm: 1M}, accounting: input_only}\nmodels:"
    )
    assert "these pools differ in accounting" in said(
        text.replace("pool: big}", "pool: [big, org]}")
    )


def test_a_key_id_is_used_once():
    text = POOLS + '  two: {keys: [{key: "${UP_KEY}", id: a}]}\n'
    text += '  three: {keys: [{key: "x-${UP_KEY}", id: a}]}\n'
    assert "agents.three.keys[0].id: another key has this id" in said(text)


def test_an_agent_of_key_patterns_cannot_be_anonymous():
    text = agent('{keys: [{pattern: "soak-*"}], loopback_only: true}')
    assert "an agent of key patterns needs a key" in said(text + "edge: {anonymous: dev}\n")


def test_a_weight_of_a_tenant_that_fairness_ignores_is_refused():
    text = agent(f"{{{KEYS}, tenant: t}}") + "tenants: {t: {weight: 2, tier_cap: gold}}\n"
    found = said(text + "fairness: agent\n")
    assert "tenants.t.weight: never used: fairness is by agent" in found
    assert "no tier is named 'gold'" in found


def test_a_budget_is_warned_of_models_that_cost_it_nothing():
    text = agent(f"{{{KEYS}, budgets: [{{money: 5 USD, per: day}}]}}")
    text = text.replace("agents:", "  x: {provider: up, pool: per_model}\nagents:")
    (warning,) = load(text + "prices: {x: {input: 1, output: 2}}\n").warnings
    assert "cost it nothing: m-*" in warning.what


def test_a_repetition_in_a_list_of_models_is_a_warning():
    (warning,) = load(agent(f'{{{KEYS}, models: ["m-*", m-1]}}')).warnings
    assert "'m-1' is contained in 'm-*'" in warning.what


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("http://127.0.0.1:9", "ftp://h", "not an http or https URL"),
        ("http://127.0.0.1:9", '"http://[::1"', "not a URL"),
        ("http://127.0.0.1:9", "http://h:0", "not an http or https URL"),
        ("http://127.0.0.1:9", "http://hé", "visible ASCII only"),
        ("http://127.0.0.1:9", "http://h/v1/", "must not end in /v1"),
        ("version: 1", "version: 1\nedge: {allowed_hosts: ['http://h']}", "is no host name"),
        ("version: 1", "version: 1\nedge: {cors_origins: ['*']}", "is no origin"),
        ("kind: other", "kind: other\n    passthrough: [v1/files]", "is no path pattern"),
        ("kind: other", "kind: other\n    passthrough: [/v1/../x]", "is no path pattern"),
        ("kind: other", "kind: other\n    extra_headers: {Host: x}", "cannot be set here"),
        ("kind: other", "kind: other\n    extra_headers: {authorization: x}", "is not valid here"),
        ("kind: other", "kind: other\n    query: {a: ''}", "the secret is empty"),
        ("agents:\n  dev:", "agents:\n  de v:", "is no name"),
        ("pool: big", "pool: [big, big]", "names something twice"),
        (KEYS, f"{KEYS}\n    jwt: {{issuer: i, match: {{a: ''}}}}", "is no pattern"),
    ],
)
def test_forms_are_checked(old, new, what):
    assert old in POOLS
    found = said(POOLS.replace(old, new))
    assert what in found or (what == "cannot be set here" and "is not valid here" in found)


SIGNED = "signing_key: 'whsec_0123456789abcdef0123456789'"


@pytest.mark.parametrize(
    ("webhooks", "words"),
    [
        ("hosts: [h.example]", "signing_key: is missing: deliveries are never sent unsigned"),
        ("alerts: 'https://h.example/x'", "signing_key: is missing"),
        ("hosts: [h.example], signing_key: short", "signing_key: is too short"),
        (SIGNED, "can never act: neither hosts nor alerts name a target"),
        (SIGNED + ", hosts: [h.example], networks: [10.0.0.1/8]", "is no network"),
        (SIGNED + ", hosts: ['h.example:0']", "is no host"),
        (SIGNED + ", hosts: ['*']", "is no host"),
        (SIGNED + ", alerts: 'https://u:hunter2@h.example/x'", "must not hold credentials"),
    ],
)  # fmt: skip
def test_webhooks_that_would_be_unsigned_or_act_nowhere_are_errors(webhooks, words):
    assert words in said(SMALL + f"holds: {{webhooks: {{{webhooks}}}}}\n")


def test_a_misspelled_provider_of_a_pool_is_one_mistake_and_not_one_for_each_model():
    text = POOLS.replace("big: {provider: up", "big: {provider: upp")
    assert [problem.path for problem in problems(text)] == ["pools.big.provider"]


def test_letters_in_another_order_come_closer_than_another_letter():
    (problem,) = problems(POOLS.replace("rpm: 100", "rmp: 100"))
    assert problem.nearest == "rpm"


def test_a_slope_above_the_pools_own_limit_can_never_bind():
    (problem,) = problems(POOLS.replace("limits: {rpm", "ramp: {when: always}, limits: {rpm"))
    assert (problem.path, problem.what) == (
        "pools.big.ramp", "can never bind: the pool admits 10000 tokens per minute",
    )  # fmt: skip
    assert not problems(POOLS.replace("limits: {rpm", "ramp: {floor: 5k}, limits: {rpm"))


# --- beside invalid entries ---


def test_a_misspelled_name_is_told_beside_an_invalid_entry():
    text = agent(f"{{{KEYS}, models: [m-*, gpt-x], tier: golden, weight: zero}}")
    found = said(text.replace("rpm: 100,", "rpm: never,"))
    for sentence in ("agents.dev.weight", "pools.big.limits.rpm", "'gpt-x' matches no model",
                     "no tier is named 'golden'"):  # fmt: skip
        assert sentence in found, sentence


def test_the_name_of_an_invalid_entry_is_no_misspelled_name():
    found = said(POOLS.replace("provider: up, limits", "provder: up, limits"))
    assert "provder" in found
    assert "no pool is named" not in found


def test_what_an_invalid_entry_may_still_use_is_not_called_unused():
    found = problems(POOLS.replace("pool: big", "pool: big, ladder: 7"))
    assert [problem.path for problem in found] == ["models.m-*.ladder"]


def test_a_key_that_is_no_name_costs_its_own_entry_alone():
    text = agent(f"{{{KEYS}, models: [gpt-x], tier: golden}}")
    found = said(text.replace("models:\n", "models:\n  no: {provider: up, pool: big}\n", 1))
    for sentence in ("'no' is a boolean", "'gpt-x' matches no model", "no tier is named 'golden'"):
        assert sentence in found, sentence


def test_the_name_of_a_key_that_is_no_name_is_no_misspelled_one():
    text = agent(f'{{{KEYS}, models: ["no"]}}')
    found = said(text.replace("models:\n", "models:\n  no: {provider: up, pool: big}\n", 1))
    assert "'no' is a boolean" in found
    assert "matches no model" not in found


INVALID = "\nretry: {base: soon}\n"


def test_what_no_invalid_entry_can_change_is_told_beside_it():
    circle = (
        "  a: {provider: up, pool: big, ladder: [b]}\n  b: {provider: up, pool: big, ladder: [a]}\n"
    )
    text = POOLS.replace("models:\n", f"models:\n{circle}", 1)
    text = text.replace("pools:\n", "pools:\n  idle: {provider: up, limits: {rpm: 5}}\n", 1)
    found = said(text + INVALID)
    for sentence in ("retry.base", "the ladder is a circle: a -> b -> a", "pools.idle: no model"):
        assert sentence in found, sentence


def test_what_an_invalid_entry_may_change_waits_for_it():
    circle = (
        "  a: {provider: up, pool: big, ladder: [b]}\n"
        "  b: {provider: up, pool: big, ladder: [a], cap: 7}\n"
    )
    text = POOLS.replace("models:\n", f"models:\n{circle}", 1)
    text = text.replace("pools:\n", "pools:\n  idle: {provider: up, limits: {rpm: 5}}\n", 1)
    text = text.replace("pool: big, ladder: [b]", "pool: big, ladder: [b], spare: idle")
    found = said(text)
    assert "models.b.cap" in found
    assert "models.a.spare" in found
    assert "circle" not in found
    assert "no model spends" not in found


def test_an_entry_that_was_not_read_may_use_anything():
    text = POOLS.replace("pools:\n", "pools:\n  idle: {provider: up, limits: {rpm: 5}}\n", 1)
    found = said(text.replace("models:\n", "models:\n  no: {provider: up, pool: idle}\n", 1))
    assert "'no' is a boolean" in found
    assert "no model spends" not in found


def test_entries_of_lists_are_left_out_by_their_own_number():
    keys = '[{id: a, pattern: "a-*"}, {pattern: 7}, {key: "${DEV_KEY}"}, {pattern: 8}]'
    found = said(agent(f"{{keys: {keys}, loopback_only: true, tier: golden}}"))
    assert "agents.dev.keys[1]" in found
    assert "agents.dev.keys[3]" in found
    assert "no tier is named 'golden'" in found
