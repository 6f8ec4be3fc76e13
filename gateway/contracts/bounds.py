"""How much work a JSON Schema can make of a value: hostile schemas are refused before they compile.

A tool server writes its schemas, and its results as well: it could make a value of a few bytes cost
minutes. Two things multiply. Applicators look at one place again and again (`allOf` of two
references to `allOf` of two references …); recursion does so once more at every level of the value.
So the schema is walked as a graph, and for one path through a value the number of looks is
counted, level by level, down to the deepest value that the wire lets in. References lead nowhere
but into the schema itself.
Source: JSON Schema 2020-12 core §9.4.1 (infinite recursion), §7.1.
Weakness: the count is an upper bound, so a schema of many alternatives may be refused though no
value reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST_NODES = 4_000
MOST_PATTERNS = 200
LONGEST_PATTERN = 2_000
MOST_LOOKS = 20_000
"""Looks that one path through a value may cost."""
DEEPEST = 128
"""Levels of a value; the wire refuses deeper messages."""

IN_PLACE = ("not", "if", "then", "else")
IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
IN_PLACE_MAPS = ("dependentSchemas", "dependencies")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
OF_MEMBER = ("additionalProperties", "unevaluatedProperties")
OF_ITEM = ("items", "additionalItems")
EVERY_ITEM = ("contains", "unevaluatedItems")


class Unusable(Exception):
    """The schema is not one that values are checked against; says why, in words without values."""


@dataclass(slots=True)
class _Node:
    """One subschema: its own work, and where it looks next.

    Attributes:
        own: Looks of its own keywords.
        here: Subschemas that look at the same place.
        members, items: Subschemas of which one looks at a child of an object, of an array.
        all_members, all_items: Subschemas which all do.
    """

    own: int = 1
    here: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    all_members: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    all_items: list[int] = field(default_factory=list)


def looks(schema: Mapping[str, Any]) -> int:
    """Looks that one path through a value can cost at most.

    Raises:
        Unusable: More than `MOST_LOOKS`, without end, or beyond another bound.
    """
    graph = _Graph(schema)
    order = _inner_first(graph.nodes)
    nodes = graph.nodes
    here = [0] * len(nodes)
    for at in order:
        here[at] = min(MOST_LOOKS + 1, nodes[at].own + sum(here[one] for one in nodes[at].here))
    work = here
    for _ in range(DEEPEST):
        if work[0] > MOST_LOOKS:
            raise Unusable(f"one value could be looked at more than {MOST_LOOKS} times")
        deeper = _one_level(nodes, order, here, work)
        if deeper == work:
            break
        work = deeper
    return work[0]


def _one_level(
    nodes: list[_Node], order: list[int], here: list[int], work: list[int]
) -> list[int]:  # fmt: skip
    """The work where values may be one level deeper."""
    members, items = [0] * len(nodes), [0] * len(nodes)
    for at in order:
        node = nodes[at]
        members[at] = (
            max((work[one] for one in node.members), default=0)
            + sum(work[one] for one in node.all_members)
            + sum(members[one] for one in node.here)
        )
        items[at] = (
            max((work[one] for one in node.items), default=0)
            + sum(work[one] for one in node.all_items)
            + sum(items[one] for one in node.here)
        )
    return [min(MOST_LOOKS + 1, here[at] + max(members[at], items[at])) for at in range(len(nodes))]


def _inner_first(nodes: list[_Node]) -> list[int]:
    """The nodes so that whoever looks at the same place stands behind those it asks.

    Raises:
        Unusable: A subschema asks itself about the same place, for ever.
    """
    order: list[int] = []
    state = [0] * len(nodes)
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            at = stack[-1]
            if state[at] == 0:
                state[at] = 1
                for one in nodes[at].here:
                    if state[one] == 1:
                        raise Unusable("a reference leads back to itself")
                    if state[one] == 0:
                        stack.append(one)
            else:
                stack.pop()
                if state[at] == 1:
                    state[at] = 2
                    order.append(at)
    return order


class _Graph:
    """The subschemas that can be reached, as nodes; the root is node 0."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.nodes: list[_Node] = []
        self._root = root
        self._known: dict[int, int] = {}
        self._left: list[Mapping[str, Any]] = []
        self._patterns = 0
        self._anchors: dict[str, Mapping[str, Any]] = {}
        for one in _objects(root):
            self._name(one)
        self._at(root)
        while self._left:
            self._read(self._left.pop())

    def _name(self, schema: Mapping[str, Any]) -> None:
        if "$id" in schema and schema is not self._root and isinstance(schema["$id"], str):
            raise Unusable("it holds another schema with a name of its own ($id)")
        for key in ("$anchor", "$dynamicAnchor"):
            name = schema.get(key)
            if isinstance(name, str) and self._anchors.setdefault(name, schema) is not schema:
                raise Unusable("an anchor stands twice")

    def _at(self, schema: object) -> int:
        """The node of this subschema."""
        if not isinstance(schema, dict):
            schema = _EMPTY
        at = self._known.get(id(schema))
        if at is None:
            at = self._known[id(schema)] = len(self.nodes)
            if at >= MOST_NODES:
                raise Unusable(f"it has more than {MOST_NODES} subschemas")
            self.nodes.append(_Node())
            self._left.append(schema)
        return at

    def _read(self, schema: Mapping[str, Any]) -> None:
        node = self.nodes[self._known[id(schema)]]
        node.own += _weight(schema)
        self._count_patterns(schema)
        for key in REFERENCES:
            if key in schema:
                node.here.append(self._at(self._target(schema[key])))
        for key in IN_PLACE:
            if key in schema:
                node.here.append(self._at(schema[key]))
        for key in IN_PLACE_LISTS:
            node.here += map(self._at, _list(schema.get(key)))
        for key in IN_PLACE_MAPS:
            values = _map(schema.get(key)).values()
            node.here += [self._at(one) for one in values if isinstance(one, dict)]
        node.members += map(self._at, _map(schema.get("properties")).values())
        node.members += [self._at(schema[key]) for key in OF_MEMBER if key in schema]
        node.all_members += map(self._at, _map(schema.get("patternProperties")).values())
        if "propertyNames" in schema:
            node.all_members.append(self._at(schema["propertyNames"]))
        for key in OF_ITEM:
            if key in schema:
                value = schema[key]
                node.items += map(self._at, value if isinstance(value, list) else [value])
        node.items += map(self._at, _list(schema.get("prefixItems")))
        node.all_items += [self._at(schema[key]) for key in EVERY_ITEM if key in schema]

    def _count_patterns(self, schema: Mapping[str, Any]) -> None:
        found = list(_map(schema.get("patternProperties")))
        if isinstance(schema.get("pattern"), str):
            found.append(schema["pattern"])
        self._patterns += len(found)
        if self._patterns > MOST_PATTERNS:
            raise Unusable(f"it has more than {MOST_PATTERNS} regular expressions")
        if any(len(one) > LONGEST_PATTERN for one in found):
            raise Unusable(f"a regular expression is longer than {LONGEST_PATTERN} characters")

    def _target(self, reference: object) -> object:
        """The subschema that a reference names.

        Raises:
            Unusable: It names another document, which is never fetched, or nothing.
        """
        if not isinstance(reference, str):
            raise Unusable("a reference is no text")
        base, _, fragment = reference.partition("#")
        if base and base != self._root.get("$id"):
            raise Unusable("it refers to another document, and none is ever fetched")
        fragment = unquote(fragment)
        if not fragment:
            return self._root
        if not fragment.startswith("/"):
            if fragment not in self._anchors:
                raise Unusable("it refers to an anchor that is not there")
            return self._anchors[fragment]
        found: Any = self._root
        for part in fragment[1:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise Unusable("it refers to a place that is not there")
        return found


_EMPTY: dict[str, Any] = {}


def _objects(root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every object of the schema, as far as the bound on their number goes."""
    left: list[Any] = [root]
    count = 0
    while left:
        value = left.pop()
        if isinstance(value, dict):
            count += 1
            if count > 4 * MOST_NODES:
                raise Unusable(f"it has more than {4 * MOST_NODES} objects")
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _weight(schema: Mapping[str, Any]) -> int:
    """Looks of a subschema's own: long lists are walked for every value."""
    return (
        len(_list(schema.get("enum"))) // 8
        + len(_list(schema.get("required"))) // 8
        + len(_map(schema.get("patternProperties")))
        + sum(len(_list(one)) for one in _map(schema.get("dependentRequired")).values()) // 8
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _map(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
