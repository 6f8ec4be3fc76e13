"""A small policy that holds, and loading of texts; what a test changes stands in the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.errors import PolicyError, PolicyProblem
from gateway.policy.compile import compile as compiled
from gateway.policy.load import Policy, load_texts

if TYPE_CHECKING:
    from gateway.snapshot import Snapshot

ENV = {"UP_KEY": "uk-8c1f-secret", "DEV_KEY": "tg_d1_77e0-secret", "URL": "http://127.0.0.1:9"}

SMALL = """\
version: 1
providers:
  up:
    kind: other
    base_url: http://127.0.0.1:9
    keys: [{id: main, value: "${UP_KEY}"}]
models:
  m-*: {provider: up, pool: per_model}
agents:
  dev:
    keys: [{key: "${DEV_KEY}"}]
"""


def load(text: str, *more: str, env: dict[str, str] = ENV) -> Policy:
    texts = {f"{number}.yaml": part.encode() for number, part in enumerate((text, *more), 1)}
    return load_texts(texts, env=env)


def snapshot(text: str, revision: int = 1) -> Snapshot:
    return compiled(load(text), revision=revision)


def problems(text: str, *more: str, env: dict[str, str] = ENV) -> list[PolicyProblem]:
    try:
        load(text, *more, env=env)
    except PolicyError as wrong:
        return list(wrong.problems)
    return []


def said(text: str, *more: str) -> str:
    return "\n".join(str(problem) for problem in problems(text, *more))
