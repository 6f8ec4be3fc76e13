"""YAML nodes to plain values: strict scalars, references, secrets. No YAML library, no files.

The dialect is the part of YAML that all readers agree on. A plain `yes`, `no`, `on`, `off` is a
boolean to some readers and a word to others; `010`, `1:30`, `0x1F` and `.inf` are numbers to some
and texts to others: all are refused unless quoted, with one exception: `mode: off`, where the word
is a value of ours. Duplicate keys are refused, explicit tags too. Aliases and `<<` are followed
within bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gateway.policy.problems import Spot, clean, dotted
from gateway.snapshot import Place, Secret

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from gateway.policy.problems import Path, Report

MAX_DEPTH = 24
"""Levels of nesting; the deepest rule of ours is 6."""

MAX_NODES = 50_000
"""Values after all aliases are followed: nine lines of aliases can stand for 10**9 (a bomb)."""

MAX_SECRET = 65_536
"""Bytes of a secret file."""

SECRETS: tuple[Path, ...] = (
    ("providers", "*", "keys", "*", "value"),
    ("providers", "*", "query", "*"),
    ("providers", "*", "extra_headers", "*"),
    ("agents", "*", "keys", "*", "key"),
    ("holds", "webhooks", "signing_key"),
    ("fleet", "redis"),
    ("servers", "*", "key"),
    ("servers", "*", "headers", "*"),
    ("servers", "*", "env", "*"),
)
"""Values that become `Secret`; only they may hold `${NAME}` and `${file:/path}`."""

ADDRESSES: tuple[Path, ...] = (
    ("providers", "*", "base_url"),
    ("holds", "webhooks", "alerts"),
    ("servers", "*", "url"),
)
"""Values that are no secrets and may still be one `${NAME}`: a server started beside us, like the
emulator, has its port only at run time."""

QUIET: tuple[Path, ...] = (
    ("providers", "*", "keys"),
    ("providers", "*", "query"),
    ("providers", "*", "extra_headers"),
    ("providers", "*", "base_url"),
    ("agents", "*", "keys"),
    ("holds", "webhooks", "signing_key"),
    ("fleet", "redis"),
    ("holds", "webhooks", "alerts"),
    ("servers", "*", "key"),
    ("servers", "*", "headers"),
    ("servers", "*", "env"),
    ("servers", "*", "url"),
)
"""Regions whose values no message repeats, whatever is wrong with them."""

_WORDS = re.compile(r"y|yes|n|no|on|off", re.IGNORECASE)
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_NULL = ("", "~", "null", "Null", "NULL")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,18})", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,14})\.[0-9]{1,9}", re.ASCII)
_ODD_NUMBER = re.compile(
    r"[-+]?(?:0[0-9_]+|0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"
    r"|\.(?:inf|Inf|INF)|[0-9][0-9_]*\.?[0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*)"
    r"|\.(?:nan|NaN|NAN)",
    re.ASCII,
)
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)


@dataclass(slots=True)
class Node:
    """A YAML node with its place.

    Attributes:
        kind: What it is.
        place: Where it begins.
        text: Scalars: the text.
        plain: Scalars: written without quotes, so its type is read from its form.
        tag: An explicit tag, or "".
        items: Lists.
        pairs: Mappings, in file order, repeated keys included.
    """

    kind: Literal["map", "list", "scalar"]
    place: Place
    text: str = ""
    plain: bool = False
    tag: str = ""
    items: list[Node] = field(default_factory=list)
    pairs: list[tuple[Node, Node]] = field(default_factory=list)


def fits(path: Path, patterns: tuple[Path, ...], *, inside: bool = False) -> bool:
    """Whether the path is one of these (or lies inside one), `*` standing for any step."""
    for pattern in patterns:
        if len(path) < len(pattern) or (len(path) > len(pattern) and not inside):
            continue
        if all(want in ("*", have) for want, have in zip(pattern, path, strict=False)):
            return True
    return False


class Converter:
    """Turns nodes into values; problems go to the report.

    Args:
        report: Where problems and spots go.
        lookup: The value of a variable, or None.
        read: The text of a secret file; raises OSError or ValueError.
        sections: Names that may stand at the top; what stands under another one is not judged
            twice. Left out, everything is judged.
    """

    def __init__(
        self,
        report: Report,
        *,
        lookup: Callable[[str], str | None],
        read: Callable[[str], str],
        sections: Container[str] | None = None,
    ) -> None:
        self._report = report
        self._lookup = lookup
        self._read = read
        self._sections = sections
        self._nodes = 0
        self.literals: list[Path] = []
        self.secret_files: set[str] = set()
        self.resolved: list[str] = []

    def value(self, node: Node, path: Path, key: Place) -> Any:  # noqa: ANN401 - a tree of any shape
        """The node's value; its spots are noted. What is wrong becomes None, and is reported."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            if self._nodes == MAX_NODES + 1:
                self._report.error_at(
                    node.place, path, f"the file stands for more than {MAX_NODES} values"
                )
            return None
        if len(path) > MAX_DEPTH:
            self._report.error_at(node.place, path[:4], f"nested deeper than {MAX_DEPTH} levels")
            return None
        self._report.spots[path] = Spot(key, node.place)
        if node.tag not in ("", "!", "tag:yaml.org,2002:str"):
            self._report.error_at(
                node.place, path, "an explicit tag is not allowed", allowed="plain values"
            )
            return None
        if node.kind == "map":
            return self._mapping(node, path)
        if node.kind == "list":
            return tuple(
                self.value(item, (*path, index), item.place)
                for index, item in enumerate(node.items)
            )
        return self._leaf(node, path)

    def _mapping(self, node: Node, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in self.pairs(node, path):
            key = key_node.text
            values[key] = self.value(value_node, (*path, key), key_node.place)
        return values

    def pairs(self, node: Node, path: Path) -> list[tuple[Node, Node]]:
        """The mapping's pairs with sound and distinct keys, `<<` followed; own keys win over it."""
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for key_node, value_node in node.pairs:
            if key_node.kind == "scalar" and key_node.plain and key_node.text == "<<":
                self._merge(value_node, path, merged)
            elif self._sound_key(key_node, path):
                first = own.setdefault(key_node.text, (key_node, value_node))
                if first[0] is not key_node:
                    self._report.error_at(
                        key_node.place,
                        (*path, key_node.text),
                        f"the key stands here twice, first in line {first[0].place.line}",
                        allowed="each key once",
                    )
        return [*own.values(), *(pair for key, pair in merged.items() if key not in own)]

    def _merge(self, node: Node, path: Path, merged: dict[str, tuple[Node, Node]]) -> None:
        for source in node.items if node.kind == "list" else [node]:
            if source.kind != "map" or len(path) > MAX_DEPTH:
                self._report.error_at(
                    source.place, path, "<< takes a mapping", allowed="an alias of a mapping"
                )
                continue
            self._nodes += len(source.pairs)
            if self._nodes > MAX_NODES:
                return
            for key_node, value_node in source.pairs:
                if key_node.text == "<<" or not self._sound_key(key_node, path):
                    continue
                merged.setdefault(key_node.text, (key_node, value_node))

    def _sound_key(self, node: Node, path: Path) -> bool:
        what = ""
        if node.kind != "scalar" or node.tag:
            what = "a key must be a name"
        elif node.plain and _WORDS.fullmatch(node.text):
            what = f"{node.text!r} is a boolean to some readers of YAML and a word to others"
        elif node.plain and node.text in (*_NULL, *_TRUE, *_FALSE):
            what = "a key must be a name"
        elif _control(node.text) or not node.text or len(node.text) > 200:
            what = "a key must be a short printable name"
        if what:
            self._report.error_at(
                node.place, path, what, allowed="a name, in quotes if need be",
                dropped=node.text if node.kind == "scalar" else "",
            )  # fmt: skip
        return not what

    def _leaf(self, node: Node, path: Path) -> Any:  # noqa: ANN401
        secret = fits(path, SECRETS)
        value = node.text if not node.plain or node.tag else self._plain(node, path)
        if value is None:
            return None
        if isinstance(value, str):
            if _control(value):
                self._report.error(path, "holds a control character", allowed="printable text")
                return None
            if "${" in value:
                return self._referring(value, path, secret=secret)
        if secret:
            if not isinstance(value, str):
                self._report.error(path, "a text is expected", allowed="the value in quotes")
                return None
            self.literals.append(path)
            return Secret(value)
        return value

    def _plain(self, node: Node, path: Path) -> str | int | float | bool | None:
        """The value of an unquoted scalar."""
        text = node.text
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if _INTEGER.fullmatch(text):
            return int(text.replace("_", ""))
        if _FLOAT.fullmatch(text):
            return float(text)
        if text in _NULL:
            self._report.error(path, "has no value", allowed="a value; or leave the key out")
            return None
        if text == "off" and path and path[-1] == "mode":
            return text
        if _WORDS.fullmatch(text):
            self._report.error(
                path,
                f"{text!r} is a boolean to some readers of YAML and a word to others",
                allowed="enforce, shadow, off"
                if path and path[-1] == "mode"
                else "true or false, or the word in quotes",
            )
            return None
        if _ODD_NUMBER.fullmatch(text):
            self._report.error(
                path,
                "a number that readers of YAML take differently",
                allowed="a decimal number, or the text in quotes",
            )
            return None
        return text

    def _referring(self, text: str, path: Path, *, secret: bool) -> Secret | str | None:
        """The text with its references resolved."""
        if self._sections is not None and path[0] not in self._sections:
            return ""  # its section is unknown, and is told as that
        if not secret and not fits(path, ADDRESSES):
            self._report.error(
                path,
                "${…} is allowed in secrets only",
                allowed=", ".join(dotted(known) for known in (*SECRETS, *ADDRESSES)),
            )
            return None
        failed = False

        def resolved(match: re.Match[str]) -> str:
            nonlocal failed
            value = self._resolved(match[1], path, secret=secret)
            failed = failed or value is None
            return value or ""

        whole = _REFERENCE.sub(resolved, text)
        if "${" in _REFERENCE.sub("", text):
            self._report.error(path, "an unfinished ${", allowed="${NAME} or ${file:/path}")
            return None
        if failed:
            return None
        if _control(whole):
            self._report.error(path, "resolves to a text with control characters")
            return None
        self.resolved.append(whole)
        return Secret(whole) if secret else whole

    def _resolved(self, name: str, path: Path, *, secret: bool) -> str | None:
        if secret and name.startswith("file:"):
            return self._from_file(name[len("file:") :], path)
        if not _VARIABLE.fullmatch(name):
            # The name is not repeated: people paste the secret itself between the braces.
            self._report.error(path, "no name of a variable", allowed="${NAME} or ${file:/path}")
            return None
        value = self._lookup(name)
        if value is None or not value:
            state = "not set" if value is None else "empty"
            self._report.error(path, f"the environment variable {name} is {state}")
            return None
        return value

    def _from_file(self, name: str, path: Path) -> str | None:
        shown = clean(name)
        if not name.startswith("/"):
            self._report.error(path, "a secret file needs an absolute path", allowed="/run/…")
            return None
        self.secret_files.add(name)
        try:
            value = self._read(name)
        except OSError as wrong:
            self._report.error(path, f"the secret file {shown} cannot be read: {wrong.strerror}")
            return None
        except ValueError as wrong:
            self._report.error(path, f"the secret file {shown} {wrong}")
            return None
        return value


def _control(text: str) -> bool:
    return any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029\ufeff" for c in text)
