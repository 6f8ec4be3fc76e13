"""Which model next, and why (`admission.md` §14): a pure choice among rungs.

A rung is skipped, its reason recorded, unless everything holds: context, capabilities, breaker,
time. Rungs are tried in policy order; the first choice is rung 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.units import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What the choice needs to know of a deployment.

    Attributes:
        id: Deployment id.
        dialects: Families it speaks ("openai", "anthropic").
        context_window, max_output: Tokens; 0 is unknown and never excludes.
        capabilities: What it can do.
        provider: For thinking signatures, which only their own provider accepts.
    """

    id: str
    dialects: frozenset[str]
    context_window: Tokens
    max_output: Tokens
    capabilities: frozenset[str]
    provider: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the request uses.

    Attributes:
        dialect: Family of the request.
        input: Counted input tokens.
        cap: Output cap, None where absent.
        needs: Capabilities used.
        thinking_of: Provider whose signed thinking blocks the request carries, or "".
    """

    dialect: str
    input: Tokens
    cap: Tokens | None
    needs: frozenset[str]
    thinking_of: str = ""


def unfit(rung: Rung, wanted: Wanted) -> str | None:
    """Why this rung cannot serve this request; None if it can.

    Unknown capabilities (an empty set) never exclude: policy that names none claims all.
    """
    if wanted.dialect not in rung.dialects:
        return f"{rung.id} does not speak the {wanted.dialect} dialect"
    room, needed = rung.context_window, wanted.input + (wanted.cap or 0)
    if room and needed > room:
        return f"{rung.id} has a context of {room} tokens, {needed} needed"
    missing = wanted.needs - rung.capabilities if rung.capabilities else frozenset()
    if missing:
        return f"{rung.id} lacks {', '.join(sorted(missing))}"
    if wanted.thinking_of and wanted.thinking_of != rung.provider:
        return f"{rung.id} cannot take signed thinking of {wanted.thinking_of}"
    return None
