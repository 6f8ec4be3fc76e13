"""One table: which dialect is read by which functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from gateway.call import Dialect
from gateway.wire import anthropic, openai_chat, openai_responses

if TYPE_CHECKING:
    from gateway.call import Fields, Piece, Usage
    from gateway.wire.stream import Failure, Reader

Body: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How one dialect is read.

    Attributes:
        fields: A request's governed places; raises MalformedCall.
        parts: Everything countable of a request; never raises.
        usage_of: Usage of a plain answer; None where it reports none.
        error_of: The error inside a plain answer; None where it is none.
        reader: A new fold for a stream of answers; None where the dialect has none.
    """

    fields: Callable[[Body], Fields]
    parts: Callable[[Body], Iterator[Piece]]
    usage_of: Callable[[Body], Usage | None]
    error_of: Callable[[Body], Failure | None]
    reader: Callable[[], Reader] | None = None


_CHAT = Codec(
    fields=openai_chat.fields,
    parts=openai_chat.parts,
    usage_of=openai_chat.usage_of,
    error_of=openai_chat.error_of,
    reader=openai_chat.ChatReader,
)
_MESSAGES = Codec(
    fields=anthropic.fields,
    parts=anthropic.parts,
    usage_of=anthropic.usage_of,
    error_of=anthropic.error_of,
    reader=anthropic.MessagesReader,
)

CODECS: Mapping[Dialect, Codec] = MappingProxyType(
    {
        Dialect.CHAT: _CHAT,
        Dialect.COMPLETIONS: Codec(
            fields=openai_chat.completions_fields,
            parts=openai_chat.completions_parts,
            usage_of=openai_chat.usage_of,
            error_of=openai_chat.error_of,
            reader=partial(openai_chat.ChatReader, completions=True),
        ),
        Dialect.EMBEDDINGS: Codec(
            fields=openai_chat.embeddings_fields,
            parts=openai_chat.embeddings_parts,
            usage_of=openai_chat.embeddings_usage_of,
            error_of=openai_chat.error_of,
        ),
        Dialect.RESPONSES: Codec(
            fields=openai_responses.fields,
            parts=openai_responses.parts,
            usage_of=openai_responses.usage_of,
            error_of=openai_responses.error_of,
            reader=openai_responses.ResponsesReader,
        ),
        Dialect.MESSAGES: _MESSAGES,
        Dialect.COUNT_TOKENS: Codec(
            fields=anthropic.fields,
            parts=anthropic.parts,
            usage_of=anthropic.usage_of,
            error_of=anthropic.error_of,
        ),
    }
)
"""Routes without an entry are relayed unread."""
