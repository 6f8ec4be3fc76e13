"""The Responses API as OpenAI writes it: items in, items out, numbered events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from gateway.emulator.answer import Answer, Choice, ToolCall
from gateway.emulator.ask import Ask, Prompt, Rejected, Tool
from gateway.emulator.chat import (
    Frame,
    decimal,
    flag,
    model_of,
    nonempty,
    required,
    schema_of,
    whole,
    wrong_type,
)  # fmt: skip
from gateway.emulator.prompt_cache import Counted
from gateway.emulator.text import as_json

STORED = 1_000
"""Responses kept for retrieval and `previous_response_id`; the oldest goes first."""

_ECHOED = (
    "instructions", "metadata", "temperature", "top_p", "tool_choice", "tools", "max_output_tokens",
    "max_tool_calls", "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier",
    "service_tier", "text", "top_logprobs", "truncation", "user", "background",
)  # fmt: skip


def parse_responses(body: Mapping[str, Any], prompt: Prompt) -> Ask:
    """The call of a Responses body.

    Raises:
        Rejected: As the real one would.
    """
    model = model_of(body)
    stream = flag(body, "stream")
    decimal(body, "temperature", 0, 2)
    decimal(body, "top_p", 0, 1)
    tools = _tools(body.get("tools"), prompt)
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise wrong_type("instructions", "a string", instructions)
        prompt.text(instructions)
        prompt.end("instructions")
    value = required(body, "input")
    after_tool = False
    if isinstance(value, str):
        last_text = value
        prompt.text(value)
        prompt.end("user")
    else:
        last_text = ""
        for index, item in enumerate(nonempty(value, "input")):
            text = _item(item, f"input[{index}]", prompt)
            last_text = text if text is not None else last_text
        after_tool = str(value[-1].get("type", "")).endswith("_output")
    prompt.tokens += 3
    text_format = body.get("text")
    shape = text_format.get("format") if isinstance(text_format, Mapping) else None
    return Ask(
        model=model, prompt=prompt, stream=stream, include_usage=True,
        cap=whole(body, "max_output_tokens", least=16),
        tools=tools, tool_choice=_tool_choice(body.get("tool_choice"), tools),
        parallel=flag(body, "parallel_tool_calls", default=True),
        last_text=last_text, after_tool=after_tool,
        schema=schema_of(shape, "text.format"), body=body,
    )  # fmt: skip


def _tools(raw: object, prompt: Prompt) -> list[Tool]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise wrong_type("tools", "an array of objects", raw)
    tools: list[Tool] = []
    for index, item in enumerate(raw):
        if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
            raise wrong_type(f"tools[{index}]", "an object with a type", item)
        prompt.json(item)
        tools.extend(_functions(item, f"tools[{index}]", None))
    if raw:
        prompt.end("tools")
    return tools


def _functions(item: Mapping[str, Any], where: str, namespace: str | None) -> Iterator[Tool]:
    """The functions that can be called; Codex nests those of an MCP server under a namespace."""
    name = item.get("name")
    if item["type"] == "function":
        if not isinstance(name, str) or not name:
            raise Rejected(
                f"Missing required parameter: '{where}.name'.",
                param=f"{where}.name", code="missing_required_parameter",
            )  # fmt: skip
        yield Tool(name, item.get("parameters") or {}, namespace)
    elif item["type"] == "namespace" and isinstance(item.get("tools"), list):
        for index, inner in enumerate(item["tools"]):
            if isinstance(inner, Mapping) and inner.get("type") == "function":
                yield from _functions(inner, f"{where}.tools[{index}]", str(name))


def _tool_choice(choice: object, tools: list[Tool]) -> str:
    match choice:
        case None:
            return "auto"
        case "auto" | "none" | "required":
            return str(choice)
        case {"type": "function", "name": str(name)} if any(t.name == name for t in tools):
            return name
        case {"type": "function"}:
            raise Rejected(
                "Tool choice 'function' not found in 'tools' parameter.", param="tool_choice"
            )
        case {"type": str()}:
            return "auto"
        case _:
            raise Rejected(
                f"Invalid value: '{str(choice)[:40]}'. "
                "Supported values are: 'none', 'auto', and 'required'.",
                param="tool_choice", code="invalid_value",
            )  # fmt: skip


def _item(item: object, where: str, prompt: Prompt) -> str | None:
    """Counts an input item; returns the text where a user speaks."""
    if not isinstance(item, Mapping):
        raise wrong_type(where, "an object", item)
    kind = item.get("type", "message")
    if kind != "message":
        if not isinstance(kind, str):
            raise wrong_type(f"{where}.type", "a string", kind)
        for name in ("name", "arguments", "input", "output", "summary"):
            inner = item.get(name)
            if isinstance(inner, str):
                prompt.text(inner)
            elif inner is not None:
                prompt.json(inner)
        prompt.end(kind)
        return None
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise Rejected(
            f"Invalid value: '{str(role)[:40]}'. Supported values are: 'assistant', 'system', "
            "'developer', and 'user'.",
            param=f"{where}.role", code="invalid_value",
        )  # fmt: skip
    content = item.get("content")
    if isinstance(content, str):
        text = content
        prompt.text(content)
    elif isinstance(content, list):
        parts = [_part(p, f"{where}.content[{i}]", prompt) for i, p in enumerate(content)]
        text = " ".join(parts)
    else:
        raise wrong_type(f"{where}.content", "one of a string or array of objects", content)
    prompt.end(str(role))
    return text if role == "user" else None


def _part(part: object, where: str, prompt: Prompt) -> str:
    if not isinstance(part, Mapping):
        raise wrong_type(where, "an object", part)
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise wrong_type(f"{where}.text", "a string", text)
        prompt.text(text)
        return text
    if kind == "input_image":
        low = part.get("detail") == "low"
        prompt.media(str(part.get("image_url") or part.get("file_id")), 85 if low else 765)
    elif kind in ("input_file", "input_audio"):
        prompt.media(str(part.get("file_data") or part.get("file_id") or "")[:4096], 1_500)
    else:
        raise Rejected(
            f"Invalid value: '{str(kind)[:40]}'. Supported values are: 'input_text', "
            "'input_image', 'output_text', 'refusal', 'input_file', and 'input_audio'.",
            param=f"{where}.type", code="invalid_value",
        )  # fmt: skip
    return ""


def responses_usage(counted: Counted) -> dict[str, Any]:
    """Usage as Responses reports it."""
    return {
        "input_tokens": counted.prompt,
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": counted.cache_read},
        "output_tokens": counted.output,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning},
        "total_tokens": counted.prompt + counted.output,
    }


def _envelope(ask: Ask, answer: Answer, status: str) -> dict[str, Any]:
    body = ask.body
    envelope: dict[str, Any] = {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": ask.model,
        "output": [],
        "parallel_tool_calls": ask.parallel,
        "store": body.get("store") is not False,
        "usage": None,
    }
    for name in _ECHOED:
        envelope[name] = body.get(name)
    envelope["tools"] = body.get("tools") or []
    envelope["tool_choice"] = body.get("tool_choice") or "auto"
    envelope["metadata"] = body.get("metadata") or {}
    envelope["text"] = body.get("text") or {"format": {"type": "text"}}
    envelope["service_tier"] = "default"
    envelope["truncation"] = body.get("truncation") or "disabled"
    envelope["background"] = False
    return envelope


def _finished(ask: Ask, answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
    cut = answer.choices[0].finish == "length"
    envelope = _envelope(ask, answer, "incomplete" if cut else "completed")
    if cut:
        envelope["incomplete_details"] = {"reason": "max_output_tokens"}
    else:
        envelope["completed_at"] = answer.created
    envelope["output"] = output
    del envelope["usage"]
    return envelope


def _message_item(answer: Answer, choice: Choice, *, done: bool) -> dict[str, Any]:
    status = "in_progress" if not done else _status(choice)
    content = [_text_part(choice.text)] if done else []
    return {
        "id": f"msg_{answer.id}", "type": "message", "status": status, "content": content,
        "role": "assistant",
    }  # fmt: skip


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _call_item(call: ToolCall, choice: Choice, *, done: bool) -> dict[str, Any]:
    item = {
        "id": f"fc_{call.id}", "type": "function_call",
        "status": _status(choice) if done else "in_progress",
        "arguments": call.arguments if done else "", "call_id": f"call_{call.id}",
        "name": call.tool.name,
    }  # fmt: skip
    if call.tool.namespace is not None:
        item["namespace"] = call.tool.namespace
    return item


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish == "length" else "completed"


def _reasoning_item(answer: Answer) -> dict[str, Any]:
    return {"id": f"rs_{answer.id}", "type": "reasoning", "summary": []}


def responses_body(ask: Ask, answer: Answer) -> dict[str, Any]:
    """The plain answer, without usage."""
    choice = answer.choices[0]
    output = [_reasoning_item(answer)] if choice.reasoning else []
    if choice.calls:
        output += [_call_item(call, choice, done=True) for call in choice.calls]
    else:
        output.append(_message_item(answer, choice, done=True))
    return _finished(ask, answer, output)


class _Numbered:
    """Events carry their own number."""

    __slots__ = ("_number",)

    def __init__(self) -> None:
        self._number = 0

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        raw = as_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + raw + b"\n\n"

    def delta(self, kind: bytes, fields: bytes, piece: str) -> bytes:
        """A delta event: the fields that do not change are encoded once."""
        number = str(self._number).encode()
        self._number += 1
        return (
            b"event: " + kind + b'\ndata: {"type":"' + kind + b'","sequence_number":' + number
            + b"," + fields + b',"delta":' + orjson.dumps(piece) + b"}\n\n"
        )  # fmt: skip


def responses_frames(ask: Ask, answer: Answer, usage: bytes | None) -> Iterator[Frame]:
    """The stream. `usage` is the field's JSON, or None to leave it out."""
    choice = answer.choices[0]
    numbered = _Numbered()
    started = _envelope(ask, answer, "in_progress")
    yield numbered.event("response.created", {"response": started}), 0
    yield numbered.event("response.in_progress", {"response": started}), 0
    output: list[dict[str, Any]] = []
    if choice.reasoning:
        item = _reasoning_item(answer)
        output.append(item)
        place = {"output_index": 0, "item": item}
        yield numbered.event("response.output_item.added", place), 0
        yield numbered.event("response.output_item.done", place), choice.reasoning
    if choice.calls:
        for call in choice.calls:
            yield from _call_frames(numbered, call, choice, len(output))
            output.append(_call_item(call, choice, done=True))
    else:
        yield from _message_frames(numbered, answer, choice, len(output))
        output.append(_message_item(answer, choice, done=True))
    final = _finished(ask, answer, output)
    kind = f"response.{final['status']}"
    raw = numbered.event(kind, {"response": final})
    if usage is not None:
        # `usage` may be a lie of any shape, so it is put in as bytes: before the two closing
        # braces.
        raw = raw[:-4] + b',"usage":' + usage + b"}}\n\n"
    told = choice.reasoning + len(choice.pieces) + sum(len(call.pieces) for call in choice.calls)
    yield raw, choice.tokens - told


def _message_frames(
    numbered: _Numbered, answer: Answer, choice: Choice, index: int
) -> Iterator[Frame]:
    fresh = _message_item(answer, choice, done=False)
    yield numbered.event("response.output_item.added", {"output_index": index, "item": fresh}), 0
    where = {"item_id": fresh["id"], "output_index": index, "content_index": 0}
    yield numbered.event("response.content_part.added", {**where, "part": _text_part("")}), 0
    fields = orjson.dumps({**where, "logprobs": []})[1:-1]
    for piece in choice.pieces:
        yield numbered.delta(b"response.output_text.delta", fields, piece), 1
    text = choice.text
    yield numbered.event("response.output_text.done", {**where, "text": text, "logprobs": []}), 0
    yield numbered.event("response.content_part.done", {**where, "part": _text_part(text)}), 0
    item = _message_item(answer, choice, done=True)
    yield numbered.event("response.output_item.done", {"output_index": index, "item": item}), 0


def _call_frames(
    numbered: _Numbered, call: ToolCall, choice: Choice, index: int
) -> Iterator[Frame]:
    item = _call_item(call, choice, done=False)
    yield numbered.event("response.output_item.added", {"output_index": index, "item": item}), 0
    where = {"item_id": item["id"], "output_index": index}
    fields = orjson.dumps(where)[1:-1]
    for piece in call.pieces:
        yield numbered.delta(b"response.function_call_arguments.delta", fields, piece), 1
    done = {**where, "name": call.tool.name, "arguments": call.arguments}
    yield numbered.event("response.function_call_arguments.done", done), 0
    item = _call_item(call, choice, done=True)
    yield numbered.event("response.output_item.done", {"output_index": index, "item": item}), 0


class Stored:
    """Finished responses, for retrieval and for the length of what a next one continues."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[bytes, int]] = OrderedDict()

    def keep(self, name: str, body: bytes, tokens: int) -> None:
        """Remember it."""
        self._kept[name] = (body, tokens)
        if len(self._kept) > STORED:
            self._kept.popitem(last=False)

    def body(self, name: str) -> bytes | None:
        """The stored answer, or None."""
        kept = self._kept.get(name)
        return kept[0] if kept else None

    def forget(self, name: str) -> bool:
        """Whether it was there."""
        return self._kept.pop(name, None) is not None

    def continued(self, ask: Ask) -> None:
        """Adds the tokens of the response that this one continues.

        Raises:
            Rejected: There is no such response.
        """
        name = ask.body.get("previous_response_id")
        if name is None:
            return
        kept = self._kept.get(name) if isinstance(name, str) else None
        if kept is None:
            raise Rejected(
                f"Previous response with id '{str(name)[:80]}' not found.",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        ask.prompt.tokens += kept[1]
