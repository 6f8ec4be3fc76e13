"""`tidegate check` and `tidegate schema` as functions."""

from __future__ import annotations

import json

from gateway.errors import PolicyProblem
from gateway.policy.check import CheckResult, json_schema

PROBLEM = PolicyProblem(
    file="p.yaml", line=3, column=5, path="a.b", what="is wrong", allowed="right", nearest="c"
)


def test_a_refusal_reads_as_one_line_per_problem_and_a_sum():
    result = CheckResult(ok=False, path="p.yaml", problems=(PROBLEM, PROBLEM))
    assert result.text().splitlines() == [
        "p.yaml:3:5: a.b: is wrong; allowed: right; did you mean 'c'?",
        "p.yaml:3:5: a.b: is wrong; allowed: right; did you mean 'c'?",
        "p.yaml: 2 problems",
    ]


def test_warnings_are_marked_and_do_not_refuse():
    result = CheckResult(ok=True, path="p.yaml", warnings=(PROBLEM,), counts=(("models", 2),))
    assert result.text().splitlines() == [
        "p.yaml:3:5: a.b: is wrong; allowed: right; did you mean 'c'? (warning)",
        "p.yaml: policy holds: 2 models",
    ]


def test_programs_read_the_same_as_one_object():
    found = json.loads(CheckResult(ok=False, path="p.yaml", problems=(PROBLEM,)).json())
    assert found["ok"] is False
    assert found["problems"] == [
        {"file": "p.yaml", "line": 3, "column": 5, "path": "a.b", "what": "is wrong",
         "allowed": "right", "nearest": "c"}
    ]  # fmt: skip


def test_the_schema_is_the_same_each_time_and_ends_its_line():
    assert json_schema() == json_schema()
    assert json_schema().endswith("}\n")


def test_the_schema_offers_no_null_and_describes_every_key():
    schema = json.loads(json_schema())

    def described(node):
        target = node.get("$ref", "").rpartition("/")[2]
        return node.get("description") or schema["$defs"].get(target, {}).get("description")

    def walk(node, path):
        if isinstance(node, dict):
            assert node.get("type") != "null", path
            for name, child in node.get("properties", {}).items():
                assert described(child), (*path, name)
            for key, child in node.items():
                walk(child, (*path, key))
        elif isinstance(node, list):
            for index, child in enumerate(node):
                walk(child, (*path, index))

    walk(schema, ())


def test_the_schema_shows_no_default_in_units_of_ours():
    schema = json.loads(json_schema())
    retry = schema["$defs"]["Retry"]["properties"]
    assert "default" not in retry["base"]
    assert retry["attempts"]["default"] == 3
    assert retry["backoff"]["default"] == "decorrelated"
