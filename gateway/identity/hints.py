"""What a caller says about itself without proof: session, workflow, tier. Pure; never a right.

Values are bounded in length, and one that is too long or unprintable is replaced by its hash, so
that distinct names stay distinct. Only `tidegate-tier`, our own header, can be refused.
Source: RFC 9218, W3C Baggage; `protocols.md` §6.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING
from urllib.parse import unquote

from gateway.errors import MalformedCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.call import Fields, HeaderList
    from gateway.snapshot import Tier

MAX_HINT = 128
"""Characters of a session or workflow name; longer ones are replaced by their hash."""

MAX_BAGGAGE = 8192
"""Bytes of `baggage` that are read (W3C Baggage §3.3)."""


@dataclass(frozen=True, slots=True)
class Baggage:
    """Labels a caller attached (W3C Baggage); hints, never rights."""

    agent: str = ""
    tenant: str = ""
    workflow: str = ""


def baggage(headers: HeaderList) -> Baggage:
    """The members `agent.id`, `tenant.id` and `workflow.id`; "" where absent or unreadable."""
    found: dict[str, str] = {}
    left = MAX_BAGGAGE
    for name, value in headers:
        if name != b"baggage":
            continue
        for member in value[:left].decode("latin-1").split(","):
            key, equals, rest = member.partition("=")
            if equals:
                found.setdefault(key.strip(), unquote(rest.partition(";")[0].strip()))
        left -= len(value)
        if left <= 0:
            break
    return Baggage(
        hint(found.get("agent.id", "")),
        hint(found.get("tenant.id", "")),
        hint(found.get("workflow.id", "")),
    )


def hint(text: str) -> str:
    """The text, or its hash where it is too long or unprintable: distinct names stay distinct."""
    if len(text) <= MAX_HINT and text.isprintable():
        return text
    return "h-" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


SESSION_HEADERS = {
    b"x-claude-code-session-id": 0,
    b"session-id": 1,
    b"thread-id": 2,
    b"session_id": 3,
    b"mcp-session-id": 4,
}
"""Where clients name their session, the best first: Claude Code, Codex old and new, MCP."""


HINTS = frozenset({*SESSION_HEADERS, b"baggage", b"tidegate-tier", b"priority"})
"""Every header that is read here; most calls have none."""


def session_of(headers: HeaderList, fields: Fields | None = None) -> str:
    """The session a call belongs to, for fairness and loop rules; "" if nothing names one.

    A session from the credential (`Principal.session`) wins over this.
    """
    if not headers:
        return hint(fields.session) if fields is not None and fields.session else ""
    best, session = len(SESSION_HEADERS), ""
    for name, value in headers:
        rank = SESSION_HEADERS.get(name, best)
        if rank < best and value:
            best, session = rank, value.decode("latin-1")
    session = session or baggage(headers).workflow or (fields.session if fields else "")
    return hint(session)


def tier_wish(headers: HeaderList, tiers: Sequence[Tier] = ()) -> int | None:
    """The tier a caller asks for; None if it does not say. Policy caps it.

    `tidegate-tier` (a number or a tier's name) wins over `Priority` (RFC 9218), whose urgency 0 to
    2 is tier 1, 3 and 4 are 2, 5 to 7 are 3; a header without a readable urgency means its default,
    3.

    Raises:
        MalformedCall: `tidegate-tier` names no tier: a typo must not run as something else.
    """
    urgency: int | None = None
    for name, value in headers:
        if name == b"tidegate-tier":
            return _named_tier(value.decode("latin-1").strip().lower(), tiers)
        if name == b"priority":
            urgency = 3 if urgency is None else urgency
            for member in value.decode("latin-1").split(","):
                key, _, rest = member.partition("=")
                number = rest.partition(";")[0].strip()
                if key.strip() == "u" and number in "01234567" and len(number) == 1:
                    urgency = int(number)
    return None if urgency is None else (1, 1, 1, 2, 2, 3, 3, 3)[urgency]


def _named_tier(text: str, tiers: Sequence[Tier]) -> int:
    names = {tier.name.lower(): tier.number for tier in tiers} or DEFAULT_TIERS
    number = names.get(text, int(text) if text in ("1", "2", "3") else 0)
    if not number:
        raise MalformedCall(
            f"tidegate-tier: {hint(text)!r} is no tier; allowed: 1, 2, 3, {', '.join(names)}.",
            param="tidegate-tier",
        )
    return number


DEFAULT_TIERS = {"interactive": 1, "standard": 2, "batch": 3}
