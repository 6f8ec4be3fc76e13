"""OAuth protected-resource metadata (RFC 9728): which signers' tokens the tool plane takes. Pure.

Served without a credential, since it tells how to get one, and only where policy names signers: a
client that is sent here for nothing would begin a sign-in that cannot end. The address of the
resource is made of the Host header, which has been checked by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.snapshot import Snapshot

PREFIX = "/.well-known/oauth-protected-resource"
_LOCAL = ("127.", "localhost", "[::1]")


def resource(path: str, snapshot: Snapshot) -> str:
    """The mount that a metadata path speaks of; "" where there is none."""
    mount = path[len(PREFIX) :] or "/mcp"
    if not path.startswith(PREFIX) or not snapshot.servers or not snapshot.jwt:
        return ""
    name = mount.removeprefix("/mcp").removeprefix("/")
    known = mount == "/mcp" or (mount == f"/mcp/{name}" and name in snapshot.servers)
    return mount if known else ""


def document(mount: str, host: bytes, snapshot: Snapshot) -> dict[str, Any]:
    """The metadata of that mount."""
    return {
        "resource": f"{_origin(host)}{mount}",
        "authorization_servers": [issuer.issuer for issuer in snapshot.jwt if issuer.issuer],
        "bearer_methods_supported": ["header"],
        "resource_name": f"Tidegate {mount}",
    }


def address(path: str, host: bytes, snapshot: Snapshot) -> str:
    """Where the metadata of an MCP path is; "" where it has none."""
    if not (path == "/mcp" or path.startswith("/mcp/")) or not resource(PREFIX + path, snapshot):
        return ""
    return f"{_origin(host)}{PREFIX}{path}"


def _origin(host: bytes) -> str:
    name = host.decode("latin-1")
    return f"{'http' if name.startswith(_LOCAL) else 'https'}://{name}"
