"""What a call will cost, learned from what calls have cost (`admission.md` §6).

Output is predicted by an exponentially weighted *mean* per (model, agent class), never by a
quantile: the meter sums thousands of errors, which cancel, while quantiles add up. The p99 serves
only calls that name no cap where the provider reserves one. Input is what the tokenizer counted
times a learned bias per (model, has tools, has images). The cached share is learned per
conversation and starts at nothing.

Every map is bounded; beyond its bound the entry used longest ago is forgotten, which costs
precision, never safety: settlement corrects the meter.
"""

from __future__ import annotations

from collections import OrderedDict
from math import ceil
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.units import Tokens

ALPHA = 0.02
"""Weight of the newest sample once there are many; the first ones count more."""

MANY = 1 / ALPHA
"""So many: from there on the newest sample has that weight."""

FIRST_GUESS: Tokens = 500
"""Output of a model nothing is known of, if its cap is not below."""

LEAST_BIAS, MOST_BIAS = 0.5, 3.0
"""A tokenizer is not wrong by more; what is beyond is a broken report."""

CACHE_ALPHA = 0.5
"""A conversation is short: its cached share follows quickly."""

QUANTILE = 0.99

MAX_CLASSES = 10_000
MAX_CONVERSATIONS = 50_000

V = TypeVar("V")


class Remembered(Generic[V]):
    """A map of at most so many entries; the one used longest ago makes room."""

    __slots__ = ("_entries", "_make", "_most")

    def __init__(self, most: int, make: Callable[[], V]) -> None:
        self._entries: OrderedDict[object, V] = OrderedDict()
        self._most = most
        self._make = make

    def __len__(self) -> int:
        """Entries held."""
        return len(self._entries)

    def get(self, key: object) -> V | None:
        """The entry, now the one used last; None if there is none."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def made(self, key: object) -> V:
        """The entry, made if needed."""
        entries = self._entries
        entry = entries.get(key)
        if entry is not None:
            entries.move_to_end(key)
            return entry
        if len(entries) >= self._most:
            entries.popitem(last=False)
        entry = entries[key] = self._make()
        return entry


class Lengths:
    """Answer lengths of one class: mean, and p99 by stochastic approximation.

    Attributes:
        samples: How many were seen.
        mean: Exponentially weighted; 0.0 before the first.
        high: Moves up by 99 parts where a sample is above, down by 1 part where it is not.
    """

    __slots__ = ("high", "mean", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self.mean = 0.0
        self.high = 0.0

    def see(self, tokens: Tokens) -> None:
        """One more answer had that length."""
        samples = self.samples = self.samples + 1
        weight = 1 / samples if samples < MANY else ALPHA
        mean = self.mean = self.mean + weight * (tokens - self.mean)
        if samples == 1:
            self.high = 2.0 * tokens
            return
        pace = mean / 4 if mean > 4.0 else 1.0
        high = self.high + pace * (QUANTILE if tokens > self.high else QUANTILE - 1)
        self.high = high if high > mean else mean  # noqa: FURB136 - every call is seen twice


class OutputEstimator:
    """Output tokens by (model, agent class), then by model, then a first guess."""

    __slots__ = ("_classes", "_models")

    def __init__(self, most: int = MAX_CLASSES) -> None:
        self._classes: Remembered[Lengths] = Remembered(most, Lengths)
        self._models: Remembered[Lengths] = Remembered(most, Lengths)

    def predict(
        self, model: str, agent: str, *, cap: Tokens | None, most: Tokens | None = None
    ) -> Tokens:
        """Expected output, rounded up, never above the cap or the model's own, never negative."""
        lengths = self._classes.get((model, agent)) or self._models.get(model)
        expected = FIRST_GUESS if lengths is None else ceil(lengths.mean)
        if cap is not None and cap < expected:
            expected = max(0, cap)
        return expected if most is None or most > expected else max(0, most)

    def high(self, model: str, agent: str) -> Tokens | None:
        """The learned p99 of output, for calls that name no cap; None where nothing was learned."""
        lengths = self._classes.get((model, agent)) or self._models.get(model)
        return None if lengths is None else ceil(lengths.high)

    def learn(self, model: str, agent: str, tokens: Tokens) -> None:
        """An answer of that model to that class of agents had so many tokens."""
        if tokens < 0:
            return
        self._classes.made((model, agent)).see(tokens)
        self._models.made(model).see(tokens)


class _Bias:
    __slots__ = ("factor", "samples")

    def __init__(self) -> None:
        self.factor = 1.0
        self.samples = 0


class InputBias:
    """What the provider counts for one token of ours, by model, tools and images."""

    __slots__ = ("_factors",)

    def __init__(self, most: int = MAX_CLASSES) -> None:
        self._factors: Remembered[_Bias] = Remembered(most, _Bias)

    def factor(self, model: str, *, tools: bool, images: bool) -> float:
        """Between `LEAST_BIAS` and `MOST_BIAS`; 1.0 where nothing was learned."""
        bias = self._factors.get((model, tools, images))
        return 1.0 if bias is None else bias.factor

    def learn(
        self, model: str, *, counted: float, reported: Tokens, tools: bool, images: bool
    ) -> None:
        """The provider counted `reported` where our tokenizer counted `counted`, without bias.

        The first reports count in full, and what was expected by another bias counts by itself:
        of hundreds of calls that begin together, each would else correct what the others have
        corrected already.
        """
        if counted <= 0 or reported <= 0:
            return
        bias = self._factors.made((model, tools, images))
        bias.samples += 1
        target = reported / counted
        if target < LEAST_BIAS:
            target = LEAST_BIAS
        elif target > MOST_BIAS:
            target = MOST_BIAS
        weight = 1 / bias.samples if bias.samples < MANY else ALPHA
        bias.factor += weight * (target - bias.factor)


class CacheShare:
    """The share of a conversation's input that the provider reads from its cache."""

    __slots__ = ("_shares",)

    def __init__(self, most: int = MAX_CONVERSATIONS) -> None:
        self._shares: Remembered[list[float]] = Remembered(most, lambda: [0.0])

    def __len__(self) -> int:
        """Conversations remembered."""
        return len(self._shares)

    def predict(self, session: str, tokens: Tokens) -> Tokens:
        """Input tokens expected from the cache, rounded down; 0 for an unknown conversation."""
        share = self._shares.get(session)
        return 0 if share is None else int(share[0] * tokens)

    def learn(self, session: str, *, read: Tokens, of: Tokens) -> None:
        """`read` of `of` input tokens came from the cache."""
        if of > 0 and 0 <= read <= of:
            share = self._shares.made(session)
            share[0] += CACHE_ALPHA * (read / of - share[0])


class Learned:
    """The three together: the estimate layer asks them, settle teaches them."""

    __slots__ = ("bias", "cache", "outputs")

    def __init__(self) -> None:
        self.outputs = OutputEstimator()
        self.bias = InputBias()
        self.cache = CacheShare()
