"""Semantic breaker over fingerprints (`admission.md` §13.1): a pure fold over an agent's turns.

The law: every rule measures the stretch since the last user turn. A user turn always passes and
begins a new stretch; so does the operator's reset. The newest turn decides alone: who repeated a
call three times and then does something else passes, because a refusal cuts a call and never a
session. What comes in are hashes and sizes, never text.

A turn is what a model answered once (its words, its tool calls) and what the tools returned. Agents
send their history along, so a stretch can be folded from the request alone; a `Stretch` remembered
under the mark of its last turn spares the folding and knows what a client has cut off. Turns whose
tools are all declared as polling count as iterations only.

Two things are measured beyond a stretch, because a user turn says nothing of them: what a task
(a workflow, else a session) uses in all (`books.py`), and two agents of a workflow that answer each
other with the same two calls for ever (`alternation.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from gateway.units import MICRO, MINUTE, Micros, MicroUsd, Mode, RuleId, Tokens

TASK_IDLE: Micros = 1_440 * MINUTE
"""A task without a call for so long is forgotten, and what it has used."""

KEPT_CALLS = 18
"""Distinct calls, and distinct masked ones, counted per stretch; the oldest make room."""

SKETCH = 48
"""Hashes kept of a turn's shingles: exact up to so many, an estimate within 5 % or so beyond."""

MOST_PENDING = 4
"""Calls of one answer that are remembered until their results come, where only the provider keeps
the history."""

LONGEST_NAME = 24
"""Bytes of a pending call's name."""

SIZES_PPM = 800_000
"""Turns whose sizes differ by more cannot be alike; sketches are not even made."""

WARN_PPM = 800_000
"""Share of an amount (iterations, tokens, money) from which on the caller is warned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRules:
    """Semantic loop breaker (`admission.md` §13.1); 0 is no limit.

    Attributes:
        same_call, same_masked, alike_turns, ping_pong: The repetition that is refused; the one
            before it is warned of.
        alike_ppm: From here on two turns are alike.
        max_iterations: Calls allowed between two user turns.
        tokens_per_minute: Tokens read and written, by a bucket one minute deep.
        max_tokens, max_money: What a conversation may use before the user speaks again.
        task_tokens, task_money: What a task may use in all.
        polling_tools: fnmatch patterns of tools that may repeat.
        window: On the tool plane, calls count together within this time (`repeats.py`).
        meters: Whether any rule needs to know what calls of a conversation cost.
        meters_tasks: The same of calls of a task.
    """

    same_call: int = 4
    same_masked: int = 4
    alike_turns: int = 4
    alike_ppm: int = 850_000
    ping_pong: int = 4
    max_iterations: int = 0
    tokens_per_minute: Tokens = 0
    max_tokens: Tokens = 0
    max_money: MicroUsd = 0
    task_tokens: Tokens = 0
    task_money: MicroUsd = 0
    polling_tools: tuple[str, ...] = ()
    window: Micros = 2 * MINUTE
    mode: Mode = Mode.SHADOW
    because: RuleId = "loops"

    meters: bool = field(init=False, compare=False, repr=False)
    meters_tasks: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """What every call asks is answered once."""
        costs = bool(self.tokens_per_minute or self.max_tokens or self.max_money)
        object.__setattr__(self, "meters", costs)
        object.__setattr__(self, "meters_tasks", bool(self.task_tokens or self.task_money))


class Rule(StrEnum):
    """The rules, by their names in policy; in the order in which they are asked."""

    SAME_CALL = "same_call"
    SAME_MASKED = "same_masked"
    PING_PONG = "ping_pong"
    ALIKE_TURNS = "alike_turns"
    MAX_ITERATIONS = "max_iterations"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    MAX_TOKENS = "max_tokens"
    MAX_MONEY = "max_money"
    TASK_TOKENS = "task_tokens"
    TASK_MONEY = "task_money"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says of a call.

    Attributes:
        rule: Which one.
        refuse: Stage 2; False is stage 1, a warning.
        count: The repetition that was reached, or the amount used.
        limit: The rule's own figure.
        call: Which call of the newest turn repeats; -1 where none is meant.
    """

    rule: Rule
    refuse: bool
    count: int
    limit: int
    call: int = -1


class Half(StrEnum):
    """A turn has two: what was said (words and calls) and what came back."""

    SAID = "said"
    RETURNED = "returned"


Sketching: TypeAlias = Callable[[Half], bytes]
"""Makes the shingles of half a turn: at most `SKETCH` hashes, packed."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn in hashes. Never changed; not frozen, because that would double its cost.

    Attributes:
        calls: (exact, masked) of each call that may not repeat. `exact` is the tool's name with
            canonical arguments; `masked` the same but for numbers and dates, with the result; 0
            while there is none.
        kind: Hash of the tools' names.
        size: Characters in all.
        exempt: Nothing but polling tools.
        sketch: Makes the shingles; called only where sizes say that the turn may be alike.
    """

    calls: tuple[tuple[int, int], ...] = ()
    kind: int = 0
    size: int = 0
    exempt: bool = False
    sketch: Sketching


_STRETCH = struct.Struct("<BIQQIQQQI?BBHH")
_LAYOUT = 1
"""Of packed stretches; one that differs is another release's."""

WHOLE = 0xFFFF_FFFF_FFFF_FFFF


class Stretch:
    """What is known of the turns since the last user turn; at most 2 KiB.

    Attributes:
        session: Hash of the session's name, for the operator's reset; 0 without one.
        name: What the gateways of a fleet call the response that it ends with; 0 where nobody
            shares it.
        length: Messages of the request that it was last folded from.
        iterations: Turns.
        touched: Instant of its last call.
        pending: Packed calls whose results the next request brings; see `Pending`.
    """

    __slots__ = (
        "_alike", "_alternating", "_earlier", "_exact", "_kind", "_last", "_masked", "_returned",
        "_said", "_same", "_size", "iterations", "length", "name",
        "pending", "session", "touched",
    )  # fmt: skip

    def __init__(self, *, session: int = 0) -> None:
        self.session = session
        self.name = 0
        self.length = 0
        self.iterations = 0
        self.touched: Micros = 0
        self.pending = b""
        self.clear()

    def clear(self) -> None:
        """Nothing was repeated so far: the operator's reset."""
        self.iterations = 0
        self._exact = Counts()
        self._masked = Counts()
        self._last = self._earlier = 0
        self._alternating = 0
        self._kind = self._size = self._same = self._alike = 0
        self._said: bytes | None = None
        self._returned: bytes | None = None

    def copy(self) -> Stretch:
        """Another one that knows the same: what continues may be asked twice, or fork."""
        other = Stretch(session=self.session)
        for slot in self.__slots__:
            setattr(other, slot, getattr(self, slot))
        other._exact, other._masked = self._exact.copy(), self._masked.copy()
        return other

    def packed(self) -> bytes:
        """All that is known, in at most 1.1 KiB; for stretches of `turns.answered_turn`."""
        halves = self._said or b"", self._returned or b""
        sizes = self._exact.size, self._masked.size, len(halves[0]), len(halves[1])
        head = _STRETCH.pack(
            _LAYOUT, self.iterations, self._last, self._earlier, self._alternating, self._kind,
            self._size, self._same, self._alike, self._said is not None, *sizes,
        )  # fmt: skip
        return b"".join((head, *self._exact.parts(), *self._masked.parts(), *halves, self.pending))

    @classmethod
    def unpacked(cls, raw: bytes, *, session: int) -> Stretch | None:
        """What was packed, by this process or another; None for what another release wrote."""
        if len(raw) < _STRETCH.size or raw[0] != _LAYOUT:
            return None
        made = cls(session=session)
        (
            _, made.iterations, made._last, made._earlier, made._alternating, made._kind,
            made._size, made._same, made._alike, known, exact, masked, said, returned,
        ) = _STRETCH.unpack_from(raw)  # fmt: skip
        rest = raw[_STRETCH.size :]
        made._exact, rest = Counts.of(rest, exact)
        made._masked, rest = Counts.of(rest, masked)
        if known:
            made._said, made._returned = rest[:said], rest[said : said + returned]
        made.pending = rest[said + returned :]
        return made if len(made.pending) % _PENDING.size == 0 else None

    def fold(self, turn: Turn, *, previous: Sketching | None = None, rules: LoopRules) -> None:
        """The turn is counted.

        Args:
            turn: The one after those counted so far.
            previous: Makes the sketches of the turn before, where its text is at hand.
            rules: For how alike turns must be.
        """
        self.iterations += 1
        if turn.exempt:
            return
        for exact, masked in turn.calls:
            self._exact.add(exact)
            if masked:
                self._masked.add(masked)
        self._alternate(turn)
        self._compare(turn, previous, rules.alike_ppm)

    def _alternate(self, turn: Turn) -> None:
        """`_alternating`: how many of the last turns were A, B, A, B."""
        calls = turn.calls
        if len(calls) == 1:
            whole = calls[0][0]
        else:
            whole = hash(tuple(sorted([exact for exact, _ in calls]))) & WHOLE if calls else 0
        if not whole:
            self._alternating = 0
        elif whole == self._last:
            self._alternating = 1
        elif whole == self._earlier:
            self._alternating += 1
        else:
            self._alternating = 2 if self._last else 1
        self._earlier, self._last = self._last, whole

    def _compare(self, turn: Turn, previous: Sketching | None, alike_ppm: int) -> None:
        """`_alike`: how many of the last turns were each like the one before."""
        size, last = turn.size, self._size
        # The very same calls with the very same results need no sketch.
        same = 0
        if turn.calls and all(like for _, like in turn.calls):
            same = hash(turn.calls) & WHOLE  # of integers it is the same in every process
        alike = same != 0 and same == self._same
        if not alike:
            said = returned = None
            if turn.kind == self._kind and min(size, last) * MICRO > max(size, last) * SIZES_PPM:
                # Paging says nearly the same each time and gets something else: no loop. So what
                # came back is compared first, and mostly nothing else has to be.
                returned = turn.sketch(Half.RETURNED)
                before = self._before_of(Half.RETURNED, previous)
                if before is None or are_near(before, returned, alike_ppm):
                    said = turn.sketch(Half.SAID)
                    words = self._before_of(Half.SAID, previous)
                    alike = bool(before is not None and words is not None)
                    alike = alike and are_near(words or b"", said, alike_ppm)
            self._said, self._returned = said, returned
        self._alike = self._alike + 1 if alike else 1
        self._kind, self._size, self._same = turn.kind, size, same

    def _before_of(self, half: Half, previous: Sketching | None) -> bytes | None:
        """That half of the turn before; None where nobody knows it."""
        known = self._said if half is Half.SAID else self._returned
        return previous(half) if known is None and previous is not None else known

    def judge(self, newest: Turn, rules: LoopRules) -> Verdict | None:
        """What the rules say now that `newest` is the last turn; the hardest word wins."""
        found: Verdict | None = None
        # Nearly every call is the first of its kind: the numbers are asked before the rules.
        for at, (exact, masked) in enumerate(newest.calls):
            seen = self._exact[exact]
            if seen > 1:
                found = harder(found, repeated(Rule.SAME_CALL, seen, rules.same_call, at))
            seen = self._masked[masked] if masked else 0
            if seen > 1:
                found = harder(found, repeated(Rule.SAME_MASKED, seen, rules.same_masked, at))
        rounds, at = self._alternating // 2, 0 if newest.calls else -1
        if rounds > 1 and newest.calls:
            found = harder(found, repeated(Rule.PING_PONG, rounds, rules.ping_pong, at))
        if self._alike > 1 and not newest.exempt:
            found = harder(found, repeated(Rule.ALIKE_TURNS, self._alike, rules.alike_turns, at))
        calls, most = self.iterations + 1, rules.max_iterations
        if most and calls * MICRO >= most * WARN_PPM:
            found = harder(found, Verdict(Rule.MAX_ITERATIONS, calls > most, calls, most))
        return found


def repeated(rule: Rule, count: int, limit: int, call: int) -> Verdict | None:
    """The verdict on so many repetitions: the limit is refused, the one before is warned of."""
    if count < 2 or count < limit - 1:
        return None
    return Verdict(rule, count >= limit, count, limit, call)


def harder(one: Verdict | None, other: Verdict | None) -> Verdict | None:
    """The verdict that refuses, else the first that says anything."""
    if one is None or (other is not None and other.refuse and not one.refuse):
        return other
    return one


_KEY = struct.Struct("<Q")
MOST_COUNTED = 65_535


class Counts:
    """How often each fingerprint was seen, for the `KEPT_CALLS` seen last; ten bytes for each."""

    __slots__ = ("_counts", "_keys")

    def __init__(self) -> None:
        self._keys = bytearray()
        self._counts = bytearray()

    def copy(self) -> Counts:
        """The same counts, apart."""
        other = Counts()
        other._keys, other._counts = self._keys[:], self._counts[:]
        return other

    @property
    def size(self) -> int:
        """Distinct fingerprints."""
        return len(self._keys) // 8

    def parts(self) -> tuple[bytes, bytes]:
        """Fingerprints and counts, for another process."""
        return bytes(self._keys), bytes(self._counts)

    @classmethod
    def of(cls, raw: bytes, size: int) -> tuple[Counts, bytes]:
        """So many fingerprints with their counts, and what stands behind them."""
        made = cls()
        made._keys, made._counts = bytearray(raw[: size * 8]), bytearray(raw[size * 8 : size * 10])
        return made, raw[size * 10 :]

    def __getitem__(self, one: int) -> int:
        """How often it was seen; 0 if never, or not lately."""
        key = _KEY.pack(one)
        if key not in self._keys or (at := self._find(key)) < 0:
            return 0
        return self._counts[at * 2] | self._counts[at * 2 + 1] << 8

    def add(self, one: int) -> None:
        """Seen once more; it is the last one now."""
        key, count = _KEY.pack(one), 1
        at = self._find(key) if key in self._keys else -1
        if at >= 0:
            count += self[one]
        elif len(self._keys) == KEPT_CALLS * 8:
            at = 0
        if at >= 0:
            del self._keys[at * 8 : at * 8 + 8]
            del self._counts[at * 2 : at * 2 + 2]
        self._keys += key
        self._counts += min(MOST_COUNTED, count).to_bytes(2, "little")

    def _find(self, key: bytes) -> int:
        at = self._keys.find(key)
        while at % 8 and at > 0:  # across two keys by chance
            at = self._keys.find(key, at + 1)
        return at // 8 if at >= 0 else -1


_PENDING = struct.Struct(f"<QQQ?{LONGEST_NAME}s")


@dataclass(slots=True, kw_only=True)
class Pending:
    """A call whose result has not come: hashes and the beginning of its name.

    Attributes:
        id: Hash of the call's id.
        exact, masked: Fingerprints without the result.
        exempt: A polling tool.
        name: For the refusal.
    """

    id: int
    exact: int
    masked: int
    exempt: bool
    name: str


def packed(pending: list[Pending]) -> bytes:
    """The first `MOST_PENDING` of them in few bytes."""
    return b"".join(
        [
            _PENDING.pack(one.id, one.exact, one.masked, one.exempt, _cut(one.name))
            for one in pending[:MOST_PENDING]
        ]
    )


def _cut(name: str) -> bytes:
    return name.encode("utf-8", "replace")[:LONGEST_NAME]


def unpacked(pending: bytes) -> list[Pending]:
    """What was packed."""
    return [
        Pending(
            id=at,
            exact=exact,
            masked=masked,
            exempt=exempt,
            name=name.rstrip(b"\0").decode("utf-8", "ignore"),
        )
        for at, exact, masked, exempt, name in _PENDING.iter_unpack(pending)
    ]


def sketch_of(hashes: list[int]) -> bytes:
    """The `SKETCH` smallest of these 32-bit hashes: a sample that is the same for equal sets."""
    smallest = sorted(hashes)[:SKETCH]
    return struct.pack(f"<{len(smallest)}I", *smallest)


def are_near(one: bytes, other: bytes, alike_ppm: int) -> bool:
    """Whether two sketches are of sets so alike.

    Source: Broder 1997, bottom-k sketches of the Jaccard index.
    """
    if one == other:
        return True
    ours = set(struct.unpack(f"<{len(one) // 4}I", one))
    theirs = set(struct.unpack(f"<{len(other) // 4}I", other))
    shared = ours & theirs
    if len(shared) * MICRO < alike_ppm * max(len(ours), len(theirs)):
        return False  # the usual case, without sorting
    union = sorted(ours | theirs)[:SKETCH]
    return len(shared.intersection(union)) * MICRO >= alike_ppm * len(union)


def fullest(amounts: tuple[tuple[Rule, int, int], ...]) -> Verdict | None:
    """The verdict on (rule, used, limit): a limit reached refuses, most of one warns."""
    found: Verdict | None = None
    for rule, used, limit in amounts:
        if limit and used >= limit:
            return Verdict(rule, True, used, limit)  # noqa: FBT003
        if limit and used * MICRO >= limit * WARN_PPM:
            found = found or Verdict(rule, False, used, limit)  # noqa: FBT003
    return found
