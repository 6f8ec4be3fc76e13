"""JSON-RPC over MCP: messages with their exact ids, the two eras, header rules, error codes. Pure.

The law:

* An id is echoed as the very JSON text it came as, so `0`, `"0"` and 9007199254740993 survive
  (rust-sdk#1017); `null`, fractions and objects are no ids.
* The *stateless* era (2026-07-28) says everything in each request, and its routing headers must
  equal the body: whoever meters by headers would otherwise be lied to. The *session* era
  (2025-03-26 to 2025-11-25) begins with `initialize`.
* A 400 to a stateless request carries a code that its revision defines, or a client that speaks
  both eras takes the gateway for an old server and stays old.
* Our own codes lie outside -32768 to -32000 (`refusals.py`).

Rules: `protocols.md` §5.1 to §5.3; MCP specification 2026-07-28, basic and streamable HTTP.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from gateway.errors import ProtocolFault
from gateway.units import valueclass
from gateway.wire.splice import MCP_KEYS, PARAMS_KEYS, duplicate_keys, elements, locate

if TYPE_CHECKING:
    from gateway.call import HeaderList

Body: TypeAlias = Mapping[str, Any]

STATELESS_VERSIONS = ("2026-07-28",)
SESSION_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")
"""Revisions spoken, the newest first."""
BATCHED = "2025-03-26"
"""The one revision with JSON-RPC batches; also what an absent version header means."""

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HEADER_MISMATCH = -32020
MISSING_CAPABILITY = -32021
UNSUPPORTED_VERSION = -32022

META = "io.modelcontextprotocol/"
META_VERSION = META + "protocolVersion"
META_CAPABILITIES = META + "clientCapabilities"
META_CLIENT = META + "clientInfo"
META_SUBSCRIPTION = META + "subscriptionId"

H_VERSION = b"mcp-protocol-version"
H_METHOD = b"mcp-method"
H_NAME = b"mcp-name"
H_SESSION = b"mcp-session-id"
H_PARAM = b"mcp-param-"
H_LAST_EVENT = b"last-event-id"

NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
"""Methods whose subject stands in `Mcp-Name`, and the parameter that it repeats."""

GOVERNED = frozenset({"tools/call", "prompts/get", "resources/read", "completion/complete"})
"""Methods that make a server work: they wait, spend and are counted. Lists are not: a client asks
for them by itself after each call."""

MAX_DEPTH = 128
"""Levels of a message; servers in other languages overflow their stacks on more."""
MAX_NAME = 256
"""Characters of a method or of a tool's name."""
MAX_ID = 256
"""Bytes of an id."""
MAX_BATCH = 100
"""Messages of one batch."""

_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)")
_SENTINEL = re.compile(r"=\?base64\?([A-Za-z0-9+/]*={0,2})\?=")


_NONE: dict[str, Any] = {}
"""What a message without parameters holds. Nobody writes into it."""


class Era(StrEnum):
    """How a peer speaks."""

    STATELESS = "stateless"
    SESSION = "session"


@valueclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One JSON-RPC message of a client.

    Attributes:
        raw: Its bytes as sent.
        parsed: The decoded copy.
        method: "" for a response.
        id: The id's own JSON text; b"" for a notification.
        era: How its sender speaks.
        version: Revision it names; "" where it names none (session era only).
        params: Its parameters; empty where there are none.
        meta: What it says about itself; empty where it says nothing.
        subject: The tool, prompt or resource it is about; "" where it is about none.
        arguments: Its arguments; empty where it has none.
    """

    raw: bytes
    parsed: Body
    method: str
    id: bytes
    era: Era
    version: str = ""
    params: Body = field(init=False)
    meta: Body = field(init=False)
    subject: str = field(init=False)
    arguments: Body = field(init=False)

    def __post_init__(self) -> None:
        """Every layer asks for these: they are looked up once."""
        params = self.parsed.get("params")
        params = params if isinstance(params, dict) else _NONE
        meta, arguments = params.get("_meta"), params.get("arguments")
        named = NAMED.get(self.method)
        subject = params.get(named) if named is not None else None
        put = object.__setattr__
        put(self, "params", params)
        put(self, "meta", meta if isinstance(meta, dict) else _NONE)
        put(self, "subject", subject if isinstance(subject, str) else "")
        put(self, "arguments", arguments if isinstance(arguments, dict) else _NONE)

    @property
    def is_request(self) -> bool:
        """Whether an answer is owed."""
        return bool(self.method) and bool(self.id)


@valueclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """What one POST carried.

    Attributes:
        messages: At least one.
        batch: They came as an array, and are answered as one.
        first: The only one of an ordinary POST.
    """

    messages: tuple[Message, ...]
    batch: bool = False
    first: Message = field(init=False)

    def __post_init__(self) -> None:
        """Asked for by every layer."""
        object.__setattr__(self, "first", self.messages[0])


# --- reading --------------------------------------------------------------------------------------


def fault(code: int, text: str, *, http: int = 400, data: Body | None = None) -> ProtocolFault:
    """A broken rule of the protocol, in its own code."""
    return ProtocolFault(text, rpc=code, http=http, data=data)


def id_of(parsed: object, raw: bytes) -> bytes:
    """The id's JSON text; b"" where there is none to be echoed. Never raises."""
    if not isinstance(parsed, dict) or "id" not in parsed:
        return b""
    try:
        return _id(parsed["id"], raw)
    except ProtocolFault:
        return b""


def _id(value: object, raw: bytes) -> bytes:
    """The id as sent.

    An integer of 64 bits has one spelling, and so has a text where nothing is escaped: only other
    ids are looked up in the raw message.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        text = b"%d" % value
        return text if value else _located(raw) or text
    if isinstance(value, str):
        text = b'"%b"' % value.encode("utf-8", "surrogatepass")
        if b"\\" in raw:
            text = _located(raw)
        if len(text) > MAX_ID:
            raise fault(INVALID_REQUEST, f"The id is longer than {MAX_ID} bytes")
        return text
    if isinstance(value, float):  # what a decoder makes of an integer beyond 64 bits
        text = _located(raw)
        if len(text) <= MAX_ID and _INTEGER.fullmatch(text):
            return text
    raise fault(INVALID_REQUEST, "The id must be a text or an integer")


def _located(raw: bytes) -> bytes:
    member = locate(raw, "id")
    return raw[member.start : member.end] if member is not None else b""


def read(parsed: object, raw: bytes, headers: HeaderList) -> Posted:
    """The messages of a body, checked against the rules of their era.

    Args:
        parsed: The decoded body.
        raw: Its bytes.
        headers: Of the request, names in lower case.

    Raises:
        ProtocolFault: As the message deserves, in the protocol's own code.
    """
    if isinstance(parsed, list):
        return Posted(messages=_batch(parsed, raw, headers), batch=True)
    if not isinstance(parsed, dict):
        raise fault(INVALID_REQUEST, "The body must be a JSON-RPC message")
    return Posted(messages=(_message(parsed, raw, headers),))


def _batch(parsed: list[Any], raw: bytes, headers: HeaderList) -> tuple[Message, ...]:
    version = header_text(headers, H_VERSION)
    if version not in ("", BATCHED):
        raise fault(INVALID_REQUEST, f"Batches exist in revision {BATCHED} only")
    if not parsed:
        raise fault(INVALID_REQUEST, "An empty batch asks for nothing")
    if len(parsed) > MAX_BATCH:
        raise fault(INVALID_REQUEST, f"A batch holds at most {MAX_BATCH} messages")
    messages = []
    if not all(isinstance(one, dict) for one in parsed):
        raise fault(INVALID_REQUEST, "Each element of a batch must be a JSON-RPC message")
    for one, (start, end) in zip(parsed, elements(raw), strict=True):
        messages.append(_message(one, raw[start:end], headers))
    if any(message.era is Era.STATELESS for message in messages):
        raise fault(INVALID_REQUEST, f"Batches exist in revision {BATCHED} only")
    return tuple(messages)


def _message(parsed: Body, raw: bytes, headers: HeaderList) -> Message:
    if parsed.get("jsonrpc") != "2.0":
        raise fault(INVALID_REQUEST, 'Each message says "jsonrpc": "2.0"')
    twice = duplicate_keys(raw, MCP_KEYS) or _twice_in_params(parsed, raw)
    if twice is not None:
        raise fault(
            INVALID_REQUEST, f"The key {twice!r} stands twice; gateway and server might differ"
        )
    check_depth(parsed, raw)
    method = parsed.get("method", "")
    if not isinstance(method, str) or len(method) > MAX_NAME:
        raise fault(INVALID_REQUEST, "method must be a short text")
    if not method and "result" not in parsed and "error" not in parsed:
        raise fault(INVALID_REQUEST, "A message is a request, a notification or a response")
    ident = _id(parsed["id"], raw) if "id" in parsed else b""
    if not method and not ident:
        raise fault(INVALID_REQUEST, "A response names its request by id")
    params = parsed.get("params")
    if params is not None and not isinstance(params, dict):
        raise fault(INVALID_PARAMS, "params must be an object")
    era, version = _era(method, params or {}, headers)
    message = Message(raw=raw, parsed=parsed, method=method, id=ident, era=era, version=version)
    if era is Era.STATELESS:
        _check_stateless(message, headers)
    elif version and version not in SESSION_VERSIONS and method != "initialize":
        raise unsupported(version)
    return message


def _twice_in_params(parsed: Body, raw: bytes) -> str | None:
    """A governed key that stands twice in `params`; looked for only where one might."""
    if not isinstance(parsed.get("params"), dict):
        return None
    seen: set[bytes] = set()
    for match in PARAMS_KEYS.pattern.finditer(raw):
        if match[1] in seen:
            break
        seen.add(match[1])
    else:
        if b"\\u00" not in raw:
            return None
    member = locate(raw, "params")
    assert member is not None  # noqa: S101 - it was decoded
    return duplicate_keys(raw[member.start : member.end], PARAMS_KEYS)


def check_depth(parsed: object, raw: bytes) -> None:
    """The message is no deeper than `MAX_DEPTH`.

    Raises:
        ProtocolFault: It is.
    """
    if raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH:
        return
    level = [parsed]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, Mapping | list)
            for child in (node.values() if isinstance(node, Mapping) else node)
        ]
        if not level:
            return
    raise fault(INVALID_REQUEST, f"The message is deeper than {MAX_DEPTH} levels")


# --- eras -----------------------------------------------------------------------------------------


def _era(method: str, params: Body, headers: HeaderList) -> tuple[Era, str]:
    """How the sender speaks, and the revision it names."""
    said = header_text(headers, H_VERSION)
    meta = params.get("_meta")
    own = meta.get(META_VERSION) if isinstance(meta, dict) else None
    if own is not None or said >= STATELESS_VERSIONS[-1] or method == "server/discover":
        return Era.STATELESS, own if isinstance(own, str) else said
    return Era.SESSION, said


def unsupported(version: str) -> ProtocolFault:
    """No such revision is spoken here."""
    supported = [*STATELESS_VERSIONS, *SESSION_VERSIONS]
    return fault(
        UNSUPPORTED_VERSION,
        f"The revision {version[:40]!r} is not spoken here; {', '.join(supported)} are",
        data={"supported": supported, "requested": version[:100]},
    )


def _check_stateless(message: Message, headers: HeaderList) -> None:
    """The ladder of 2026-07-28: envelope, headers equal to the body, revision."""
    if not message.method:
        raise fault(INVALID_REQUEST, "Clients send no responses in this revision")
    said = header_text(headers, H_VERSION)
    if not message.id:
        if said and said not in STATELESS_VERSIONS:
            raise unsupported(said)
        return
    meta = message.params.get("_meta")
    if not isinstance(meta, dict):
        raise fault(INVALID_PARAMS, f"params._meta must hold {META_VERSION} and more")
    missing = [key for key in (META_VERSION, META_CAPABILITIES) if key not in meta]
    if missing:
        raise fault(INVALID_PARAMS, f"params._meta lacks {', '.join(missing)}")
    own = meta[META_VERSION]
    _equal(H_VERSION, said, own, "params._meta's revision")
    _equal(H_METHOD, header_text(headers, H_METHOD), message.method, "method")
    key = NAMED.get(message.method)
    if key is not None and message.params.get(key) is not None:
        name = decoded_header(header_text(headers, H_NAME))
        _equal(H_NAME, name, message.params[key], f"params.{key}")
    if not isinstance(own, str) or own not in STATELESS_VERSIONS:
        raise unsupported(str(own))


def _equal(name: bytes, header: str | None, body: object, where: str) -> None:
    if not header or header != body:
        raise fault(
            HEADER_MISMATCH,
            f"The header {name.decode()} is missing or differs from {where} of the body",
        )


def header_text(headers: HeaderList, name: bytes) -> str:
    """A header's value; "" where it is absent."""
    for key, value in headers:
        if key == name:
            return value.strip().decode("latin-1")
    return ""


def decoded_header(text: str) -> str | None:
    """What a routing header says, its base64 form undone; None where that form is broken."""
    match = _SENTINEL.fullmatch(text)
    if match is None:
        return text
    try:
        return base64.b64decode(match[1], validate=True).decode()
    except ValueError:  # no base64, or no UTF-8
        return None


def encoded_header(text: str) -> bytes:
    """The text as a header value: itself where that is safe, else its base64 form."""
    plain = text.isascii() and text.isprintable() and text.strip() == text and text
    if plain and not text.startswith("=?"):
        return text.encode()
    return b"=?base64?%b?=" % base64.b64encode(text.encode("utf-8", "surrogatepass"))


def takes_stream(headers: HeaderList) -> bool:
    """Whether the client says by name that it takes a stream of events."""
    for name, value in headers:
        if name == b"accept" and b"text/event-stream" in value.lower():
            return True
    return False


def progress_token(message: Message) -> int | str | None:
    """The token under which the client wants to hear of progress; None where it gave none."""
    token = message.meta.get("progressToken")
    if isinstance(token, int | str) and not isinstance(token, bool):
        return token
    return None


def check_subject(message: Message) -> None:
    """A governed message names what it is about, and its arguments are an object.

    Raises:
        ProtocolFault: It does not.
    """
    key = NAMED.get(message.method)
    if key is not None and not message.subject:
        raise fault(INVALID_PARAMS, f"params.{key} must be a text")
    arguments = message.params.get("arguments")
    if arguments is not None and not isinstance(arguments, dict):
        raise fault(INVALID_PARAMS, "params.arguments must be an object")
