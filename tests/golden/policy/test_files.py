"""The policies we ship: they hold, name their schema, satisfy it and say no secret."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import ClassVar

import jsonschema
import pytest
import yaml

from gateway.policy.check import PROVIDED, check, json_schema
from gateway.policy.compile import compile as compiled
from gateway.policy.load import load

ROOT = Path(__file__).parents[3]
SCHEMA = ROOT / "gateway" / "policy" / "schema.json"
DEFAULT = ROOT / "policies" / "default.yaml"
POLICIES = [
    ROOT / "policies" / "default.yaml",
    *sorted((ROOT / "policies/examples").glob("*.yaml")),
]
HEADER = "# yaml-language-server: $schema="


class _AsEditorsRead(yaml.SafeLoader):
    """YAML as editors read it: dates and `off` are texts."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, form) for tag, form in forms if not tag.endswith((":timestamp", ":bool"))]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_AsEditorsRead.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf")
)


def test_the_committed_schema_is_current():
    assert SCHEMA.read_text() == json_schema(), "run `make schema`"


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(json.loads(json_schema()))


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_a_shipped_policy_holds_without_a_warning(path):
    result = check(path, {}, secrets=False)
    assert result.text().splitlines() == [result.text().strip()]
    assert result.ok


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_a_shipped_policy_names_its_schema_for_editors(path):
    first = path.read_text().partition("\n")[0]
    assert first.startswith(HEADER)
    assert (path.parent / first.removeprefix(HEADER)).resolve() == SCHEMA


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_a_shipped_policy_satisfies_the_schema_as_editors_read_it(path):
    content = yaml.load(path.read_text(), Loader=_AsEditorsRead)
    validator = jsonschema.Draft202012Validator(json.loads(json_schema()))
    assert [error.message for error in validator.iter_errors(content)] == []


def test_the_schema_refuses_what_the_loader_refuses():
    validator = jsonschema.Draft202012Validator(json.loads(json_schema()))
    content = yaml.load(DEFAULT.read_text(), Loader=_AsEditorsRead)
    content["edge"]["max_body"] = 40
    content["agents"]["dev"]["limts"] = {}
    assert len(list(validator.iter_errors(content))) == 2


def test_the_default_policy_needs_only_what_serve_provides():
    policy = load(DEFAULT, env=PROVIDED)
    found = compiled(policy, revision=1)
    key = found.find_key(PROVIDED["TIDEGATE_DEV_KEY"])
    assert (key.id, key.agent.id, key.agent.tier_cap) == ("dev", "dev", 1)
    for name in ("gpt-4o", "gpt-4o-mini", "gpt-5.4", "gpt-9", "o3-mini", "text-embedding-3-small",
                 "claude-sonnet-4-5", "claude-haiku-4-5", "claude-opus-5"):  # fmt: skip
        model = found.model(name)
        assert model is not None, name
        assert model.deployments[0].provider.base_url == PROVIDED["TIDEGATE_EMULATOR_URL"]
    assert found.model("unheard-of") is None


def test_a_check_without_secrets_still_names_what_is_missing_with_them():
    path = ROOT / "policies/examples/openai-anthropic.yaml"
    found = check(path, {"OPENAI_API_KEY_UPSTREAM": "x"})
    assert [p.what for p in found.problems] == [
        "the environment variable ANTHROPIC_API_KEY_UPSTREAM is not set"
    ]
