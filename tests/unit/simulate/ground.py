"""A small policy and scenario in memory, for simulations of a few hundred calls."""

from __future__ import annotations

from gateway.policy.compile import compile as compiled
from gateway.policy.load import load_texts
from gateway.simulate.run import Run, simulate
from gateway.simulate.scenario import Fleet, Lengths, Population, Scenario, Strategy
from gateway.snapshot import Snapshot
from gateway.units import MICRO, MINUTE

POLICY = """\
version: 1
providers:
  up: {{kind: other, base_url: "http://p.test", keys: [{{id: main, value: uk}}]{provider}}}
  spare: {{kind: other, base_url: "http://s.test", keys: [{{id: main, value: sk}}]}}
pools:
  q: {{provider: up, limits: {{rpm: 1000, tpm: 200k}}, shape: {shape}, accounting: {accounting}}}
  s: {{provider: spare, limits: {{rpm: 1000, tpm: 200k}}}}
models:
  m: {{provider: up, pool: q{model}}}
  other: {{provider: spare, pool: s}}
prices:
  m: {{input: 1.0, output: 2.0}}
tiers:
  interactive: {{number: 1, max_wait: {wait}}}
  standard: {{number: 2, max_wait: {wait}}}
  batch: {{number: 3, max_wait: {wait}}}
fairness: agent
agents:
  lab: {{keys: [{{pattern: "lab-*"}}], tier_cap: interactive, loopback_only: true{lab}}}
  shop: {{keys: [{{pattern: "shop-*"}}], loopback_only: true, models: [m]}}
{more}
"""


def snapshot(
    *, shape: str = "window_60s", accounting: str = "realtime", wait: str = "10m", lab: str = "",
    model: str = "", provider: str = "", more: str = "",
) -> Snapshot:  # fmt: skip
    text = POLICY.format(
        shape=shape, accounting=accounting, wait=wait, lab=lab, model=model, provider=provider,
        more=more,
    )  # fmt: skip
    return compiled(load_texts({"p.yaml": text.encode()}, env={}), revision=1)


def population(**changed) -> Population:
    wish = {
        "name": "all", "agents": 40, "principals": ("lab",), "model": "m",
        "tiers": (100_000, 400_000, 500_000), "load": ((0, 800_000), (MINUTE, 4_000_000)),
        "input": Lengths(median=800, sigma=1.0, least=20, most=20_000), "caps": (1_024,),
        "patience": 600 * MICRO,
    }  # fmt: skip
    return Population(**{**wish, **changed})


def scenario(*groups: Population, **changed) -> Scenario:
    wish = {
        "name": "small", "duration": 4 * MINUTE, "traffic": groups or (population(),),
        "fleet": Fleet(gateways=2, shares=(600_000, 400_000), store=(1_000, 5_000)),
    }  # fmt: skip
    return Scenario(**{**wish, **changed})


def play(
    said: Scenario | None = None, policy: Snapshot | None = None,
    strategy: Strategy = Strategy.TIDEGATE, **more,
) -> Run:  # fmt: skip
    return simulate(said or scenario(), policy or snapshot(), strategy, **more)
