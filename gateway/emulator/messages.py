"""Messages and count_tokens as Anthropic writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from gateway.emulator.answer import Answer, Choice
from gateway.emulator.ask import Ask, Prompt, Rejected, Tool
from gateway.emulator.chat import Frame
from gateway.emulator.prompt_cache import Counted
from gateway.emulator.text import as_json

_FINISH = {
    "stop": "end_turn", "sequence": "stop_sequence", "length": "max_tokens", "tools": "tool_use",
}  # fmt: skip
_IMAGE = 1_600
_DOCUMENT = 2_000
_MIN_THINKING = 1_024
_PARTIAL = (b"input_json_delta", b"partial_json")


def _bad(where: str, message: str) -> Rejected:
    return Rejected(f"{where}: {message}")


def parse_messages(body: Mapping[str, Any], prompt: Prompt, *, counting: bool = False) -> Ask:
    """The call of a Messages body; `counting` is `count_tokens`, which needs no cap.

    Raises:
        Rejected: As the real one would.
    """
    model = _text(body, "model")
    if not model:
        raise _bad("model", "String should have at least 1 character")
    cap = None if counting and "max_tokens" not in body else _cap(body)
    messages = _list(body, "messages")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _bad("stream", "Input should be a valid boolean")
    _fraction(body, "temperature")
    tools = _tools(body.get("tools"), prompt)
    _system(body.get("system"), prompt)
    last_text = ""
    after_tool = False
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping):
            raise _bad(where, "Input should be a valid dictionary")
        if role not in ("user", "assistant", "system"):
            raise _bad(f"{where}.role", "Input should be 'user' or 'assistant'")
        text, after_tool = _content(message.get("content"), f"{where}.content", role, prompt)
        if role == "user":
            last_text = text
    if body.get("cache_control") is not None and prompt.prefixes:
        prompt.breakpoints.append(len(prompt.prefixes) - 1)
    choice, parallel = _tool_choice(body.get("tool_choice"), tools)
    return Ask(
        model=model, prompt=prompt, stream=bool(stream), include_usage=True, cap=cap,
        tools=tools, tool_choice=choice, parallel=parallel, last_text=last_text,
        after_tool=after_tool, stops=_stops(body.get("stop_sequences")),
        thinking=_thinking(body.get("thinking"), cap), explicit_cache=True, body=body,
    )  # fmt: skip


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        raise _bad(name, "Field required")
    if not isinstance(value, list):
        raise _bad(name, "Input should be a valid list")
    if not value:
        raise _bad(name, "at least one message is required")
    return value


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        raise _bad(name, "Field required")
    if not isinstance(value, str):
        raise _bad(name, "Input should be a valid string")
    if len(value) > 256 or not value.isprintable():
        raise _bad(name, "String should have at most 256 characters")
    return value


def _cap(body: Mapping[str, Any]) -> int:
    cap = body.get("max_tokens")
    if cap is None:
        raise _bad("max_tokens", "Field required")
    if isinstance(cap, bool) or not isinstance(cap, int):
        raise _bad("max_tokens", "Input should be a valid integer")
    if cap < 1:
        raise _bad("max_tokens", "must be greater than or equal to 1")
    return cap


def _fraction(body: Mapping[str, Any], name: str) -> None:
    value = body.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(name, "Input should be a valid number")
    if not 0 <= value <= 1:
        raise _bad(name, "range: 0..1")


def _tools(raw: object, prompt: Prompt) -> list[Tool]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise _bad("tools", "Input should be a valid list")
    tools: list[Tool] = []
    for index, item in enumerate(raw):
        if not isinstance(item, Mapping):
            raise _bad(f"tools.{index}", "Input should be a valid dictionary")
        name = item.get("name")
        if not isinstance(name, str) or not name:
            raise _bad(f"tools.{index}.name", "Field required")
        prompt.json({key: value for key, value in item.items() if key != "cache_control"})
        prompt.end("tool", overhead=0, mark=item.get("cache_control") is not None)
        # A server tool ("web_search_20250305") has a type and no schema; it is never called here.
        if item.get("type") in (None, "custom"):
            schema = item.get("input_schema")
            if not isinstance(schema, Mapping):
                raise _bad(f"tools.{index}.custom.input_schema", "Field required")
            tools.append(Tool(name, schema))
    return tools


def _system(system: object, prompt: Prompt) -> None:
    match system:
        case None:
            return
        case str():
            prompt.text(system)
            prompt.end("system", overhead=0)
        case list():
            for index, block in enumerate(system):
                text = block.get("text") if isinstance(block, Mapping) else None
                if not isinstance(text, str):
                    raise _bad(f"system.{index}.text", "Field required")
                prompt.text(text)
                prompt.end("system", overhead=0, mark=block.get("cache_control") is not None)
        case _:
            raise _bad("system", "Input should be a valid string or list")


def _content(content: object, where: str, role: str, prompt: Prompt) -> tuple[str, bool]:
    """Counts a message; returns its text and whether it ends with a tool's result."""
    if isinstance(content, str):
        prompt.text(content)
        prompt.end(role)
        return content, False
    if content is None:
        raise _bad(where, "Field required")
    if not isinstance(content, list):
        raise _bad(where, "Input should be a valid string or list")
    texts: list[str] = []
    kind = ""
    for index, block in enumerate(content):
        at = f"{where}.{index}"
        if not isinstance(block, Mapping):
            raise _bad(at, "Input should be a valid dictionary")
        if not isinstance(block.get("type"), str):
            raise _bad(f"{at}.type", "Field required")
        kind = block["type"]
        texts.append(_block(block, at, prompt))
        prompt.end(
            f"{role}/{kind}",
            overhead=0 if index else 3,
            mark=block.get("cache_control") is not None,
        )
    if not content:
        prompt.end(role)
    return " ".join(texts), kind == "tool_result"


def _block(block: Mapping[str, Any], where: str, prompt: Prompt) -> str:
    match block["type"]:
        case "text":
            text = block.get("text")
            if not isinstance(text, str):
                raise _bad(f"{where}.text.text", "Field required")
            prompt.text(text)
            return text
        case "image" | "document":
            _media(block, where, prompt)
        case "tool_use":
            if not isinstance(block.get("name"), str):
                raise _bad(f"{where}.tool_use.name", "Field required")
            prompt.text(block["name"])
            prompt.json(block.get("input"))
        case "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise _bad(f"{where}.tool_result.tool_use_id", "Field required")
            _result(block.get("content"), f"{where}.tool_result.content", prompt)
        case "thinking":
            # The thinking of earlier turns is not read again.
            if not isinstance(block.get("signature"), str):
                raise _bad(f"{where}.thinking.signature", "Field required")
        case _:
            prompt.json({key: value for key, value in block.items() if key != "cache_control"})
    return ""


def _media(block: Mapping[str, Any], where: str, prompt: Prompt) -> None:
    source = block.get("source")
    if not isinstance(source, Mapping):
        raise _bad(f"{where}.{block['type']}.source", "Field required")
    payload = source.get("data") or source.get("url") or source.get("file_id") or ""
    prompt.media(str(payload), _IMAGE if block["type"] == "image" else _DOCUMENT)


def _result(content: object, where: str, prompt: Prompt) -> None:
    match content:
        case None:
            return
        case str():
            prompt.text(content)
        case list():
            for index, block in enumerate(content):
                if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
                    raise _bad(f"{where}.{index}", "Input should be a valid dictionary")
                _block(block, f"{where}.{index}", prompt)
        case _:
            raise _bad(where, "Input should be a valid string or list")


def _tool_choice(choice: object, tools: list[Tool]) -> tuple[str, bool]:
    if choice is None:
        return "auto", True
    if not isinstance(choice, Mapping):
        raise _bad("tool_choice", "Input should be a valid dictionary")
    parallel = choice.get("disable_parallel_tool_use") is not True
    match choice.get("type"):
        case "auto":
            return "auto", parallel
        case "none":
            return "none", parallel
        case "any":
            return "required", parallel
        case "tool":
            name = choice.get("name")
            if name not in [tool.name for tool in tools]:
                raise _bad("tool_choice", f"Tool '{str(name)[:64]}' not found in provided tools")
            return str(name), parallel
        case _:
            raise _bad("tool_choice.type", "Input should be 'auto', 'any', 'tool' or 'none'")


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _bad("stop_sequences", "Input should be a valid list of strings")
    return tuple(item for item in value if item)


def _thinking(value: object, cap: int | None) -> int:
    if value is None:
        return 0
    if not isinstance(value, Mapping):
        raise _bad("thinking", "Input should be a valid dictionary")
    match value.get("type"):
        case "disabled":
            return 0
        case "adaptive":
            return _MIN_THINKING
        case "enabled":
            budget = value.get("budget_tokens")
            if isinstance(budget, bool) or not isinstance(budget, int):
                raise _bad("thinking.enabled.budget_tokens", "Field required")
            if budget < _MIN_THINKING:
                raise _bad(
                    "thinking.enabled.budget_tokens",
                    "Input should be greater than or equal to 1024",
                )
            if cap is not None and budget >= cap:
                raise Rejected("`max_tokens` must be greater than `thinking.budget_tokens`.")
            return budget
        case _:
            raise _bad("thinking", "Input tag should be 'enabled', 'disabled' or 'adaptive'")


# --- writing ------------------------------------------------------------------------------------


def messages_usage(counted: Counted) -> dict[str, Any]:
    """Usage as Messages reports it: fresh input, cache reads and cache writes apart."""
    return {
        "input_tokens": counted.input,
        "cache_creation_input_tokens": counted.cache_write,
        "cache_read_input_tokens": counted.cache_read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": counted.cache_write, "ephemeral_1h_input_tokens": 0,
        },
        "output_tokens": counted.output,
        "service_tier": "standard",
    }  # fmt: skip


def _envelope(ask: Ask, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def messages_body(ask: Ask, answer: Answer) -> dict[str, Any]:
    """The plain answer, without usage."""
    choice = answer.choices[0]
    envelope = _envelope(ask, answer)
    content: list[dict[str, Any]] = []
    if choice.thinking:
        thinking = "".join(choice.thinking)
        content.append({"type": "thinking", "thinking": thinking, "signature": _signature(answer)})
    if choice.pieces or not (choice.calls or choice.thinking):
        content.append({"type": "text", "text": choice.text})
    content += [
        {
            "type": "tool_use", "id": f"toolu_{call.id}", "name": call.tool.name,
            "input": _input(call.arguments),
        }
        for call in choice.calls
    ]  # fmt: skip
    envelope["content"] = content
    envelope["stop_reason"] = _FINISH[choice.finish]
    envelope["stop_sequence"] = choice.sequence
    return envelope


def _input(arguments: str) -> object:
    try:
        return orjson.loads(arguments)
    except ValueError:
        return {}  # cut by the cap


def _signature(answer: Answer) -> str:
    return hashlib.shake_128(answer.id[:16].encode()).hexdigest(48)


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    raw = as_json({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + raw + b"\n\n"


def _with_usage(raw: bytes, usage: bytes | None, closing: bytes) -> bytes:
    """The event with `usage`, which may be a lie of any shape, put in before its closing braces."""
    if usage is None:
        return raw
    cut = len(closing) + 2
    return raw[:-cut] + b',"usage":' + usage + closing + b"\n\n"


def messages_frames(
    ask: Ask, answer: Answer, last: bytes | None, first: bytes | None
) -> Iterator[Frame]:
    """The stream: `first` is the usage of `message_start`, `last` that of `message_delta`."""
    choice = answer.choices[0]
    started = _event("message_start", {"message": _envelope(ask, answer)})
    yield _with_usage(started, first, b"}}"), 0
    index = 0
    if choice.thinking:
        start = {"type": "thinking", "thinking": "", "signature": ""}
        sealed = {"type": "signature_delta", "signature": _signature(answer)}
        yield _event("content_block_start", {"index": index, "content_block": start}), 0
        yield from _deltas(index, b"thinking_delta", b"thinking", choice.thinking)
        yield _event("content_block_delta", {"index": index, "delta": sealed}), 0
        yield _event("content_block_stop", {"index": index}), 0
        index += 1
    if choice.pieces or not (choice.calls or choice.thinking):
        start = {"type": "text", "text": ""}
        yield _event("content_block_start", {"index": index, "content_block": start}), 0
        yield b'event: ping\ndata: {"type":"ping"}\n\n', 0
        yield from _deltas(index, b"text_delta", b"text", choice.pieces)
        yield _event("content_block_stop", {"index": index}), 0
        index += 1
    yield from _calls(choice, index)
    stopped = {"stop_reason": _FINISH[choice.finish], "stop_sequence": choice.sequence}
    told = len(choice.thinking) + len(choice.pieces) + sum(len(c.pieces) for c in choice.calls)
    ending = _event("message_delta", {"delta": stopped})
    yield _with_usage(ending, last, b"}"), choice.tokens - told
    yield b'event: message_stop\ndata: {"type":"message_stop"}\n\n', 0


def _deltas(index: int, kind: bytes, name: bytes, pieces: tuple[str, ...]) -> Iterator[Frame]:
    head = (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
        + str(index).encode() + b',"delta":{"type":"' + kind + b'","' + name + b'":'
    )  # fmt: skip
    for piece in pieces:
        yield head + orjson.dumps(piece) + b"}}\n\n", 1


def _calls(choice: Choice, index: int) -> Iterator[Frame]:
    for position, call in enumerate(choice.calls, index):
        start = {"type": "tool_use", "id": f"toolu_{call.id}", "name": call.tool.name, "input": {}}
        yield _event("content_block_start", {"index": position, "content_block": start}), 0
        # The real one opens with an empty delta, which carries no token.
        yield from ((raw, 0) for raw, _ in _deltas(position, *_PARTIAL, ("",)))
        yield from _deltas(position, *_PARTIAL, call.pieces)
        yield _event("content_block_stop", {"index": position}), 0
