"""Every error of bad policies, word for word: `bad/NAME.yaml` gives `bad/NAME.txt`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import PolicyError
from gateway.policy.load import load_texts

BAD = Path(__file__).parent / "bad"
ENV = {"UP_KEY": "uk-should-not-be-shown"}


@pytest.mark.parametrize("name", sorted(path.stem for path in BAD.glob("*.yaml")))
def test_a_bad_policy_is_told_all_its_problems_in_these_words(name):
    content = (BAD / f"{name}.yaml").read_bytes()
    with pytest.raises(PolicyError) as wrong:
        load_texts({f"{name}.yaml": content}, env=ENV)
    assert str(wrong.value) + "\n" == (BAD / f"{name}.txt").read_text()
    assert "should-not-be-shown" not in str(wrong.value)


def test_every_golden_text_has_its_policy():
    assert {p.stem for p in BAD.glob("*.txt")} == {p.stem for p in BAD.glob("*.yaml")}
