"""Loading never fails but with `PolicyError`, whatever the file; and never tells a secret."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import PolicyError
from gateway.policy.check import PROVIDED
from gateway.policy.compile import compile as compiled
from gateway.policy.load import Policy, load_texts

ROOT = Path(__file__).parents[2]
TEXTS = [
    path.read_text()
    for path in (
        ROOT / "policies/default.yaml",
        *sorted((ROOT / "policies/examples").glob("*.yaml")),
    )
]
SECRET = "sk-S3CRET"
ENV = dict.fromkeys(
    ("OPENAI_API_KEY_UPSTREAM", "ANTHROPIC_API_KEY_UPSTREAM", "OPENAI_API_KEY_STANDBY", "ADA_KEY",
     "CI_KEY", "CHAT_KEY", "CRAWLER_KEY", "FLEET_KEY", "AZURE_OPENAI_KEY", "GROQ_API_KEY"), SECRET
) | PROVIDED | {"CI_KEY": SECRET + "2", "CRAWLER_KEY": SECRET + "2"}  # fmt: skip

PIECES = ["", " ", "\n", ":", "-", "{", "}", "[", "]", "&a ", "*a", "<<: *a", "!!x ", "${", "}",
          "#", "no", "off", "0", "-1", "1e9", "''", '"', "\t", "\u2028", "é", "~", "true", "|\n",
          "? ", "---\n", "${TIDEGATE_DEV_KEY}", "${file:/x}", "9" * 21, "2M", "30s"]  # fmt: skip


def outcome(text: str) -> Policy | str:
    """The policy, or its problems; anything else fails the test."""
    try:
        policy = load_texts({"p.yaml": text.encode("utf-8", "replace")}, env=ENV, read_secret=_read)
    except PolicyError as wrong:
        problems = wrong.problems
    else:
        compiled(policy, revision=1)
        return policy
    assert problems
    assert all(p.line >= 1 and p.column >= 1 and p.file == "p.yaml" for p in problems)
    return "\n".join(map(str, problems))


def _read(name: str) -> str:
    return f"{SECRET} of {name}"


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TEXTS), st.data())
def test_an_edited_policy_holds_or_is_refused_in_words(text, data):
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        text = text[:start] + data.draw(st.sampled_from(PIECES)) + text[end:]
    assert SECRET not in repr(outcome(text))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TEXTS), st.data())
def test_lines_moved_or_lost_hold_or_are_refused_in_words(text, data):
    lines = text.split("\n")
    one = data.draw(st.integers(0, len(lines) - 1))
    two = data.draw(st.integers(0, len(lines) - 1))
    if data.draw(st.booleans()):
        lines[one], lines[two] = lines[two], lines[one]
    else:
        del lines[one]
    assert SECRET not in repr(outcome("\n".join(lines)))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_refused_in_words(text):
    assert isinstance(outcome(text), str)


leaves = st.one_of(
    st.sampled_from(["enforce", "30s", "a", "*", "${ADA_KEY}", "per_model", "up"]),
    st.integers(-5, 10**12).map(str),
    st.sampled_from(["true", "{}", "[]", "1.5", "85%", "5 USD", "2M"]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"),
        st.dictionaries(
            st.sampled_from(["provider", "pool", "keys", "id", "value", "limits", "rpm", "mode",
                             "match", "models", "x"]), inner, max_size=4,
        ).map(lambda pairs: "{" + ", ".join(f"{k}: {v}" for k, v in pairs.items()) + "}"),
    ),
    max_leaves=12,
)  # fmt: skip
SECTIONS = ["providers", "pools", "models", "prices", "tiers", "tenants", "agents", "issuers",
            "retry", "breakers", "loops", "logging", "edge", "listeners", "mode",
            "fairness"]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(SECTIONS), trees, max_size=6))
def test_wrong_types_at_every_level_are_refused_in_words(sections):
    text = "version: 1\n" + "".join(f"{name}: {tree}\n" for name, tree in sections.items())
    assert SECRET not in repr(outcome(text))
