"""What is known of each kind of provider, so that a policy need not say it. Pure data.

Every field can be overruled in the file. Sources: `admission.md` §2.1 and §2.2; where a provider
does not say how it meters, the meter is a sliding window charged as produced, which is safe on all
others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.admission.profiles import Accounting, Profile

if TYPE_CHECKING:
    from collections.abc import Mapping

OPENAI_REST: Final = (
    "/v1/audio/*",
    "/v1/images/*",
    "/v1/files",
    "/v1/files/*",
    "/v1/batches",
    "/v1/batches/*",
    "/v1/moderations",
    "/v1/uploads",
    "/v1/uploads/*",
    "/v1/vector_stores",
    "/v1/vector_stores/*",
)
"""The rest of OpenAI's own `/v1`: identity, request limits and budgets; bodies are not read."""

ANTHROPIC_REST: Final = (
    "/v1/files",
    "/v1/files/*",
    "/v1/messages/batches",
    "/v1/messages/batches/*",
    "/v1/skills",
    "/v1/skills/*",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Defaults of a kind of provider.

    Attributes:
        header: How its keys are sent.
        shape: Shape of its meters.
        headers: Family of its rate-limit headers.
        stream_options: Whether `stream_options.include_usage` may be added.
    """

    dialects: tuple[str, ...] = ("openai",)
    header: str = "bearer"
    accounting: Accounting = Accounting()
    shape: str = "unknown"
    headers: str = "openai"
    stream_options: bool = True
    idempotency: bool = False
    count_tokens: str = "local"
    passthrough: tuple[str, ...] = ()


_UPFRONT = Accounting(profile=Profile.UPFRONT_MAX)
_NO_METER = Accounting(profile=Profile.NONE)

KINDS: Final[Mapping[str, Kind]] = {
    "openai": Kind(accounting=_UPFRONT, shape="bucket", idempotency=True, passthrough=OPENAI_REST),
    "anthropic": Kind(
        dialects=("anthropic",),
        header="x-api-key",
        accounting=Accounting(profile=Profile.REALTIME, cached_input_counts=False),
        shape="bucket",
        headers="anthropic",
        count_tokens="relay",
        passthrough=ANTHROPIC_REST,
    ),
    "azure": Kind(header="api-key", accounting=_UPFRONT, shape="window_10s", headers="azure"),
    "bedrock": Kind(
        accounting=Accounting(profile=Profile.RESERVE_SETTLE), headers="none", stream_options=False
    ),
    "gemini": Kind(accounting=Accounting(profile=Profile.INPUT_ONLY), headers="none"),
    "vertex": Kind(accounting=_NO_METER, headers="none"),
    "groq": Kind(headers="groq"),
    "cerebras": Kind(accounting=_UPFRONT, headers="cerebras"),
    "vllm": Kind(accounting=_NO_METER, headers="none"),
    "other": Kind(headers="none", stream_options=False),
}
