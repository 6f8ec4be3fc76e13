"""GET /v1/models and /v1/models/{id}, answered here: what this identity may use.

In the shape of the family that asks: Anthropic's where `anthropic-version` was sent, else OpenAI's.
Patterns are not names and are not listed; a concrete name that a pattern accepts can be looked up.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import orjson

from gateway.call import Bytes, Call, Family, Reply
from gateway.errors import NoSuchRoute

if TYPE_CHECKING:
    from gateway.snapshot import Model

PREFIX = "/v1/models"
OWNER = "tidegate"


def visible(call: Call) -> list[Model]:
    """Models this identity may use in this dialect, in policy order."""
    principal = call.principal
    assert principal is not None  # noqa: S101 - identify ran
    globs = principal.rule.models
    return [
        model
        for name, model in call.snapshot.models.items()
        if any(fnmatchcase(name, glob) for glob in globs)
        and model.own(call.family.value) is not None
    ]


def openai_shape(model: Model) -> dict[str, Any]:
    """As OpenAI lists a model."""
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": OWNER}


def anthropic_shape(model: Model) -> dict[str, Any]:
    """As Anthropic lists a model."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": "1970-01-01T00:00:00Z",
    }


class Models:
    """The service."""

    __slots__ = ()

    async def __call__(self, call: Call) -> Reply:
        """The list, or one model.

        Raises:
            NoSuchRoute: No such model, or none this identity may use: the two are not told apart.
        """
        name = unquote(call.path[len(PREFIX) :].strip("/"))
        shape = anthropic_shape if call.family is Family.ANTHROPIC else openai_shape
        if name:
            body = shape(self._one(call, name))
        else:
            entries = [shape(model) for model in visible(call)]
            body = listed(entries, call.family)
        raw = orjson.dumps(body)
        return Reply(
            status=200,
            headers=[
                (b"content-type", b"application/json"),
                (b"content-length", str(len(raw)).encode()),
            ],
            source=Bytes(raw),
        )

    def _one(self, call: Call, name: str) -> Model:
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        if any(fnmatchcase(name, glob) for glob in principal.rule.models):
            model = call.snapshot.model(name)
            if model is not None and model.own(call.family.value) is not None:
                return model
        text = f"No model {name[:100]!r} is served to {principal.agent}."
        raise NoSuchRoute(text, code="model_not_found", param="model")


def listed(entries: list[dict[str, Any]], family: Family) -> dict[str, Any]:
    """The list as the family wraps it; one page holds everything."""
    if family is Family.ANTHROPIC:
        return {
            "data": entries,
            "has_more": False,
            "first_id": entries[0]["id"] if entries else None,
            "last_id": entries[-1]["id"] if entries else None,
        }
    return {"object": "list", "data": entries}
