"""Forms of names, URLs and the like: text in, the same text out, or `Unreadable`. Pure.

Each function is a validator of `models.py`. None repeats a value that could be a secret: URLs,
keys and their ids are described, never shown.
"""

from __future__ import annotations

import base64
import re
from ipaddress import ip_network
from typing import Any
from urllib.parse import urlsplit

from gateway.contracts import conditions
from gateway.contracts.validators import Pattern
from gateway.policy import quantity
from gateway.policy.quantity import Unreadable
from gateway.snapshot import Secret, parse_stored_key

NAME_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}", re.ASCII)
PATTERN_FORM = re.compile(r"[A-Za-z0-9._:/@+*?-]{1,128}", re.ASCII)
SERVER_FORM = re.compile(r"[a-z0-9-]{1,16}", re.ASCII)
VARIABLE_FORM = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
KEY_ID_FORM = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
HEADER_FORM = re.compile(r"[a-z0-9][a-z0-9-]{0,63}", re.ASCII)
TARGET_FORM = re.compile(
    r"(?:\*\.)?(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::(?:\d{1,5}|\*))?",
    re.ASCII,
)
SHAPE_FORM = re.compile(r"bucket|unknown|window_[1-9][0-9]{0,3}[sm]", re.ASCII)

NOT_OURS = frozenset(
    {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding",
     "upgrade", "authorization", "x-api-key", "api-key", "accept-encoding", "content-encoding"}
)  # fmt: skip
"""Headers that framing, identity or the transport own; a policy that sets them would break both."""


def name(text: str) -> str:
    """A name of an entry."""
    if not NAME_FORM.fullmatch(text):
        raise Unreadable(
            f"{quantity.shown(text)} is no name",
            allowed="letters, digits and . _ : / @ + - after a letter or digit, at most 128",
        )
    return text


def server_name(text: str) -> str:
    """A tool server's name: it stands before `__` in the names of its tools."""
    if not SERVER_FORM.fullmatch(text):
        raise Unreadable(
            f"{quantity.shown(text)} is no name of a server",
            allowed="1 to 16 lower-case letters, digits and -",
        )
    return text


def variable(text: str) -> str:
    """An environment variable."""
    if not VARIABLE_FORM.fullmatch(text):
        raise Unreadable(
            f"{quantity.shown(text)} is no variable", allowed="letters, digits and _: HOME"
        )
    return text


def pattern(text: str) -> str:
    """A name, or a pattern of names."""
    if not PATTERN_FORM.fullmatch(text):
        raise Unreadable(
            f"{quantity.shown(text)} is no pattern",
            allowed="a name, or one with * (any text) and ? (one character), at most 128",
        )
    return text


def url(text: str) -> str:
    """An http(s) URL without credentials, query, fragment or trailing slash. Never repeats it."""
    allowed = "scheme, host, optional port and path prefix: https://api.openai.com"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise Unreadable("not a URL", allowed=allowed) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise Unreadable("not an http or https URL with a host", allowed=allowed)
    if "@" in parts.netloc:
        raise Unreadable("a URL must not hold credentials", allowed="keys: with a value each")
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise Unreadable("a base URL has no query or fragment", allowed="query: for parameters")
    if any(ord(c) <= 32 or ord(c) > 126 for c in text):
        raise Unreadable("a URL holds visible ASCII only", allowed=allowed)
    return text.rstrip("/")


def base_url(text: str) -> str:
    """Where a provider answers, in front of `/v1`."""
    found = url(text)
    if found.endswith("/v1"):
        raise Unreadable(
            "the base URL must not end in /v1: the caller's path begins with it",
            allowed="the part before /v1",
        )
    return found


def origin(text: str) -> str:
    """A browser origin, spelled as browsers send it."""
    parts = urlsplit(text)
    if (
        parts.scheme not in ("http", "https")
        or not parts.netloc
        or "@" in parts.netloc
        or "*" in text
    ):
        raise Unreadable(
            f"{quantity.shown(text)} is no origin", allowed="scheme://host[:port], no wildcard"
        )
    if parts.path or parts.query or parts.fragment or text != text.lower():
        raise Unreadable(
            f"{quantity.shown(text)} is no origin as browsers send it",
            allowed="lower case, without path: https://app.example",
        )
    return text


def host(text: str) -> str:
    """A Host header without its port; `*.` in front stands for one or more labels."""
    if not re.fullmatch(r"(\*\.)?[a-z0-9._-]{1,253}|\[[0-9a-f:.]+\]", text):
        raise Unreadable(
            f"{quantity.shown(text)} is no host name",
            allowed="lower case, without scheme or port: gw.example, *.gw.example, [::1]",
        )
    return text


def path(text: str) -> str:
    """A path pattern of pass-through routes."""
    if not re.fullmatch(r"/[A-Za-z0-9._~/*?:-]{1,255}", text) or ".." in text:
        raise Unreadable(
            f"{quantity.shown(text)} is no path pattern", allowed="an absolute path: /v1/audio/*"
        )
    return text


def key_id(text: str) -> str:
    """The id of a key. It is not repeated: people paste the key instead."""
    if not KEY_ID_FORM.fullmatch(text):
        raise Unreadable("no key id", allowed="letters, digits and -, at most 64")
    return text


def header(text: str) -> str:
    """A request header that policy may add."""
    if not HEADER_FORM.fullmatch(text) or text in NOT_OURS or text.startswith("tidegate-"):
        raise Unreadable(
            f"{quantity.shown(text)} cannot be set here",
            allowed="a header name in lower case that framing and identity do not own",
        )
    return text


def shape(text: str) -> str:
    """The shape of a meter."""
    if not SHAPE_FORM.fullmatch(text):
        raise Unreadable(
            f"{quantity.shown(text)} is no shape",
            allowed="bucket, window_60s, window_10s, window_1s (any window_<n>s or m), unknown",
            options=("bucket", "window_60s", "window_10s", "window_1s", "unknown"),
        )
    return text


def stored(text: str) -> str:
    """A stored key, `sha256:<salt>:<digest>`. Never repeats it."""
    try:
        salt, _ = parse_stored_key(text)
    except ValueError as wrong:
        raise Unreadable("not a stored key", allowed=str(wrong)) from None
    if len(salt) > 64:
        raise Unreadable("the salt is longer than 64 bytes", allowed="16 bytes are enough")
    return text


def claim(text: str) -> str:
    """A pattern that a claim must fit."""
    if not text or len(text) > 256 or "[" in text:
        raise Unreadable(
            f"{quantity.shown(text)} is no pattern",
            allowed="1 to 256 characters with * (any text) and ? (one character), no [",
        )
    return text


def secret(value: object) -> Secret:
    """A secret, wrapped before validation."""
    if not isinstance(value, Secret):
        raise Unreadable("a text is expected", allowed="${NAME}, ${file:/path} or a quoted text")
    if not value.reveal():
        raise Unreadable("the secret is empty", allowed="at least one character")
    return value


def listed(value: object) -> object:
    """One name stands for a list of one."""
    return (value,) if isinstance(value, str) else value


def unique(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """A list that holds something, and each thing once."""
    if not items:
        raise Unreadable("the list is empty, so it matches nothing", allowed="at least one entry")
    if len(set(items)) < len(items):
        raise Unreadable("the list names something twice", allowed="each entry once")
    return items


def profiled(value: object) -> object:
    """A profile alone stands for an accounting without parameters."""
    return {"profile": value} if isinstance(value, str) else value


def hashed(value: object) -> object:
    """A text alone is a stored key."""
    return {"hash": value} if isinstance(value, str) else value


def target_host(text: str) -> str:
    """A host that a webhook may name, with an optional port or `*` for any."""
    _, _, port = text.rpartition(":")
    if not TARGET_FORM.fullmatch(text) or (port.isdigit() and not 1 <= int(port) <= 65_535):
        raise Unreadable(
            f"{quantity.shown(text)} is no host", allowed="host, *.domain, host:port or host:*"
        )
    return text.lower()


def network(text: str) -> str:
    """An IP network, or one address."""
    try:
        return str(ip_network(text))
    except ValueError:
        raise Unreadable(
            f"{quantity.shown(text)} is no network", allowed="10.1.0.0/16, fd00::/8, 127.0.0.1"
        ) from None


def target_url(text: str) -> str:
    """A URL to be called, with a path and perhaps a query. Never repeats it."""
    allowed = "https://host/path; http:// only into webhooks.networks"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise Unreadable("not a URL", allowed=allowed) from None
    plain = text.isascii() and text.isprintable() and " " not in text
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not plain:
        raise Unreadable("not an http or https URL with a host", allowed=allowed)
    if "@" in parts.netloc or parts.fragment:
        raise Unreadable("a URL must not hold credentials or a fragment", allowed=allowed)
    return text


def value_path(text: str) -> str:
    """Where values stand in arguments."""
    try:
        conditions.steps(text)
    except ValueError as error:
        raise Unreadable(f"{quantity.shown(text)} is no path", allowed=str(error)) from error
    return text


def regex(text: str) -> str:
    """A regular expression whose time grows with the text alone."""
    try:
        Pattern(text)
    except ValueError as error:
        raise Unreadable(
            f"{quantity.shown(text)} is {error}",
            allowed="no look-around, no back references; (?i) in front ignores case",
        ) from error
    return text


def public_key(text: str) -> str:
    """An approver's key; public, so it may be shown."""
    scheme, _, key = text.partition(":")
    try:
        raw = base64.b64decode(key, validate=True)
    except ValueError:
        raw = b""
    if scheme != "ed25519" or len(raw) != 32:
        raise Unreadable(
            f"{quantity.shown(text)} is no approver's key",
            allowed="ed25519: and 44 characters of base64, as `tidegate approvals key` prints it",
        )
    return text
