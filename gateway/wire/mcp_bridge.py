"""Between the eras: what a message of one must gain or lose to be one of the other. Pure.

Requests change by splices, so that arguments reach a server as the bytes their caller wrote.
Results are adapted as values: a member that the other era demands is added, none is taken away,
since both eras tell their readers to ignore what they do not know.
Source: `protocols.md` §5.4; MCP 2026-07-28, "versioning" and "caching".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from gateway.wire import mcp
from gateway.wire.splice import insert, locate, splice, without

if TYPE_CHECKING:
    from collections.abc import Iterable

Body: TypeAlias = Mapping[str, Any]

LISTS = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}
"""Methods that list, and the member that holds the list."""

CACHED = frozenset({*LISTS, "server/discover", "resources/read"})
"""Methods whose results carry hints for caches."""

STATUS = {
    mcp.PARSE_ERROR: 400,
    mcp.INVALID_REQUEST: 400,
    mcp.INVALID_PARAMS: 400,
    mcp.HEADER_MISMATCH: 400,
    mcp.MISSING_CAPABILITY: 400,
    mcp.UNSUPPORTED_VERSION: 400,
    mcp.METHOD_NOT_FOUND: 404,
}
"""HTTP status of an error's code in the stateless era; all others are 200."""

ENVELOPE = frozenset(
    {mcp.META_VERSION, mcp.META_CAPABILITIES, mcp.META_CLIENT, mcp.META + "logLevel"}
)
"""Members of `_meta` by which each request of the stateless era says what a session says once."""

OURS = "tidegate"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MIRRORED = frozenset({"integer", "string", "boolean"})


# --- requests -------------------------------------------------------------------------------------


def renamed(raw: bytes, method: str, subject: bytes) -> bytes:
    """The message about another subject (JSON text): names carry a prefix here, not at a server."""
    return inside(raw, "params", mcp.NAMED[method], subject)


def inside(raw: bytes, outer: str, key: str, value: bytes) -> bytes:
    """The message with one member of an object in it replaced."""
    member = locate(raw, outer)
    assert member is not None  # noqa: S101 - it was decoded and holds the member
    inner = splice(raw[member.start : member.end], key, value)
    return raw[: member.start] + inner + raw[member.end :]


def under_id(raw: bytes, ident: bytes) -> bytes:
    """The message under another id."""
    return splice(raw, "id", ident)


def with_meta(raw: bytes, members: Mapping[str, bytes]) -> bytes:
    """The message with these members in `params._meta`, in place of those of the same name.

    Args:
        raw: A JSON-RPC message.
        members: JSON text by key.
    """
    fresh = b"{" + b",".join(b'"%b":%b' % (k.encode(), v) for k, v in members.items()) + b"}"
    params = locate(raw, "params")
    if params is None:
        return insert(raw, "params", b'{"_meta":%b}' % fresh)
    text = raw[params.start : params.end]
    meta = locate(text, "_meta")
    if meta is None:
        text = insert(text, "_meta", fresh)
    else:
        own = text[meta.start : meta.end]
        if not own.startswith(b"{"):
            own = b"{}"
        for key, value in members.items():
            own = insert(own, key, value) if locate(own, key) is None else splice(own, key, value)
        text = text[: meta.start] + own + text[meta.end :]
    return raw[: params.start] + text + raw[params.end :]


def without_envelope(raw: bytes) -> bytes:
    """The message without what a request of the stateless era says of itself in `params._meta`.

    A server of both eras would take it for one, in a session, and miss its routing headers.
    """
    params = locate(raw, "params")
    if params is None:
        return raw
    text = raw[params.start : params.end]
    meta = locate(text, "_meta")
    if meta is None or text[meta.start : meta.start + 1] != b"{":
        return raw
    own = without(text[meta.start : meta.end], ENVELOPE)
    text = text[: meta.start] + own + text[meta.end :]
    return raw[: params.start] + text + raw[params.end :]


# --- results --------------------------------------------------------------------------------------


def for_stateless(method: str, result: Body) -> dict[str, Any] | None:
    """An older server's result as the stateless era wants it; None where nothing is missing."""
    more: dict[str, Any] = {}
    if "resultType" not in result:
        more["resultType"] = "complete"
    if method in CACHED:
        more.update({"ttlMs": 0} if "ttlMs" not in result else {})
        more.update({"cacheScope": "private"} if "cacheScope" not in result else {})
    return {**result, **more} if more else None


def negotiated(asked: object) -> str:
    """The revision of the session era that we answer to a client that asks for this one."""
    return asked if asked in mcp.SESSION_VERSIONS else mcp.SESSION_VERSIONS[0]


def initialize_result(version: str, found: Body) -> dict[str, Any]:
    """The answer to `initialize` on behalf of a stateless server or of a federation.

    Args:
        version: As negotiated.
        found: A discovery's result.
    """
    capabilities = found.get("capabilities")
    out: dict[str, Any] = {
        "protocolVersion": version,
        "capabilities": dict(capabilities) if isinstance(capabilities, Mapping) else {},
        "serverInfo": server_info(found),
    }
    if isinstance(found.get("instructions"), str):
        out["instructions"] = found["instructions"]
    return out


def discover_result(initialized: Body) -> dict[str, Any]:
    """A discovery's result on behalf of a server of the session era."""
    capabilities = initialized.get("capabilities")
    out: dict[str, Any] = {
        "resultType": "complete",
        "supportedVersions": [*mcp.STATELESS_VERSIONS, *mcp.SESSION_VERSIONS],
        "capabilities": dict(capabilities) if isinstance(capabilities, Mapping) else {},
        "ttlMs": 0,
        "cacheScope": "private",
        "_meta": {mcp.META + "serverInfo": server_info(initialized)},
    }
    if isinstance(initialized.get("instructions"), str):
        out["instructions"] = initialized["instructions"]
    return out


def server_info(found: Body) -> dict[str, Any]:
    """Who a server says it is: in the session era's place, or in the stateless era's."""
    meta = found.get("_meta")
    info = found.get("serverInfo")
    if not isinstance(info, Mapping) and isinstance(meta, Mapping):
        info = meta.get(mcp.META + "serverInfo")
    if isinstance(info, Mapping) and isinstance(info.get("name"), str):
        return {"version": "", **info}
    return {"name": OURS, "version": ""}


# --- mirrored arguments ---------------------------------------------------------------------------


def mirrors(schema: object) -> tuple[tuple[tuple[str, ...], str], ...] | None:
    """Arguments that a stateless request repeats in headers: path and header token of each.

    None where an annotation is invalid: such a tool is dropped from lists. Only properties reached
    by `properties` alone can be mirrored; references are never followed.
    """
    found: list[tuple[tuple[str, ...], str]] = []
    tokens: set[str] = set()
    todo: list[tuple[tuple[str, ...], object]] = [((), schema)]
    while todo:
        path, node = todo.pop()
        if not isinstance(node, Mapping):
            continue
        if "x-mcp-header" in node:
            token = node["x-mcp-header"]
            valid = isinstance(token, str) and _TOKEN.fullmatch(token) is not None
            if not path or not valid or node.get("type") not in _MIRRORED:
                return None
            if token.lower() in tokens:
                return None
            tokens.add(token.lower())
            found.append((path, token))
        properties = node.get("properties")
        if isinstance(properties, Mapping):
            todo += [((*path, str(key)), value) for key, value in properties.items()]
    return tuple(found)


def mirror_headers(
    mirrored: Iterable[tuple[tuple[str, ...], str]], arguments: Body
) -> list[tuple[bytes, bytes]]:
    """The headers that repeat these arguments; a value that is absent or null has none."""
    headers = []
    for path, token in mirrored:
        node: object = arguments
        for key in path:
            node = node.get(key) if isinstance(node, Mapping) else None
        text = {True: "true", False: "false"}.get(node) if isinstance(node, bool) else None
        if text is None and isinstance(node, int | str):
            text = str(node)
        if text is not None:
            headers.append((mcp.H_PARAM + token.lower().encode(), mcp.encoded_header(text)))
    return headers
