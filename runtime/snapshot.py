"""A guest as bytes: capture values encoded against a base image or a parent, and put back together.

Pure: bytes in, bytes out. Little-endian: `TGSN`, u16 format, u16 flags, u32 header length, u64
body length, header (JSON), body (one zstd frame), 32 bytes of keyed BLAKE2b over all before them.
The body holds Asyncify's saved stack, the channel's bytes, the files (when embedded), then runs
of 4 KiB pages.

- A *full* snapshot has the pages that differ from its base image, or from zeros without one; a
  *delta* those that differ from its parent. A page that became zero is recorded as a zero run:
  leaving it out would be an assumption about what lies beneath.
- A page over a base image or a parent is written as its difference (exclusive or) to that page: an
  interpreter changes some words of each page it touches, and zeros cost nothing.
- The hash is checked before anything is parsed, declared sizes against limits before decompression,
  identities before anything is restored. Wrong bytes are `SnapshotCorrupt`, a sound snapshot of
  something else is `SnapshotMismatch`; nothing is ever half-loaded.
- Who holds the key can forge; a forged snapshot cannot leave the sandbox, but it can rewrite what
  an agent believes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import dataclass, field, replace
from typing import Any, Final

import zstandard

from runtime.abi import Pending, Request, State
from runtime.errors import SnapshotCorrupt, SnapshotMismatch

MAGIC: Final = b"TGSN"
FORMAT: Final = 1
PAGE: Final = 4_096
BLOCK: Final = 65_536
WASM_PAGE: Final = 65_536
HEAD: Final = struct.Struct("<4sHHIQ")
RUN: Final = struct.Struct("<BBHII")
HASH: Final = 32
MAX_HEADER: Final = 1 << 20
MAX_BODY: Final = 1 << 30
MAX_CHAIN: Final = 16
LEVEL: Final = 1
ZERO_PAGE: Final = bytes(PAGE)
EMBEDS_FILES: Final = 1
"""Flag: the body carries the files, so that the snapshot stands alone."""
DIFFERENCES: Final = 2
"""Flag: pages are exclusive or with what lies beneath them."""
FLAGS: Final = EMBEDS_FILES | DIFFERENCES


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What must match exactly: saved call positions are positions in *that* code."""

    plain_hash: str
    module_hash: str
    variant: str = "flag"
    abi: int = 1
    shim: int = 1
    arch: str
    nan: str = "native"
    engine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose it is: the fence against resuming it twice."""

    task: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A stopped guest, complete.

    Attributes:
        step: Which of the program's entry points is running (start, initialize, main).
        arguments: Raw bits of the main entry's arguments.
        pending: The suspended import, None when preempted.
        globals: Name to (kind, raw bits).
        memory: Linear memory, whole pages.
        stack: `__astk` from 0 to Asyncify's stack pointer.
        state: The host's knowledge.
        cpu_us, fuel, stack_high: Accounting.
        overdue: Unanswered preemptions so far; the second one is poison.
    """

    identity: Identity
    step: int
    arguments: tuple[int, ...]
    pending: Pending | None
    globals: dict[str, tuple[int, int]]
    memory: bytes
    stack: bytes
    state: State
    cpu_us: int = 0
    fuel: int = 0
    stack_high: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Bytes that were checked and parsed, not yet applied to what they differ from."""

    id: str
    header: dict[str, Any]
    stack: bytes
    request: bytes
    inbox: bytes
    files: dict[str, bytes] | None
    runs: list[tuple[int, int, bytes | None]] = field(repr=False)
    differences: bool = False

    @property
    def kind(self) -> str:
        """`base`, `full` or `delta`."""
        return str(self.header["kind"])

    @property
    def beneath(self) -> str:
        """Id of what its pages differ from; "" is zeros."""
        return str(self.header["parent"] if self.kind == "delta" else self.header["base"])


def key_of(secret: bytes) -> bytes:
    """The snapshot key of a fleet, derived from its one secret."""
    return hashlib.blake2b(secret, digest_size=32, person=b"tidegate-snap").digest()


def ident(data: bytes) -> str:
    """The name of a snapshot: hex BLAKE2b-128 of its bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# --- pages ----------------------------------------------------------------------------------------


def differing(now: bytes, before: bytes) -> list[tuple[int, int, bytes | None]]:
    """Runs (first page, count, bytes or None for zeros) where `now` differs from `before`.

    Beyond the end of `before` lie zeros. Blocks of 64 KiB are compared first, then pages.
    """
    changed: list[int] = []
    size = len(before)
    for start in range(0, len(now), BLOCK):
        mine = now[start : start + BLOCK]
        if start >= size:
            theirs = bytes(len(mine))
        else:
            theirs = before[start : start + BLOCK]
            if len(theirs) < len(mine):
                theirs += bytes(len(mine) - len(theirs))
        if mine == theirs:
            continue
        first = start // PAGE
        changed += [
            first + i // PAGE
            for i in range(0, len(mine), PAGE)
            if mine[i : i + PAGE] != theirs[i : i + PAGE]
        ]
    return _runs(now, changed)


def _runs(now: bytes, pages: list[int]) -> list[tuple[int, int, bytes | None]]:
    out: list[tuple[int, int, bytes | None]] = []
    at = 0
    while at < len(pages):
        first = pages[at]
        zero = now[first * PAGE : (first + 1) * PAGE] == ZERO_PAGE
        end = at + 1
        while (
            end < len(pages)
            and pages[end] == pages[end - 1] + 1
            and (now[pages[end] * PAGE : (pages[end] + 1) * PAGE] == ZERO_PAGE) is zero
        ):
            end += 1
        count = end - at
        out.append((first, count, None if zero else now[first * PAGE : (first + count) * PAGE]))
        at = end
    return out


def patched(
    before: bytes,
    size: int,
    runs: list[tuple[int, int, bytes | None]],
    *,
    differences: bool = False,
) -> bytes:
    """The memory of `size` bytes that these runs make of what lies beneath."""
    memory = bytearray(before[:size])
    memory += bytes(size - len(memory))
    for first, count, content in runs:
        where = slice(first * PAGE, (first + count) * PAGE)
        if content is None:
            memory[where] = bytes(count * PAGE)
        else:
            memory[where] = exclusive_or(content, memory[where]) if differences else content
    return bytes(memory)


def exclusive_or(one: bytes, other: bytes | bytearray) -> bytes:
    """Byte by byte; of the longer one, what has no partner stays as it is."""
    value = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    return value.to_bytes(max(len(one), len(other)), "little")


# --- encoding -------------------------------------------------------------------------------------


def encode(  # noqa: PLR0913  (an image and where it stands in its chain)
    image: Image,
    key: bytes,
    *,
    owner: Owner | None = None,
    kind: str = "full",
    beneath: tuple[str, bytes] = ("", b""),
    depth: int = 0,
    embed_files: bool = True,
) -> bytes:
    """The snapshot of an image.

    Args:
        image: What to keep.
        key: The fleet's snapshot key.
        owner: Whose it is.
        kind: `base`, `full` or `delta`.
        beneath: Id and memory of the base image (`full`) or of the parent (`delta`).
        depth: Length of the chain of deltas below.
        embed_files: False when whoever restores has the files; their digests are always kept.
    """
    owner = owner or Owner()
    runs = differing(image.memory, beneath[1])
    files = dict(sorted(image.state.files.items())) if embed_files else {}
    body = bytearray(image.stack + image.state.request + image.state.inbox)
    for content in files.values():
        body += content
    for first, count, pages in runs:
        body += RUN.pack(0, pages is None, 0, first, count)
    for first, count, pages in runs:
        if pages is not None:
            under = beneath[1][first * PAGE : (first + count) * PAGE]
            body += exclusive_or(pages, under) if under else pages
    header = {
        "kind": kind,
        "base": beneath[0] if kind != "delta" else "",
        "parent": beneath[0] if kind == "delta" else "",
        "depth": depth,
        "task": owner.task,
        "epoch": owner.epoch,
        "ordinal": image.state.next_ordinal,
        **{name: getattr(image.identity, name) for name in Identity.__slots__},
        "step": image.step,
        "arguments": [f"{bits:x}" for bits in image.arguments],
        "state": _state(image.pending),
        "globals": {name: [kind_, f"{bits:x}"] for name, (kind_, bits) in image.globals.items()},
        "memory": len(image.memory),
        "stack": len(image.stack),
        "request": len(image.state.request),
        "inbox": len(image.state.inbox),
        "embedded": {path: len(content) for path, content in files.items()},
        "runs": len(runs),
        "raw": len(body),
        "cpu_us": image.cpu_us,
        "fuel": image.fuel,
        "stack_high": image.stack_high,
        "wasi": image.state.to_json(),
        "locks": [],
    }
    flags = (EMBEDS_FILES if embed_files else 0) | (DIFFERENCES if beneath[1] else 0)
    return seal(header, bytes(body), key, flags=flags)


def seal(header: dict[str, Any], body: bytes, key: bytes, *, flags: int = 0) -> bytes:
    """Header and raw body as signed snapshot bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(body)
    data = HEAD.pack(MAGIC, FORMAT, flags, len(text), len(packed)) + text + packed
    return data + hashlib.blake2b(data, key=key, digest_size=HASH).digest()


def _state(pending: Pending | None) -> dict[str, Any]:
    if pending is None:
        return {"is": "runnable"}
    wanted = pending.request
    return {
        "is": "waiting",
        "op": wanted.op,
        "args": wanted.args,
        "ordinal": wanted.ordinal,
        "digest": wanted.digest,
        "window": pending.window,
    }


# --- decoding -------------------------------------------------------------------------------------


def decode(data: bytes, key: bytes, *, memory_limit: int = 64 << 20) -> Snapshot:
    """The parsed snapshot in these bytes.

    Raises:
        SnapshotCorrupt: Truncated, altered, signed with another key, or inconsistent in itself.
        SnapshotMismatch: A format or flag of a later version.
    """
    if len(data) < HEAD.size + HASH:
        raise SnapshotCorrupt(f"{len(data)} bytes are too few for a snapshot")
    magic, version, flags, header_size, body_size = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotCorrupt("not a snapshot")
    signed, tag = data[:-HASH], data[-HASH:]
    expected = hashlib.blake2b(signed, key=key, digest_size=HASH).digest()
    if not hmac.compare_digest(tag, expected):
        raise SnapshotCorrupt("altered, truncated, or written under another snapshot key")
    if version != FORMAT or flags & ~FLAGS:
        raise SnapshotMismatch(f"format {version}, flags {flags}: this version reads {FORMAT}")
    if header_size > MAX_HEADER or HEAD.size + header_size + body_size + HASH != len(data):
        raise SnapshotCorrupt("its declared sizes are not its size")
    start = HEAD.size + header_size
    try:
        header = json.loads(data[HEAD.size : start])
        return _parse(header, data[start:-HASH], flags, ident(data), memory_limit)
    except (KeyError, TypeError, ValueError, RecursionError, struct.error, AttributeError) as error:
        raise SnapshotCorrupt(f"unreadable: {type(error).__name__} {error}"[:200]) from None


def _parse(  # noqa: C901  (one refusal a line)
    header: dict[str, Any], packed: bytes, flags: int, name: str, memory_limit: int
) -> Snapshot:
    sizes = [header[one] for one in ("raw", "memory", "stack", "request", "inbox", "runs")]
    if not all(type(one) is int and 0 <= one <= MAX_BODY for one in sizes):
        raise SnapshotCorrupt("a size is not a size")
    raw_size, memory, stack_size, request_size, inbox_size, run_count = sizes
    if memory > memory_limit or memory % WASM_PAGE:
        raise SnapshotCorrupt(f"{memory} bytes of memory; {memory_limit} are allowed")
    embedded = {str(path): int(size) for path, size in header["embedded"].items()}
    if embedded and not flags & EMBEDS_FILES:
        raise SnapshotCorrupt("files without their flag")
    if any(size < 0 for size in embedded.values()):
        raise SnapshotCorrupt("a file of negative size")
    fixed = stack_size + request_size + inbox_size + sum(embedded.values())
    if raw_size > fixed + memory + run_count * RUN.size or run_count > memory // PAGE:
        raise SnapshotCorrupt("the body declares more than it can hold")
    body = _inflate(packed, raw_size)
    cut = [0]

    def take(size: int) -> bytes:
        part = body[cut[0] : cut[0] + size]
        if len(part) != size:
            raise SnapshotCorrupt("the body ends early")
        cut[0] += size
        return part

    stack, request, inbox = take(stack_size), take(request_size), take(inbox_size)
    files = {path: take(size) for path, size in embedded.items()}
    rows = [RUN.unpack(take(RUN.size)) for _ in range(run_count)]
    runs: list[tuple[int, int, bytes | None]] = []
    after = 0
    for which, zero, reserved, first, count in rows:
        if which or reserved or zero > 1 or first < after or not count:
            raise SnapshotCorrupt("pages out of order")
        after = first + count
        if after * PAGE > memory:
            raise SnapshotCorrupt("a page beyond the memory")
        runs.append((first, count, None if zero else take(count * PAGE)))
    if cut[0] != len(body):
        raise SnapshotCorrupt("the body has bytes left over")
    if not all(isinstance(header[one], str) for one in ("base", "parent", "module_hash")):
        raise SnapshotCorrupt("a name is not a name")
    if header["kind"] not in ("base", "full", "delta"):
        raise SnapshotMismatch(f"kind {header['kind']!r}")
    embeds, differences = bool(flags & EMBEDS_FILES), bool(flags & DIFFERENCES)
    return Snapshot(
        name, header, stack, request, inbox, files if embeds else None, runs, differences
    )


def _inflate(packed: bytes, size: int) -> bytes:
    """Exactly `size` bytes; the frame's own declaration is believed only when it agrees."""
    try:
        if zstandard.frame_content_size(packed) != size:
            raise SnapshotCorrupt("the body is not of its declared size")
        return zstandard.ZstdDecompressor().decompress(
            packed, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise SnapshotCorrupt(f"the body cannot be read: {error}") from None


def restore(
    chain: list[Snapshot],
    *,
    base: tuple[str, bytes] = ("", b""),
    files: dict[str, bytes] | None = None,
) -> Image:
    """The image at the end of a chain: a full snapshot, then its deltas in order.

    Args:
        chain: Parsed snapshots, oldest first.
        base: Id and memory of the base image the full one names.
        files: The guest's files, where the chain does not carry them.

    Raises:
        SnapshotMismatch: The chain is broken, or belongs to other code or files.
        SnapshotCorrupt: A header that does not describe an image.
    """
    if not chain or len(chain) > MAX_CHAIN + 1:
        raise SnapshotMismatch(f"a chain of {len(chain)} snapshots")
    name, memory = base
    for number, one in enumerate(chain):
        if (one.kind == "delta") is not (number > 0):
            raise SnapshotMismatch("a chain is one full snapshot and then deltas")
        if one.beneath != (name if number or one.beneath else ""):
            raise SnapshotMismatch(f"{one.id} differs from {one.beneath or 'zeros'}, not {name}")
        if not number and not one.beneath:
            memory = b""
        if one.header["module_hash"] != chain[0].header["module_hash"]:
            raise SnapshotMismatch("a chain of two modules")
        memory = patched(memory, one.header["memory"], one.runs, differences=one.differences)
        name = one.id
        if one.files is not None:
            files = one.files
    last = chain[-1]
    try:
        return _image(last, memory, files or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotCorrupt(f"unreadable: {type(error).__name__} {error}"[:200]) from None


def _image(last: Snapshot, memory: bytes, files: dict[str, bytes]) -> Image:
    header = last.header
    state = header["state"]
    pending = None
    if state["is"] == "waiting":
        wanted = Request(state["op"], state["args"], int(state["ordinal"]), state["digest"])
        pending = Pending(wanted, dict(state["window"]))
    return Image(
        identity=Identity(**{name: header[name] for name in Identity.__slots__}),
        step=int(header["step"]),
        arguments=tuple(int(bits, 16) for bits in header["arguments"]),
        pending=pending,
        globals={
            str(name): (int(kind), int(bits, 16))
            for name, (kind, bits) in header["globals"].items()
        },
        memory=memory,
        stack=last.stack,
        state=State.from_json(header["wasi"], files=files, request=last.request, inbox=last.inbox),
        cpu_us=int(header["cpu_us"]),
        fuel=int(header["fuel"]),
        stack_high=int(header["stack_high"]),
    )


def fits(image: Image, here: Identity) -> None:
    """Return when this image may continue on this module here.

    Raises:
        SnapshotMismatch: Which field differs.
    """
    there = image.identity
    for name in ("plain_hash", "module_hash", "variant", "abi", "shim", "nan"):
        mine, theirs = getattr(here, name), getattr(there, name)
        if mine != theirs:
            raise SnapshotMismatch(f"{name} is {theirs!r} in the snapshot and {mine!r} here")
    if there.arch != here.arch and there.nan != "canonical":
        raise SnapshotMismatch(
            f"written on {there.arch}: only modules with canonical NaN move to {here.arch}"
        )


def at_rest(image: Image, state: State) -> Image:
    """The same image for another task: a base image's memory under a new state."""
    return replace(image, state=state)
