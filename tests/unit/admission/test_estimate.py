"""What a call will cost, learned from what calls have cost."""

from __future__ import annotations

import random

import pytest

from gateway.admission.estimate import CacheShare, InputBias, Learned, OutputEstimator, Remembered


def test_an_unknown_class_falls_back_to_the_model_then_to_a_first_guess_below_the_cap():
    outputs = OutputEstimator()
    assert outputs.predict("m", "a", cap=None) == 500
    assert outputs.predict("m", "a", cap=20) == 20
    assert outputs.high("m", "a") is None
    outputs.learn("m", "a", 100)
    assert outputs.predict("m", "a", cap=None) == 100
    assert outputs.predict("m", "other", cap=None) == 100
    assert outputs.predict("n", "a", cap=None) == 500


def test_the_mean_of_many_errors_cancels():
    rng = random.Random(5)
    outputs, total, predicted = OutputEstimator(), 0, 0
    for i in range(4_000):
        tokens = int(rng.lognormvariate(5, 1))
        if i > 500:
            total += tokens
            predicted += outputs.predict("m", "a", cap=None)
        outputs.learn("m", "a", tokens)
    assert predicted == pytest.approx(total, rel=0.03)


def test_the_high_estimate_is_near_the_true_p99():
    rng = random.Random(6)
    outputs = OutputEstimator()
    for _ in range(5_000):
        outputs.learn("m", "a", rng.randrange(1_000))
    assert 900 <= outputs.high("m", "a") <= 1_100


def test_a_changed_habit_is_followed_within_a_hundred_calls():
    outputs = OutputEstimator()
    for tokens in [100] * 200 + [1_000] * 100:
        outputs.learn("m", "a", tokens)
    assert outputs.predict("m", "a", cap=None) > 850


def test_a_prediction_is_never_negative_and_never_above_the_cap():
    outputs = OutputEstimator()
    outputs.learn("m", "a", -5)
    outputs.learn("m", "a", 0)
    assert outputs.predict("m", "a", cap=None) == 0
    assert outputs.predict("m", "b", cap=-3) == 0
    learned = Learned()
    learned.outputs.learn("m", "a", 900)
    assert learned.outputs.predict("m", "a", cap=None, most=300) == 300
    assert learned.outputs.predict("m", "a", cap=200, most=300) == 200
    assert learned.outputs.predict("m", "a", cap=None) == 900
    assert learned.outputs.high("m", "a") == 1_800


def test_the_bias_converges_to_what_the_provider_counts():
    learned = Learned()
    for _ in range(50):
        learned.bias.learn("m", counted=1_000, reported=1_300, tools=True, images=False)
    assert learned.bias.factor("m", tools=True, images=False) == pytest.approx(1.3, rel=0.01)
    assert learned.bias.factor("m", tools=False, images=False) == 1.0


def test_calls_that_began_together_do_not_correct_each_other():
    bias = InputBias()
    bias.learn("m", counted=1_000, reported=1_500, tools=False, images=False)
    assert bias.factor("m", tools=False, images=False) == 1.5  # the first report counts in full
    for _ in range(99):  # all of them were counted before anything was learned
        bias.learn("m", counted=1_000, reported=1_500, tools=False, images=False)
    assert bias.factor("m", tools=False, images=False) == pytest.approx(1.5)


@pytest.mark.parametrize(("reported", "factor"), [(1, 0.5), (10**9, 3.0)])
def test_a_broken_report_moves_the_bias_no_further_than_its_bounds(reported, factor):
    bias = InputBias()
    for _ in range(500):
        bias.learn("m", counted=100, reported=reported, tools=False, images=False)
    assert bias.factor("m", tools=False, images=False) == pytest.approx(factor, abs=0.01)


def test_nothing_is_learned_from_nothing():
    bias, cache = InputBias(), CacheShare()
    bias.learn("m", counted=0, reported=5, tools=False, images=False)
    bias.learn("m", counted=5, reported=0, tools=False, images=False)
    cache.learn("s", read=5, of=0)
    cache.learn("s", read=9, of=5)
    cache.learn("s", read=-1, of=5)
    assert bias.factor("m", tools=False, images=False) == 1.0
    assert len(cache) == 0


def test_the_cached_share_starts_at_nothing_and_follows_its_conversation():
    learned = Learned()
    assert learned.cache.predict("s", 1_000) == 0
    learned.cache.learn("s", read=0, of=1_000)
    assert learned.cache.predict("s", 1_000) == 0
    for _ in range(6):
        learned.cache.learn("s", read=900, of=1_000)
    assert 800 < learned.cache.predict("s", 1_000) <= 900
    assert learned.cache.predict("other", 1_000) == 0


def test_every_map_forgets_what_was_used_longest_ago():
    held = Remembered(2, list)
    held.made("a"), held.made("b")
    held.get("a")
    held.made("c")
    assert held.get("b") is None
    assert held.get("a") == []
    assert len(held) == 2
    cache = CacheShare(most=100)
    for i in range(1_000):
        cache.learn(str(i), read=1, of=2)
    assert len(cache) == 100
