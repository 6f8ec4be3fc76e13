"""The books: what is counted, how names are bounded, what a page holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.profiles import Usage
from gateway.admission.store import DimensionView, LaneView, PoolView
from gateway.telemetry.metrics import (
    MOST_KNOWN,
    OTHER,
    Bounded,
    Metrics,
    Page,
    pool_label,
    status_label,
)
from tests.cases.accounts import TABLE, families, parse, read


def sample(metrics, name, **labels):
    found = [v for n, seen, v in parse(metrics.render().decode()) if n == name and seen == labels]
    return found[0] if found else None


def view(name, *, waiting=(0, 0, 0, 0), used=0, foreign=0, in_flight=0, limit=100, blocked=0):
    return PoolView(
        name=name,
        now=0,
        in_flight=in_flight,
        concurrency=0,
        factor_ppm=500_000,
        blocked_for=blocked,
        lanes=tuple(LaneView(waiting=n, backlog=0) for n in waiting),
        dimensions=(
            DimensionView(name="tokens", limit=limit, level=0, used=used, foreign=foreign),
        ),
    )


def test_every_neutral_account_is_declared_before_the_first_call():
    assert {metric.name for metric in TABLE.values()} <= families(Metrics().render().decode())


def test_one_served_call_is_in_the_books_once():
    metrics = Metrics()
    metrics.call_started()
    assert read(metrics.render().decode())["in_flight"] == 1
    usage = Usage(input=9, output=4, cache_read=100, cache_write=0, reasoning=2, money=55)
    metrics.settled("gpt", usage)
    metrics.call_ended(dialect="chat", model="gpt", status=200, outcome="ok")
    values = read(metrics.render().decode())
    assert values == dict.fromkeys(TABLE, 0.0) | {
        "input_tokens": 9, "output_tokens": 4, "cache_read_tokens": 100, "calls_ok": 1,
    }  # fmt: skip
    assert sample(metrics, "tidegate_tokens_used_total", model="gpt", kind="reasoning") == 2
    assert sample(metrics, "tidegate_cost_microusd_total", model="gpt") == 55


def test_a_missing_class_of_tokens_is_no_sample_and_an_estimate_is_counted():
    metrics = Metrics()
    metrics.settled("gpt", Usage(input=None, output=3, estimated=True))
    assert sample(metrics, "tidegate_tokens_used_total", model="gpt", kind="input") is None
    assert read(metrics.render().decode())["estimated_settlements"] == 1


@pytest.mark.parametrize("outcome", ["ok", "failed", "cancelled"])
def test_each_outcome_has_its_account(outcome):
    metrics = Metrics()
    metrics.call_started()
    metrics.call_ended(dialect="messages", model="", status=0, outcome=outcome)
    assert read(metrics.render().decode())[f"calls_{outcome}"] == 1


@pytest.mark.parametrize(
    ("status", "label"),
    [(200, "200"), (429, "429"), (529, "529"), (418, "4xx"), (599, "5xx"), (199, "1xx"),
     (0, "none"), (600, OTHER), (999_999, OTHER), (-7, OTHER)],
)  # fmt: skip
def test_statuses_are_few(status, label):
    assert status_label(status) == label


@pytest.mark.parametrize(
    ("name", "label"),
    [("pool:openai-gpt4o", "openai-gpt4o"), ("agent:researcher-17", "agent"),
     ("tenant:acme", "tenant"), ("pool:a:b", "a:b"), ("plain", "plain")],
)  # fmt: skip
def test_a_pool_of_an_agent_shows_only_its_kind(name, label):
    assert pool_label(name) == label


@given(st.lists(st.text(max_size=5), max_size=60), st.integers(min_value=0, max_value=10))
@settings(max_examples=50)
def test_a_bounded_label_keeps_the_first_and_folds_the_rest(values, limit):
    bounded = Bounded(limit)
    kept = {value: bounded(value) for value in values}
    assert len({label for label in kept.values() if label != OTHER}) <= limit
    assert all(label in {value, OTHER} for value, label in kept.items())
    assert [bounded(value) for value in values] == [kept[value] for value in values]


def flood(metrics, count):
    for n in range(count):
        name = f"n{n}"
        usage = Usage(input=1, output=1, cache_read=1, cache_write=1, reasoning=1, money=1,
                      estimated=True)  # fmt: skip
        for dialect in ("chat", "messages", "responses"):
            for outcome in ("ok", "failed", "cancelled", "refused"):
                metrics.call_started()
                metrics.call_ended(dialect=dialect, model=name, status=200 + n % 400,
                                   outcome=outcome)  # fmt: skip
        metrics.settled(name, usage)
        metrics.reserved(name, 1)
        for tier in range(4):
            metrics.waited(f"pool:{name}", tier, 1)
        metrics.shed(f"pool:{name}")
        metrics.answered(name, 100 + n % 500, name)
        metrics.transport_fault(name, name)
        metrics.first_byte(name, 1)
        for method in (metrics.refused, metrics.kept_alive, metrics.shadowed, metrics.retried,
                       metrics.input_estimated, metrics.downgraded, metrics.mode,
                       metrics.breaker_failed):  # fmt: skip
            method(name)
        metrics.malformed_events(name, 1)
        metrics.tokenizer(name, exact=True)
        metrics.breaker_changed(name, name)
    metrics.pools([view(f"pool:n{n}", waiting=(1, 1, 1, 1), used=1) for n in range(count)])


@pytest.mark.slow
def test_no_flood_of_names_makes_a_page_longer_than_a_thousand_samples():
    metrics = Metrics()
    flood(metrics, 600)
    samples = parse(metrics.render().decode())
    assert 500 < len(samples) <= 1_000
    # Folding loses names, never counts.
    assert sum(v for n, _, v in samples if n == "tidegate_calls_total") == 600 * 12
    assert sum(v for n, labels, v in samples if n == "tidegate_waiting") == 600 * 4
    assert read(metrics.render().decode())["in_flight"] == 0


def test_what_is_remembered_of_raw_names_is_bounded_and_loses_no_count():
    metrics = Metrics()
    for number in range(2 * MOST_KNOWN + 10):
        metrics.waited(f"agent:{number}", 2, 0)
    assert len(metrics._waits.known) <= MOST_KNOWN
    labels = {"pool": "agent", "tier": "2"}
    counted = sample(metrics, "tidegate_admission_wait_seconds_count", **labels)
    assert counted == 2 * MOST_KNOWN + 10


def test_pools_are_mirrored_and_forgotten():
    metrics = Metrics()
    metrics.pools(
        [
            view(
                "pool:g",
                waiting=(0, 1, 2, 3),
                used=50,
                foreign=25,
                in_flight=7,
                blocked=2_000_000,
            ),
            view("agent:a", waiting=(0, 0, 1, 0), used=10),
            view("agent:b", waiting=(0, 0, 1, 0), used=90),
        ]
    )
    assert sample(metrics, "tidegate_waiting", pool="g", tier="3") == 3
    assert sample(metrics, "tidegate_waiting", pool="agent", tier="2") == 2
    assert sample(metrics, "tidegate_admission_use_ratio", pool="g", dimension="tokens") == 0.5
    assert sample(metrics, "tidegate_admission_use_ratio", pool="agent", dimension="tokens") == 0.9
    assert sample(metrics, "tidegate_admission_foreign_ratio", pool="g", dimension="tokens") == 0.25
    assert sample(metrics, "tidegate_admission_factor", pool="g") == 0.5
    assert sample(metrics, "tidegate_admission_in_flight", pool="g") == 7
    assert sample(metrics, "tidegate_admission_blocked_seconds", pool="g") == 2
    metrics.pools([])
    assert read(metrics.render().decode())["waiting"] == 0


def test_a_dimension_without_a_limit_divides_by_nothing():
    metrics = Metrics()
    metrics.pools([view("pool:x", limit=0)])
    assert sample(metrics, "tidegate_admission_use_ratio", pool="x", dimension="tokens") is None


def test_only_the_present_mode_is_one():
    metrics = Metrics()
    metrics.mode("shared")
    metrics.mode("local")
    assert sample(metrics, "tidegate_admission_mode", mode="shared") == 0
    assert sample(metrics, "tidegate_admission_mode", mode="local") == 1


def test_a_breaker_shows_its_state():
    metrics = Metrics()
    for state, value in (("open", 1), ("half_open", 0.5), ("closed", 0)):
        metrics.breaker_changed("openai/gpt", state)
        assert sample(metrics, "tidegate_breaker_open", scope="openai/gpt") == value
    assert sample(metrics, "tidegate_breaker_changes_total", state="open") == 1


def test_an_answer_counts_by_status_and_a_refusal_by_meaning():
    metrics = Metrics()
    metrics.answered("openai", 200, None)
    metrics.answered("openai", 429, "quota")
    assert sample(metrics, "tidegate_upstream_answers_total", provider="openai", status="429") == 1
    assert sample(metrics, "tidegate_provider_refusals_total", kind="quota") == 1


@dataclass
class Stopped:
    """A clock that stands."""

    at: int = 0

    def now(self):
        return self.at


def test_a_page_is_rendered_at_most_once_a_second_after_its_refresh():
    async def main():
        clock, metrics, refreshed = Stopped(), Metrics(), []
        page = Page(metrics, clock, lambda: refreshed.append(metrics.policy(len(refreshed) + 1)))
        first, again = await asyncio.gather(page(), page())
        assert first is again
        assert b"tidegate_policy_revision 1.0" in first
        clock.at += 999_999
        assert await page() is first
        clock.at += 1
        assert b"tidegate_policy_revision 2.0" in await page()
        assert len(refreshed) == 2

    asyncio.run(main())


def test_names_cannot_break_the_page():
    metrics = Metrics()
    metrics.reserved('a"b\\c\nd', 1)
    assert sample(metrics, "tidegate_tokens_reserved_total", model='a\\"b\\\\c\\nd') == 1
