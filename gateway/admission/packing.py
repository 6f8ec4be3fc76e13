"""What goes to the pool's script and what comes back, as bytes. Pure; `admit.lua` reads the same.

Numbers are little-endian doubles, exact for integers below 2^53: no text, so nothing is lost and
the server need not parse. Strings carry their length before them. Layout and meaning change only
together with `LAYOUT` here and in the script.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from struct import Struct, pack, unpack_from
from typing import TYPE_CHECKING, NamedTuple

from gateway.admission.values import (
    LANES,
    Admit,
    Adopt,
    Ask,
    Caller,
    Late,
    Never,
    Outcome,
    Reply,
    Settle,
    Shed,
    Verdict,
    meter_of,
)
from gateway.units import valueclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.admission.values import PoolSpec
    from gateway.units import Micros

OK, NEEDS_RULES, NEWER_LAYOUT = 0, 1, 2
"""First byte of an answer."""

MOST = 1 << 53
"""Doubles hold every integer below it."""

LONGEST_TEXT = 65_535

_HEAD = Struct("<ddddBd16s")
_COUNTS = Struct("<BHHHHHH")
_ANSWER = Struct("<BdddddBdBB")
_STANDING = Struct("<BB")
_ASKED = Struct("<BBdBd")
_GRANTED = Struct("<BH")
_SIZES = [pack("<H", size) for size in range(256)]
_NOBODY = (0.0,) * (2 * LANES)
_NO_TEXT, _NO_TEXTS = b"\0" * 2, b"\0" * 4
_MODES = {"enforce": 0, "shadow": 1, "off": 2}
_CALENDARS = {"": 0, "day": 1, "month": 2}
_OUTCOMES = {Outcome.SERVED: 0, Outcome.QUOTA: 1, Outcome.RAMP: 2, Outcome.FAILED: 3}


class Rules(NamedTuple):
    """A pool's compiled rules as the script keeps them.

    Attributes:
        revision: The highest wins, fleet-wide.
        digest: Of the body: equal rules of two processes are equal here.
        body: What the script reads.
    """

    revision: int
    digest: bytes
    body: bytes


@valueclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Everything that one tick carries; see `PoolCore.tick`."""

    caller: Caller
    signals: Sequence[tuple[int, ...]] = ()
    settles: Sequence[Settle] = ()
    cancels: Sequence[str] = ()
    lates: Sequence[str] = ()
    adopts: Sequence[Adopt] = ()
    acquires: Sequence[Ask] = ()
    cold: bool = True

    def __len__(self) -> int:
        """Items carried."""
        return (
            len(self.signals) + len(self.settles) + len(self.cancels) + len(self.lates)
            + len(self.adopts) + len(self.acquires)
        )  # fmt: skip


@valueclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The pool's numbers as of a reply, for status and headers."""

    in_flight: int
    factor_ppm: int
    blocked_until: Micros
    would_have_waited: int
    waiting: tuple[int, ...]
    backlog: tuple[Micros, ...]
    level: tuple[int, ...]
    used: tuple[int, ...]
    foreign: tuple[int, ...]


@valueclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply with what only the shared pool has to say.

    Attributes:
        status: `OK`, or `NEEDS_RULES` (nothing was done: send the rules along), or `NEWER_LAYOUT`
            (nothing was done: another release owns this pool).
        reply: As of the core.
        standing: The numbers of the pool.
        conflict: Our revision is in force with other rules than ours.
        rules: The rules in force, where they are not ours.
        letters: Events of `reply` that came by mail, at its end.
    """

    status: int
    reply: Reply | None = None
    standing: Standing | None = None
    conflict: bool = False
    rules: Rules | None = None
    letters: int = 0


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    size = len(raw)
    if size > LONGEST_TEXT:
        raise ValueError(f"a text of {size} bytes does not fit a pool's record")
    return _SIZES[size] + raw if size < 256 else pack("<H", size) + raw


@lru_cache(maxsize=64)
def _doubles(count: int) -> Struct:
    return Struct(f"<{count}d")


@lru_cache(maxsize=64)
def _settled(count: int) -> Struct:
    return Struct(f"<BdB{count}d")


@lru_cache(maxsize=64)
def _admitted(count: int) -> Struct:
    """Tag, wait and meter of a grant."""
    return Struct(f"<ddB{count}d")


@lru_cache(maxsize=1024)
def _name(name: str) -> bytes:
    """Of a tenant or a gateway: there are few."""
    return _text(name)


def _vector(values: Sequence[int]) -> bytes:
    return _doubles(len(values)).pack(*values)


def pack_rules(spec: PoolSpec, revision: int | None = None) -> Rules:
    """The rules of a pool, ready to be sent with any batch.

    Raises:
        ValueError: More than 255 dimensions, or a number beyond 2^53.
    """
    dims = spec.dimensions
    if len(dims) > 255:
        raise ValueError(f"pool {spec.name!r} has {len(dims)} dimensions, at most 255 are allowed")
    numbers = [
        spec.concurrency, spec.spread, spec.pace_ppm, spec.lease, spec.dead, spec.max_grants,
        spec.max_waiting, int(spec.queue), _MODES[spec.mode.value], shape_of(spec),
    ]  # fmt: skip
    for dim in dims:
        numbers += [dim.limit, dim.window, *dim.depth, *dim.cap, _CALENDARS[dim.calendar]]
        numbers.append(dim.calendar_offset)
    if max(map(abs, numbers)) >= MOST:
        raise ValueError(f"pool {spec.name!r} has a limit beyond 2^53 micro-units")
    texts = [spec.because, spec.concurrency_because]
    for dim in dims:
        texts += [dim.name, dim.because]
    body = bytes([len(dims)]) + _vector(numbers) + b"".join(map(_text, texts))
    digest = blake2b(body, digest_size=16).digest()
    return Rules(spec.revision if revision is None else revision, digest, body)


def shape_of(spec: PoolSpec) -> int:
    """A number that is the same for lists of dimensions that meter the same, in the same order."""
    meters = repr([meter_of(dim) for dim in spec.dimensions]).encode()
    return int.from_bytes(blake2b(meters, digest_size=6).digest(), "big")


def pack_batch(batch: Batch, rules: Rules, *, now: Micros = 0) -> bytes:
    """The batch as the script's first argument.

    Args:
        batch: What to do.
        rules: Of the caller; vectors follow their dimensions.
        now: 0 for the server's own clock; tests bring theirs.
    """
    caller = batch.caller
    parts = [
        _HEAD.pack(
            now, caller.seen_epoch, caller.seen_version, caller.mail_ack, batch.cold,
            rules.revision, rules.digest,
        ),
        _name(caller.gateway),
        _COUNTS.pack(
            rules.body[0], len(batch.signals), len(batch.settles), len(batch.cancels),
            len(batch.lates), len(batch.adopts), len(batch.acquires),
        ),
    ]  # fmt: skip
    if batch.signals:
        parts += map(_vector, batch.signals)
    for rid, outcome, actual, retry_after in batch.settles:
        count = len(actual) if actual is not None else 0
        numbers = _settled(count).pack(_OUTCOMES[outcome], retry_after, count, *(actual or ()))
        parts += (_text(rid), numbers)
    if batch.cancels or batch.lates:
        parts += map(_text, batch.cancels)
        parts += map(_text, batch.lates)
    for lease in batch.adopts:
        has = lease.cost is not None
        parts.append(_text(lease.rid) + pack("<BBBB", has, lease.charge, lease.lane, lease.weight))
        parts.append(_text(lease.tenant) + _vector(lease.cost or ()))
    for ask in _by_lane(batch.acquires):
        tag, key = ask.tag, ask.place_key
        flags = (tag is not None) + 2 * (key is not None) + 4 * ask.ticket
        cost = ask.cost
        parts += (
            _text(ask.rid), _ASKED.pack(ask.lane, ask.weight, ask.deadline_in, flags, tag or 0),
            _name(ask.tenant), _text(key) if key else _NO_TEXT, _doubles(len(cost)).pack(*cost),
        )  # fmt: skip
    return b"".join(parts)


def _by_lane(asks: Sequence[Ask]) -> Sequence[Ask]:
    """Most urgent lane first, else as they came: the script takes them one after the other."""
    return sorted(asks, key=_lane) if len(asks) > 1 else asks


_lane = attrgetter("lane")


class _Reader:
    """Takes values off the front of an answer."""

    __slots__ = ("at", "raw")

    def __init__(self, raw: bytes, at: int = 0) -> None:
        self.raw = raw
        self.at = at

    def text(self) -> str:
        size = unpack_from("<H", self.raw, self.at)[0]
        start = self.at + 2
        self.at = start + size
        return self.raw[start : self.at].decode("utf-8", "surrogatepass")

    def block(self) -> bytes:
        size = unpack_from("<I", self.raw, self.at)[0]
        start = self.at + 4
        self.at = start + size
        return self.raw[start : self.at]

    def ints(self, count: int) -> tuple[int, ...]:
        values = _doubles(count).unpack_from(self.raw, self.at)
        self.at += 8 * count
        return tuple(map(int, values))

    def byte(self) -> int:
        value = self.raw[self.at]
        self.at += 1
        return value

    def event(self) -> Verdict:
        """Any but a grant."""
        kind, rid = self.byte(), self.text()
        if kind == 1:
            eta, tag = self.ints(2)
            full = bool(self.byte())
            return Shed(rid=rid, eta=eta, tag=tag, because=self.text(), full=full)
        if kind == 2:
            cost, ceiling = self.ints(2)
            name = self.text()
            return Never(rid=rid, dimension=name, cost=cost, ceiling=ceiling, because=self.text())
        eta, tag = self.ints(2)
        return Late(rid=rid, eta=eta, tag=tag, because=self.text())


def unpack_answer(raw: bytes) -> Answer:
    """What the script answered.

    Raises:
        ValueError: Not an answer of this layout.
    """
    try:
        if raw[0] != OK:
            return Answer(status=raw[0])
        return _unpack(raw)
    except Exception as error:
        raise ValueError(f"a pool's answer of {len(raw)} bytes cannot be read: {error}") from error


def _unpack(raw: bytes) -> Answer:
    head = _ANSWER.unpack_from(raw)
    _, now, epoch, version, mail_seq, wake, rejoin, share, conflict, differs = head
    at = _ANSWER.size
    owner = blocked_by = ""
    if raw[at : at + 4] == _NO_TEXTS:
        at += 4
    else:
        read = _Reader(raw, at)
        owner, blocked_by, at = read.text(), read.text(), read.at
    nudged: list[str] = []
    events: list[Verdict] = []
    at = _texts(raw, at + 2, int.from_bytes(raw[at : at + 2], "little"), nudged)
    at = _events(raw, at, 0, events)
    own = len(events)
    at = _events(raw, at, LETTER_HEAD, events)
    read = _Reader(raw, at)
    rules = read.block()
    size, line = _STANDING.unpack_from(raw, read.at)
    values = _doubles(4 + 2 * LANES * line + 3 * size).unpack_from(raw, read.at + 2)
    if not line:
        values = values[:4] + _NOBODY + values[4:]
    numbers = tuple(map(int, values))
    first = 4 + 2 * LANES
    return Answer(
        status=OK,
        reply=Reply(
            int(now), int(epoch), events,
            version=int(version), mail_seq=int(mail_seq), wake=int(wake), owner=owner,
            blocked_by=blocked_by, nudged=nudged, rejoin=bool(rejoin),
            demand_share_ppm=int(share),
        ),
        standing=Standing(
            in_flight=numbers[0], factor_ppm=numbers[1], blocked_until=numbers[2],
            would_have_waited=numbers[3], waiting=numbers[4 : 4 + LANES],
            backlog=numbers[4 + LANES : first], level=numbers[first : first + size],
            used=numbers[first + size : first + 2 * size],
            foreign=numbers[first + 2 * size : first + 3 * size],
        ),
        conflict=bool(conflict),
        rules=_unpack_rules(rules) if differs else None,
        letters=len(events) - own,
    )  # fmt: skip


LETTER_HEAD = 12
"""Bytes before the event of a letter: its number, and its length."""


def _texts(raw: bytes, at: int, count: int, into: list[str]) -> int:
    """The texts of the block there are in the list; where the next block begins."""
    read = _Reader(raw, at + 4)
    into += [read.text() for _ in range(count)]
    return read.at


def _events(raw: bytes, at: int, before: int, into: list[Verdict]) -> int:
    """The events of the block there, each behind so many bytes; where the next block begins."""
    size = int.from_bytes(raw[at : at + 4], "little")
    at += 4
    end = at + size
    while at < end:
        at += before
        kind, length = _GRANTED.unpack_from(raw, at)
        if kind:
            read = _Reader(raw, at)
            into.append(read.event())
            at = read.at
            continue
        start = at + 3
        at = start + length
        rid = raw[start:at].decode("utf-8", "surrogatepass")
        layout = _admitted(raw[at + 16])
        tag, waited, _, *meter = layout.unpack_from(raw, at)
        at += layout.size
        into.append(_new(Admit, (rid, tuple(map(int, meter)), int(tag), int(waited))))
    return end


_new = tuple.__new__
"""A NamedTuple's own constructor is a Python function: three times as slow."""


def _unpack_rules(raw: bytes) -> Rules | None:
    if len(raw) <= 24:
        return None
    return Rules(int(unpack_from("<d", raw)[0]), raw[8:24], raw[24:])
