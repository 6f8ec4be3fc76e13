"""The route table of the data listener: method and path choose a dialect, a credential never does.

Paths are compared as sent (raw), so a spelling that a provider might normalize to a governed path
(`/v1//chat/completions`, `/v1/Chat/Completions/`, `%63hat`, `..`) can never slip through a wide
pass-through pattern: whatever *means* a governed or reserved path but is not spelled like it is
404.
Source: `protocols.md` §1.1; bifrost#2873 (a side door that skipped admission).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import unquote

from gateway.call import Dialect, Family
from gateway.errors import GatewayError, MethodNotAllowed, NoSuchRoute, UpgradeRefused

if TYPE_CHECKING:
    from gateway.snapshot import Snapshot

RELAYED_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
"""Methods a pass-through path may carry. CONNECT and TRACE have no business here."""

RESERVED = ("tasks", "events", "schedules", "dead-letters", "approvals", "holds")
"""Families under /v1 that are our own API and never an upstream's."""

MCP_METHODS = ("POST", "GET", "DELETE")

_ODD = ("//", "/./", "/../", "\\", "\x00", ";")
_ODD_RAW = (b"%2f", b"%5c", b"%2e", b"%00")


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        dialect: Wire format of the body.
        family: Error shape of every refusal on this path.
        streams_upload: The body is passed on as it arrives, unparsed.
        hello: Answered 204 by the edge itself.
    """

    dialect: Dialect
    family: Family
    streams_upload: bool = False
    hello: bool = False


_POST = {
    "/v1/chat/completions": Route(Dialect.CHAT, Family.OPENAI),
    "/v1/completions": Route(Dialect.COMPLETIONS, Family.OPENAI),
    "/v1/responses": Route(Dialect.RESPONSES, Family.OPENAI),
    "/v1/embeddings": Route(Dialect.EMBEDDINGS, Family.OPENAI),
    "/v1/messages": Route(Dialect.MESSAGES, Family.ANTHROPIC),
    "/v1/messages/count_tokens": Route(Dialect.COUNT_TOKENS, Family.ANTHROPIC),
}
_MODELS = {family: Route(Dialect.MODELS, family) for family in (Family.OPENAI, Family.ANTHROPIC)}
_PASS = {
    family: Route(Dialect.PASSTHROUGH, family, streams_upload=True)
    for family in (Family.OPENAI, Family.ANTHROPIC)
}
_MCP = Route(Dialect.MCP, Family.MCP)
_HELLO = Route(Dialect.MODELS, Family.ANTHROPIC, hello=True)
_NOBODY_SPEAKS = Dialect.PASSTHROUGH


def family_of(path: str, *, anthropic: bool = False) -> Family:
    """Whose error shape a path speaks, known or not.

    Args:
        path: Raw path as text.
        anthropic: Whether `anthropic-version` was sent: decides on paths that both families have.
    """
    if path.startswith("/v1/messages"):
        return Family.ANTHROPIC
    if path == "/mcp" or path.startswith("/mcp/"):
        return Family.MCP
    if _reserved(path):
        return Family.TIDEGATE
    if anthropic and not path.startswith(("/v1/chat/", "/v1/completions", "/v1/responses")):
        return Family.ANTHROPIC
    return Family.OPENAI


def dialect_of(path: str) -> Dialect:
    """The dialect a refusal on this path is shaped for."""
    route = _POST.get(path)
    if route is not None:
        return route.dialect
    if path.startswith("/v1/models"):
        return Dialect.MODELS
    if path == "/mcp" or path.startswith("/mcp/"):
        return Dialect.MCP
    return _NOBODY_SPEAKS


def choose(method: str, path: str, *, anthropic: bool, snapshot: Snapshot) -> Route | GatewayError:
    """The route of this request, or the refusal that ends it.

    Args:
        method: As sent.
        path: Raw path, as text, without query.
        anthropic: Whether `anthropic-version` was sent.
        snapshot: Names the pass-through paths.
    """
    route = _POST.get(path)
    if route is not None:
        return route if method == "POST" else _wrong_method(method, path)
    if path == "/v1/models" or (path.startswith("/v1/models/") and len(path) > len("/v1/models/")):
        if method in {"GET", "HEAD"}:
            return _MODELS[Family.ANTHROPIC if anthropic else Family.OPENAI]
        return _only("GET, HEAD", path)
    if path == "/mcp" or path.startswith("/mcp/"):
        return _tools(method, path, snapshot)
    if path == "/api/hello":
        return _HELLO if method in {"HEAD", "GET"} else _only("GET, HEAD", path)
    return _beyond(method, path, anthropic=anthropic, snapshot=snapshot)


def _tools(method: str, path: str, snapshot: Snapshot) -> Route | GatewayError:
    """One tool server, or all of them."""
    name = path[len("/mcp/") :]
    if not snapshot.servers or (name and name not in snapshot.servers):
        return NoSuchRoute(
            f"No tool server is served at {path[:120]!r}; policy names them under servers.",
            code="no_such_server",
        )
    if method not in MCP_METHODS:
        return _only(", ".join(MCP_METHODS), path)
    return _MCP


def _beyond(method: str, path: str, *, anthropic: bool, snapshot: Snapshot) -> Route | GatewayError:
    """Everything that is not governed by name: pass-through, reserved, or nothing."""
    meant = _canonical(path)
    if meant == "/mcp" or meant.startswith("/mcp/") or _reserved(meant):
        return NoSuchRoute(
            f"{path} is kept for an interface of the gateway's own, which this process does not "
            "serve; it is never passed on to a provider.",
            code="not_served",
        )
    unsafe = any(part in path or part in unquote(path) for part in _ODD)
    if unsafe or any(part in path.lower().encode("latin-1", "replace") for part in _ODD_RAW):
        return _unknown(path)
    if meant in _POST or meant in {"/v1/models", "/api/hello"}:
        return _unknown(path)
    if not (_stored_response(path) or passes_through(path, snapshot)):
        return _unknown(path)
    if method not in RELAYED_METHODS:
        return _only(", ".join(RELAYED_METHODS), path)
    return _PASS[family_of(path, anthropic=anthropic)]


def passes_through(path: str, snapshot: Snapshot) -> bool:
    """Whether a provider's profile names this path as relayed without parsing."""
    return any(
        fnmatchcase(path, pattern)
        for provider in snapshot.providers.values()
        for pattern in provider.passthrough
    )


def _stored_response(path: str) -> bool:
    """Whether the path names a response that an upstream keeps."""
    return path.startswith("/v1/responses/") and len(path) > len("/v1/responses/")


def _canonical(path: str) -> str:
    """What a lenient server would take this path for."""
    parts: list[str] = []
    for part in unquote(unquote(path)).replace("\\", "/").lower().split("/"):
        name = part.partition(";")[0].strip()
        if name == "..":
            del parts[-1:]
        elif name not in {"", "."}:
            parts.append(name)
    return "/" + "/".join(parts)


def _reserved(path: str) -> bool:
    first, _, rest = path.removeprefix("/").partition("/")
    return first == "v1" and rest.partition("/")[0] in RESERVED


def _wrong_method(method: str, path: str) -> GatewayError:
    if path == "/v1/responses" and method == "GET":
        # Codex tries a WebSocket here: 426 costs it 0.8 s, any other refusal about 7 s.
        return UpgradeRefused(
            "/v1/responses is served over HTTP only: send POST. WebSocket is not supported"
        )
    return _only("POST", path)


def _only(allow: str, path: str) -> GatewayError:
    return MethodNotAllowed(f"{path} is served for {allow} only", allow=allow)


def _unknown(path: str) -> GatewayError:
    shown = path if len(path) <= 120 else path[:120] + "…"
    return NoSuchRoute(
        f"No path {shown!r} is served. Governed are POST /v1/chat/completions, "
        "/v1/completions, /v1/responses, /v1/embeddings, /v1/messages, "
        "/v1/messages/count_tokens and GET /v1/models; policy may name further ones "
        "(providers.*.passthrough)."
    )
