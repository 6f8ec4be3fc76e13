"""A request in the emulator's own terms, the same for every dialect.

The codecs (`chat.py`, `responses.py`, `messages.py`) read a body into an `Ask`; `answer.py` decides
what is said, and the codecs write it down.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.emulator.text import Tokenizer, as_json
from gateway.units import Tokens

MEDIA_SAMPLE = 64
"""Characters at each end of a media payload that tell it from another: megabytes cost too much."""

MAX_CHOICES = 128


class Rejected(Exception):
    """The request is at fault; the dialect's error body is made of these.

    Attributes:
        status: HTTP status.
        kind: `error.type`.
        param, code: OpenAI's other two fields.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code


class Prompt:
    """Counts a prompt and fingerprints every prefix of it that ends with a message.

    Attributes:
        tokens: Counted so far.
        prefixes: (fingerprint, tokens) at each boundary.
        breakpoints: Indexes of boundaries that the caller marked for caching.
    """

    __slots__ = ("_count", "_hash", "breakpoints", "prefixes", "tokens")

    def __init__(self, count: Tokenizer) -> None:
        self._count = count
        self._hash = hashlib.blake2b(digest_size=12)
        self.tokens: Tokens = 0
        self.prefixes: list[tuple[bytes, Tokens]] = []
        self.breakpoints: list[int] = []

    def text(self, text: str) -> None:
        """A piece of text."""
        self.tokens += self._count(text)
        self._hash.update(text.encode("utf-8", "surrogatepass"))
        self._hash.update(b"\0")

    def ids(self, ids: list[int]) -> None:
        """Token ids count one each."""
        self.tokens += len(ids)
        self._hash.update(repr(ids).encode())

    def json(self, value: object) -> None:
        """Anything else, counted as its JSON."""
        self.text(as_json(value).decode())

    def media(self, payload: str, tokens: Tokens) -> None:
        """An image, a sound or a file: a flat price, never its payload counted as text."""
        self.tokens += tokens
        sample = payload[:MEDIA_SAMPLE] + payload[-MEDIA_SAMPLE:]
        self._hash.update(f"{len(payload)}:{sample}".encode("utf-8", "surrogatepass"))

    def end(self, label: str, *, overhead: Tokens = 3, mark: bool = False) -> None:
        """A message (or block) is complete."""
        self.tokens += overhead
        self._hash.update(label.encode("utf-8", "surrogatepass") + b"\1")
        self.prefixes.append((self._hash.copy().digest(), self.tokens))
        if mark:
            self.breakpoints.append(len(self.prefixes) - 1)

    def digest(self) -> bytes:
        """Fingerprint of the whole prompt."""
        return self._hash.copy().digest()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called."""

    name: str
    schema: object
    namespace: str | None = None


@dataclass(slots=True, kw_only=True)
class Ask:
    """What one call asks for.

    Attributes:
        model: As asked.
        prompt: Counted.
        stream, include_usage: How to answer.
        cap: Output tokens at most, per choice; None where none is named.
        n: Choices.
        tools: Those that can be called.
        tool_choice: "auto", "none", "required", or a tool's name.
        parallel: Whether several calls may come at once.
        last_text: The last user text, where tools may be named.
        after_tool: The prompt ends with a tool's result.
        schema: A JSON answer is wanted that fits this; {} fits anything; None wants prose.
        stops: Stop sequences.
        thinking: Budget of a visible thinking block; 0 for none.
        explicit_cache: Only marked prefixes are cached (Messages).
        body: The request, for the fields a dialect echoes.
    """

    model: str
    prompt: Prompt
    stream: bool = False
    include_usage: bool = False
    cap: Tokens | None = None
    n: int = 1
    tools: list[Tool] = field(default_factory=list)
    tool_choice: str = "auto"
    parallel: bool = True
    last_text: str = ""
    after_tool: bool = False
    schema: object = None
    stops: tuple[str, ...] = ()
    thinking: Tokens = 0
    explicit_cache: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
