"""Write docs/policies.md, the reference of policy files, from gateway/policy/schema.json.

With --check: exit 1 if the committed page is not what would be written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "policies.md"
HEAD = """# Policy files

Generated from the schema by `make docs`; the annotated teacher is
[policies/default.yaml](../policies/default.yaml), whole policies are in
[policies/examples](../policies/examples). `tidegate check PATH` says every mistake at once.

"""


def schema() -> dict[str, Any]:
    """The committed schema."""
    loaded: dict[str, Any] = json.loads((ROOT / "gateway/policy/schema.json").read_text())
    return loaded


def kind(node: dict[str, Any]) -> str:
    """A type for people, with links to the tables of named types."""
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "enum" in node:
        return " or ".join(f"`{json.dumps(value)}`" for value in node["enum"])
    if "const" in node:
        return f"`{json.dumps(node['const'])}`"
    for many in ("anyOf", "oneOf", "allOf"):
        if many in node:
            kinds = [kind(one) for one in node[many]]
            return " or ".join(dict.fromkeys(kinds))
    found = node.get("type", "any")
    if found == "array":
        return f"list of {kind(node.get('items', {}))}"
    if found == "object" and isinstance(node.get("additionalProperties"), dict):
        return f"name → {kind(node['additionalProperties'])}"
    return str(found)


def bounds(node: dict[str, Any]) -> str:
    """Default, bounds and form, as far as the schema says them."""
    out = []
    if "default" in node and node["default"] is not None:
        out.append(f"default `{json.dumps(node['default'])}`")
    words = {
        "minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most",
        "maxItems": "at most entries:", "minLength": "at least characters:",
    }  # fmt: skip
    out += [f"{word} {node[key]}" for key, word in words.items() if key in node]
    if "examples" in node:
        out.append("e.g. " + ", ".join(f"`{one}`" for one in node["examples"][:3]))
    return "; ".join(out)


def cell(text: str) -> str:
    """Text that a table can hold."""
    return text.replace("|", "\\|").replace("\n", " ").strip()


def table(node: dict[str, Any]) -> list[str]:
    """One row a key."""
    required = set(node.get("required", []))
    rows = ["| key | what | type | bounds |", "|---|---|---|---|"]
    for name, one in node.get("properties", {}).items():
        star = " (required)" if name in required else ""
        what = cell(one.get("description", ""))
        rows.append(f"| `{name}`{star} | {what} | {cell(kind(one))} | {cell(bounds(one))} |")
    return rows


def page() -> str:
    """The whole page."""
    loaded = schema()
    lines = [HEAD.rstrip(), "", "## The file", "", *table(loaded), ""]
    for name, node in sorted(loaded["$defs"].items()):
        if "properties" not in node:
            continue
        lines += [f"## {name}", "", cell(node.get("description", "")), "", *table(node), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write or compare."""
    wanted = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != wanted:
            sys.exit("docs/policies.md is stale; run `make docs`")
        return
    PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
