"""Chat Completions, Completions and Embeddings as OpenAI writes them."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterator, Mapping
from itertools import chain, zip_longest
from typing import Any

import orjson

from gateway.emulator.answer import Answer, Choice
from gateway.emulator.ask import MAX_CHOICES, Ask, Prompt, Rejected, Tool
from gateway.emulator.prompt_cache import Counted

Frame = tuple[bytes, int]
"""One event as bytes, and the output tokens it carries."""

DONE = b"data: [DONE]\n\n"

_ROLES = ("system", "developer", "assistant", "user", "function", "tool")
_FINISH = {"stop": "stop", "sequence": "stop", "length": "length", "tools": "tool_calls"}
_IMAGE = {"low": 85, "high": 765, "auto": 765}
_AUDIO = 200
_FILE = 1_500


# --- fields, with OpenAI's words ----------------------------------------------------------------


def wrong_type(name: str, expected: str, value: object) -> Rejected:
    """The error for a field of the wrong type."""
    return Rejected(
        f"Invalid type for '{name}': expected {expected}, but got {_article(value)} instead.",
        param=name, code="invalid_type",
    )  # fmt: skip


def _article(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case list():
            return "an array"
        case _:
            return "an object"


def whole(body: Mapping[str, Any], name: str, *, least: int, most: int = 2**31) -> int | None:
    """An optional integer within bounds."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)
    if value < least:
        raise Rejected(
            f"Invalid '{name}': integer below minimum value. "
            f"Expected a value >= {least}, but got {value} instead.",
            param=name, code="integer_below_min_value",
        )  # fmt: skip
    if value > most:
        raise Rejected(
            f"Invalid '{name}': integer above maximum value. "
            f"Expected a value <= {most}, but got {value} instead.",
            param=name, code="integer_above_max_value",
        )  # fmt: skip
    return value


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """An optional boolean."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean", value)
    return value


def decimal(body: Mapping[str, Any], name: str, low: float, high: float) -> None:
    """An optional number within bounds; it changes nothing here."""
    value = body.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a decimal", value)
    if not low <= value <= high:
        side, code = (
            ("below minimum", "below_min") if value < low else ("above maximum", "above_max")
        )
        bound = f">= {low:g}" if value < low else f"<= {high:g}"
        raise Rejected(
            f"Invalid '{name}': decimal {side} value. "
            f"Expected a value {bound}, but got {value:g} instead.",
            param=name, code=f"decimal_{code}_value",
        )  # fmt: skip


def model_of(body: Mapping[str, Any]) -> str:
    """The model's name."""
    model = body.get("model")
    if model is None or model == "":
        raise Rejected("you must provide a model parameter")
    if not isinstance(model, str):
        raise wrong_type("model", "a string", model)
    if len(model) > 256 or not model.isprintable():
        raise Rejected("invalid model ID", param="model", code="invalid_value")
    return model


def required(body: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - any JSON value
    """A field that must be there."""
    if body.get(name) is None:
        raise Rejected(
            f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
        )
    return body[name]


def nonempty(value: object, name: str) -> list[Any]:
    """A list with at least one element."""
    if not isinstance(value, list):
        raise wrong_type(name, "an array of objects", value)
    if not value:
        raise Rejected(
            f"Invalid '{name}': empty array. Expected an array with minimum length 1, "
            "but got an empty array instead.",
            param=name, code="empty_array",
        )  # fmt: skip
    return value


def stops_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Stop sequences: a text or up to four."""
    value = body.get("stop")
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise wrong_type("stop", "a string or an array of strings", value)
    if len(items) > 4:
        raise Rejected(
            "Invalid 'stop': array too long. Expected an array with maximum length 4, "
            f"but got an array with length {len(items)} instead.",
            param="stop", code="array_above_max_length",
        )  # fmt: skip
    return tuple(item for item in items if item)


def stream_of(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether to stream, and whether to send usage at the end of the stream."""
    stream = flag(body, "stream")
    options = body.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, Mapping):
        raise wrong_type("stream_options", "an object", options)
    if not stream:
        raise Rejected(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )
    return stream, bool(options.get("include_usage"))


# --- Chat Completions ---------------------------------------------------------------------------


def parse_chat(body: Mapping[str, Any], prompt: Prompt) -> Ask:
    """The call of a Chat Completions body.

    Raises:
        Rejected: As the real one would.
    """
    model = model_of(body)
    messages = nonempty(required(body, "messages"), "messages")
    stream, include_usage = stream_of(body)
    decimal(body, "temperature", 0, 2)
    decimal(body, "top_p", 0, 1)
    tools = chat_tools(body.get("tools"), prompt)
    last_text = ""
    pending = False
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = _role(message, where)
        if role == "tool" and not pending:
            raise Rejected(
                "Invalid parameter: messages with role 'tool' must be a response to a preceeding "
                "message with 'tool_calls'.",
                param=f"{where}.role",
            )
        pending = bool(message.get("tool_calls")) or (role == "tool" and pending)
        text = _chat_content(message, role, where, prompt)
        if role == "user":
            last_text = text
        prompt.end(role)
    prompt.tokens += 3  # every reply is primed with <|start|>assistant<|message|>
    return Ask(
        model=model, prompt=prompt, stream=stream, include_usage=include_usage,
        cap=whole(body, "max_completion_tokens", least=1) or whole(body, "max_tokens", least=1),
        n=whole(body, "n", least=1, most=MAX_CHOICES) or 1,
        tools=tools, tool_choice=chat_tool_choice(body, tools),
        parallel=flag(body, "parallel_tool_calls", default=True),
        last_text=last_text, after_tool=messages[-1]["role"] in ("tool", "function"),
        schema=schema_of(body.get("response_format"), "response_format"),
        stops=stops_of(body), body=body,
    )  # fmt: skip


def _role(message: object, where: str) -> str:
    if not isinstance(message, Mapping):
        raise wrong_type(where, "an object", message)
    role = message.get("role")
    if role is None:
        raise Rejected(
            f"Missing required parameter: '{where}.role'.",
            param=f"{where}.role", code="missing_required_parameter",
        )  # fmt: skip
    if not isinstance(role, str) or role not in _ROLES:
        supported = ", ".join(f"'{name}'" for name in _ROLES)
        raise Rejected(
            f"Invalid value: '{str(role)[:40]}'. Supported values are: {supported}.",
            param=f"{where}.role", code="invalid_value",
        )  # fmt: skip
    return role


def _chat_content(message: Mapping[str, Any], role: str, where: str, prompt: Prompt) -> str:
    """Counts a message; returns its text where a user speaks."""
    content = message.get("content")
    if message.get("tool_calls") is not None:
        prompt.json(message["tool_calls"])
    elif content is None and not (role == "assistant" and message.get("function_call")):
        raise Rejected(
            f"Invalid value for 'content': expected a string, got null. ({where}.content)",
            param=f"{where}.content",
        )
    if isinstance(message.get("name"), str):
        prompt.text(message["name"])
    match content:
        case None:
            return ""
        case str():
            prompt.text(content)
            return content
        case list():
            return " ".join(
                _chat_part(part, f"{where}.content[{index}]", prompt)
                for index, part in enumerate(content)
            )
        case _:
            raise Rejected(
                f"Invalid type for '{where}.content': expected one of a string or array of "
                f"objects, but got {_article(content)} instead.",
                param=f"{where}.content", code="invalid_type",
            )  # fmt: skip


def _chat_part(part: object, where: str, prompt: Prompt) -> str:
    if not isinstance(part, Mapping):
        raise wrong_type(where, "an object", part)
    match part.get("type"):
        case "text" | "refusal" as kind:
            text = part.get(kind)
            if not isinstance(text, str):
                raise wrong_type(f"{where}.{kind}", "a string", text)
            prompt.text(text)
            return text
        case "image_url":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else image
            if not isinstance(url, str):
                raise wrong_type(f"{where}.image_url.url", "a string", url)
            detail = str(image.get("detail", "auto")) if isinstance(image, Mapping) else "auto"
            prompt.media(url, _IMAGE.get(detail, 765))
        case "input_audio":
            prompt.media(str(part.get("input_audio"))[:4096], _AUDIO)
        case "file":
            prompt.media(str(part.get("file"))[:4096], _FILE)
        case kind:
            supported = "'text', 'image_url', 'input_audio', 'refusal', and 'file'"
            raise Rejected(
                f"Invalid value: '{str(kind)[:40]}'. Supported values are: {supported}.",
                param=f"{where}.type", code="invalid_value",
            )  # fmt: skip
    return ""


def chat_tools(raw: object, prompt: Prompt) -> list[Tool]:
    """The tools of a Chat body; they are counted before the messages, as a prefix."""
    if raw is None:
        return []
    tools: list[Tool] = []
    for index, item in enumerate(nonempty(raw, "tools")):
        where = f"tools[{index}]"
        if not isinstance(item, Mapping):
            raise wrong_type(where, "an object", item)
        prompt.json(item)
        if item.get("type") not in ("function", "custom"):
            raise Rejected(
                f"Invalid value: '{str(item.get('type'))[:40]}'. "
                "Supported values are: 'function' and 'custom'.",
                param=f"{where}.type", code="invalid_value",
            )  # fmt: skip
        function = item.get("function")
        if item["type"] == "function":
            function = function if isinstance(function, Mapping) else {}
            name = function.get("name")
            if not isinstance(name, str) or not name:
                raise Rejected(
                    f"Missing required parameter: '{where}.function.name'.",
                    param=f"{where}.function.name", code="missing_required_parameter",
                )  # fmt: skip
            tools.append(Tool(name, function.get("parameters") or {}))
    prompt.end("tools")
    return tools


def chat_tool_choice(body: Mapping[str, Any], tools: list[Tool]) -> str:
    """`tool_choice` as a word or a tool's name."""
    choice = body.get("tool_choice")
    if choice is None:
        return "auto"
    if not tools:
        if choice == "none":
            return "none"
        raise Rejected(
            "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are "
            "specified.",
            param="tool_choice",
        )
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise Rejected(
                f"Invalid value: '{choice[:40]}'. "
                "Supported values are: 'none', 'auto', and 'required'.",
                param="tool_choice", code="invalid_value",
            )  # fmt: skip
        return choice
    if not isinstance(choice, Mapping):
        raise wrong_type("tool_choice", "one of a string or object", choice)
    if choice.get("type") == "allowed_tools":
        return "auto"
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in [tool.name for tool in tools]:
        raise Rejected(
            "Invalid value for 'tool_choice': the named function is not among 'tools'.",
            param="tool_choice",
        )
    return str(name)


def schema_of(shape: object, name: str) -> object:
    """The schema a JSON answer must fit; {} for any JSON; None for prose."""
    if shape is None:
        return None
    if not isinstance(shape, Mapping):
        raise wrong_type(name, "an object", shape)
    match shape.get("type"):
        case "text":
            return None
        case "json_object":
            return {}
        case "json_schema":
            inner = shape.get("json_schema", shape)
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if not isinstance(schema, Mapping):
                raise Rejected(
                    f"Missing required parameter: '{name}.json_schema.schema'.",
                    param=name, code="missing_required_parameter",
                )  # fmt: skip
            return schema
        case kind:
            raise Rejected(
                f"Invalid value: '{str(kind)[:40]}'. "
                "Supported values are: 'json_object', 'json_schema', and 'text'.",
                param=f"{name}.type", code="invalid_value",
            )  # fmt: skip


def chat_usage(counted: Counted) -> dict[str, Any]:
    """Usage as Chat Completions reports it: cached tokens are part of the prompt's."""
    return {
        "prompt_tokens": counted.prompt,
        "completion_tokens": counted.output,
        "total_tokens": counted.prompt + counted.output,
        "prompt_tokens_details": {"cached_tokens": counted.cache_read, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": counted.reasoning, "audio_tokens": 0,
            "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
        },
    }  # fmt: skip


def chat_body(ask: Ask, answer: Answer) -> dict[str, Any]:
    """The plain answer, without usage."""
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": answer.created,
        "model": ask.model,
        "choices": [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": None,
                "finish_reason": _FINISH[choice.finish],
            }
            for index, choice in enumerate(answer.choices)
        ],
        "service_tier": "default",
        "system_fingerprint": f"fp_{answer.id[:10]}",
    }


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if choice.calls else choice.text,
        "refusal": None,
        "annotations": [],
    }
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{call.id}",
                "type": "function",
                "function": {"name": call.tool.name, "arguments": call.arguments},
            }
            for call in choice.calls
        ]
    return message


def chat_frames(ask: Ask, answer: Answer, usage: bytes | None) -> Iterator[Frame]:
    """The stream. `usage` is the field's JSON, or None where the client did not ask for it."""
    head = (
        b'data: {"id":"chatcmpl-' + answer.id.encode() + b'","object":"chat.completion.chunk"'
        + b',"created":' + str(answer.created).encode() + b',"model":' + orjson.dumps(ask.model)
        + b',"service_tier":"default","system_fingerprint":"fp_' + answer.id[:10].encode()
        + b'","choices":['
    )  # fmt: skip
    tail = b',"usage":null}\n\n' if ask.include_usage else b"}\n\n"
    streams = [_choice_frames(head, tail, i, c) for i, c in enumerate(answer.choices)]
    if len(streams) == 1:
        yield from streams[0]
    else:
        # The real one interleaves its choices as they are sampled.
        yield from (frame for frame in chain.from_iterable(zip_longest(*streams)) if frame)
    if usage is not None:
        yield head + b'],"usage":' + usage + b"}\n\n", 0
    yield DONE, 0


def _choice_frames(head: bytes, tail: bytes, index: int, choice: Choice) -> Iterator[Frame]:
    opening = head + b'{"index":' + str(index).encode() + b',"delta":'
    closing = b',"logprobs":null,"finish_reason":null}]' + tail
    first = b'{"role":"assistant","content":' + (b"null" if choice.calls else b'""')
    yield opening + first + b',"refusal":null}' + closing, choice.reasoning
    for piece in choice.pieces:
        yield opening + b'{"content":' + orjson.dumps(piece) + b"}" + closing, 1
    produced = len(choice.pieces) + choice.reasoning
    for position, call in enumerate(choice.calls):
        fresh = {
            "index": position, "id": f"call_{call.id}", "type": "function",
            "function": {"name": call.tool.name, "arguments": ""},
        }  # fmt: skip
        yield opening + b'{"tool_calls":[' + orjson.dumps(fresh) + b"]}" + closing, 0
        lead = b'{"tool_calls":[{"index":' + str(position).encode() + b',"function":{"arguments":'
        for piece in call.pieces:
            yield opening + lead + orjson.dumps(piece) + b"}}]}" + closing, 1
        produced += len(call.pieces)
    finish = _FINISH[choice.finish].encode()
    # What the pieces do not hold (names of called tools) counts with the last event.
    rest = choice.tokens - produced
    yield opening + b'{},"logprobs":null,"finish_reason":"' + finish + b'"}]' + tail, rest


# --- Completions --------------------------------------------------------------------------------


def parse_completions(body: Mapping[str, Any], prompt: Prompt) -> Ask:
    """The call of a Completions body: a text, token ids, or a list of either.

    Raises:
        Rejected: As the real one would.
    """
    model = model_of(body)
    stream, include_usage = stream_of(body)
    decimal(body, "temperature", 0, 2)
    prompts = text_inputs(body.get("prompt", "<|endoftext|>"), "prompt", prompt)
    n = whole(body, "n", least=1, most=MAX_CHOICES) or 1
    best_of = whole(body, "best_of", least=1, most=20) or n
    if best_of < n:
        raise Rejected("You requested that the server return more choices than it will generate.")
    if prompts * n > MAX_CHOICES:
        raise Rejected(f"Too many choices: at most {MAX_CHOICES} prompts times n are served.")
    return Ask(
        model=model, prompt=prompt, stream=stream, include_usage=include_usage,
        cap=16 if body.get("max_tokens") is None else whole(body, "max_tokens", least=0),
        n=n * prompts, stops=stops_of(body), body=body,
    )  # fmt: skip


def text_inputs(value: object, name: str, prompt: Prompt) -> int:
    """Counts one or several texts or lists of token ids; returns how many there were."""
    if isinstance(value, str):
        prompt.text(value)
        prompt.end(name, overhead=0)
        return 1
    if not isinstance(value, list):
        raise wrong_type(name, "a string or an array", value)
    if not value:
        raise Rejected(f"Invalid '{name}': empty array.", param=name, code="empty_array")
    if _are_ids(value):
        prompt.ids(value)
        prompt.end(name, overhead=0)
        return 1
    for index, item in enumerate(value):
        if isinstance(item, str):
            prompt.text(item)
        elif isinstance(item, list) and item and _are_ids(item):
            prompt.ids(item)
        else:
            raise wrong_type(f"{name}[{index}]", "a string or an array of integers", item)
        prompt.end(name, overhead=0)
    return len(value)


def _are_ids(value: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def completions_body(ask: Ask, answer: Answer) -> dict[str, Any]:
    """The plain answer, without usage."""
    return {
        "id": f"cmpl-{answer.id}",
        "object": "text_completion",
        "created": answer.created,
        "model": ask.model,
        "choices": [
            {
                "text": choice.text, "index": index, "logprobs": None,
                "finish_reason": _FINISH[choice.finish],
            }
            for index, choice in enumerate(answer.choices)
        ],
        "system_fingerprint": f"fp_{answer.id[:10]}",
    }  # fmt: skip


def completions_frames(ask: Ask, answer: Answer, usage: bytes | None) -> Iterator[Frame]:
    """The stream of a Completions call."""
    head = (
        b'data: {"id":"cmpl-' + answer.id.encode() + b'","object":"text_completion","created":'
        + str(answer.created).encode() + b',"model":' + orjson.dumps(ask.model) + b',"choices":['
    )  # fmt: skip
    tail = b',"usage":null}\n\n' if ask.include_usage else b"}\n\n"
    for index, choice in enumerate(answer.choices):
        middle = b',"index":' + str(index).encode() + b',"logprobs":null,"finish_reason":'
        for piece in choice.pieces:
            yield head + b'{"text":' + orjson.dumps(piece) + middle + b"null}]" + tail, 1
        finish = b'"' + _FINISH[choice.finish].encode() + b'"}]'
        yield head + b'{"text":""' + middle + finish + tail, choice.tokens - len(choice.pieces)
    if usage is not None:
        yield head + b'],"usage":' + usage + b"}\n\n", 0
    yield DONE, 0


# --- Embeddings ---------------------------------------------------------------------------------

MAX_INPUTS = 2_048
_DIMENSIONS = {"text-embedding-3-large": 3_072}
# Eight magnitudes with a mean square of 1: each vector then has the length 1 whatever its signs
# are.
_MAGNITUDES = (0.2, 0.5, 0.7, 0.9, 1.0, 1.2, 1.3, 2.28**0.5)


class Embeddings:
    """Makes vectors: unit length, equal for equal text, nearly orthogonal otherwise."""

    __slots__ = ("_tables",)

    def __init__(self) -> None:
        self._tables: dict[int, list[bytes]] = {}

    def vector(self, text: str, dimensions: int) -> bytes:
        """The vector as little-endian 32-bit floats."""
        table = self._tables.get(dimensions)
        if table is None:
            if len(self._tables) >= 8:
                self._tables.clear()
            table = self._tables[dimensions] = _signs(dimensions)
        blocks = (dimensions + 7) // 8
        signs = hashlib.shake_128(text.encode("utf-8", "surrogatepass")).digest(blocks)
        return b"".join([table[byte] for byte in signs])[: 4 * dimensions]


def _signs(dimensions: int) -> list[bytes]:
    scaled = [magnitude * dimensions**-0.5 for magnitude in _MAGNITUDES]
    return [
        struct.pack("<8f", *(m if byte >> bit & 1 else -m for bit, m in enumerate(scaled)))
        for byte in range(256)
    ]


def parse_embeddings(body: Mapping[str, Any], prompt: Prompt) -> tuple[Ask, list[str], int, bool]:
    """The call, its inputs as texts, the dimensions and whether base64 is wanted.

    Raises:
        Rejected: As the real one would.
    """
    model = model_of(body)
    value = required(body, "input")
    if value == "" or (isinstance(value, list) and "" in value):
        raise Rejected("Invalid 'input': input cannot be an empty string.", param="input")
    if isinstance(value, list) and len(value) > MAX_INPUTS and not _are_ids(value):
        raise Rejected(
            f"Invalid 'input': array too long. Expected an array with maximum length {MAX_INPUTS}, "
            f"but got an array with length {len(value)} instead.",
            param="input", code="array_above_max_length",
        )  # fmt: skip
    count = text_inputs(value, "input", prompt)
    texts = [str(item) for item in value] if isinstance(value, list) and count > 1 else [str(value)]
    if isinstance(value, list) and count == 1 and not _are_ids(value):
        texts = [str(value[0])]
    encoding = body.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise Rejected(
            f"Invalid value: '{str(encoding)[:40]}'. Supported values are: 'float' and 'base64'.",
            param="encoding_format", code="invalid_value",
        )  # fmt: skip
    dimensions = whole(body, "dimensions", least=1, most=4_096) or _DIMENSIONS.get(model, 1_536)
    ask = Ask(model=model, prompt=prompt, cap=0, body=body)
    return ask, texts, dimensions, encoding == "base64"


def embeddings_body(ask: Ask, vectors: list[bytes], *, base64_wanted: bool) -> dict[str, Any]:
    """The answer, without usage."""
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector).decode()
                if base64_wanted
                else list(struct.unpack(f"<{len(vector) // 4}f", vector)),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": ask.model,
    }


def embeddings_usage(counted: Counted) -> dict[str, Any]:
    """Usage as Embeddings reports it."""
    return {"prompt_tokens": counted.prompt, "total_tokens": counted.prompt}
