"""Host calls: what a guest may ask, told apart into local operations and effects.

Pure apart from the state it is given. A request is UTF-8 JSON of at most 1 MiB,
`{"v":1,"op":…,"args":{…}}`; a reply at most 4 MiB, `{"ok":…,"n":ordinal,"at":ns}` or
`{"error":{"code","message","retryable"},…}`. An *effect* always suspends, even when its answer is
at
hand: one path, always exercised. It takes an ordinal, which with the task gives its idempotency
key; a batch takes one ordinal for each of its calls. A *local operation* is answered at once,
from state that travels in the snapshot, so a re-execution answers the same.

Through `agent.host_call` a reply longer than the guest's window stays in the inbox and `reply.rest`
reads on; through the channel `/dev/agent` the guest simply reads on.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import HostCallRefused

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION: Final = 1
MAX_REQUEST: Final = 1 << 20
MAX_REPLY: Final = 4 << 20
MAX_BATCH: Final = 32
MAX_EFFECTS: Final = 10_000
MAX_SLEEP_MS: Final = 30 * 24 * 3_600_000
MAX_NAME: Final = 512
MAX_RANDOM: Final = 1_024
MAX_EMIT: Final = 256 << 10

EFFECTS: Final = frozenset(
    {
        "llm.chat", "llm.raw", "tool.call", "memory.get", "memory.put", "checkpoint", "sleep",
        "lock.acquire", "lock.release", "batch",
    }
)  # fmt: skip
LOCAL: Final = frozenset({"emit", "log", "now", "random", "task.info", "reply.rest"})
BATCHED: Final = EFFECTS - {"batch", "sleep", "checkpoint", "lock.acquire", "lock.release"}
CODES: Final = frozenset(
    {
        "bad_request", "denied", "unknown_tool", "too_large", "conflict", "deadline", "upstream",
        "budget", "cancelled",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """An effect that waits for its reply.

    Attributes:
        op: One of `EFFECTS`.
        args: As the guest wrote them.
        ordinal: Number of this effect in the task; a batch's calls take the following ones.
        digest: Of operation and arguments: a replay with another digest is a `DeterminismBreach`.
    """

    op: str
    args: dict[str, Any]
    ordinal: int
    digest: str

    @property
    def calls(self) -> list[Request]:
        """The calls of a batch, each with its own ordinal; of anything else, itself."""
        if self.op != "batch":
            return [self]
        return [
            request(one["op"], one.get("args", {}), self.ordinal + n)
            for n, one in enumerate(self.args["calls"])
        ]


@dataclass(frozen=True, slots=True)
class Pending:
    """A suspended import: what it asked, and where its answer goes in the guest's memory."""

    request: Request
    window: dict[str, Any]


@dataclass(slots=True)
class State:
    """Everything the host knows of a guest, so that nothing is left behind when it moves.

    Attributes:
        argv, env: As the guest sees them.
        files: The read-only tree, path to content.
        fds: Open descriptors: [path, offset].
        clock_ns: Logical time.
        seed, drawn: Random bytes are a keyed hash of a counter.
        next_ordinal: Of the next effect.
        spent: Effects were refused for `budget` before; the next one ends the task.
        sequence: Of output records.
        written: Bytes of stdout, stderr, emits and logs so far.
        refused: How often output was refused since they were spent.
        request, inbox: Bytes written to and to be read from the channel.
        overlong: The request being written exceeds its bound.
        info: What `task.info` answers besides the input.
        local: What a run without a store keeps for itself: memory keys and locks.
    """

    argv: list[str]
    env: list[list[str]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    fds: dict[int, list[Any]] = field(default_factory=dict)
    next_fd: int = 4
    clock_ns: int = 0
    seed: str = "00" * 32
    drawn: int = 0
    next_ordinal: int = 0
    spent: bool = False
    sequence: int = 0
    written: int = 0
    refused: int = 0
    request: bytes = b""
    inbox: bytes = b""
    overlong: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)

    _JSON = (
        "argv", "env", "next_fd", "clock_ns", "seed", "drawn", "next_ordinal", "spent", "sequence",
        "written", "refused", "overlong", "info", "local",
    )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The small part, for a snapshot's header; files, request and inbox travel as bytes."""
        out: dict[str, Any] = {name: getattr(self, name) for name in self._JSON}
        out["fds"] = {str(fd): list(entry) for fd, entry in self.fds.items()}
        out["files"] = {path: digest(content) for path, content in sorted(self.files.items())}
        return out

    @classmethod
    def from_json(
        cls, row: dict[str, Any], *, files: dict[str, bytes], request: bytes, inbox: bytes
    ) -> State:
        """The inverse.

        Raises:
            KeyError, ValueError, TypeError: The row is not one of ours, or the files are others.
        """
        if {path: digest(content) for path, content in files.items()} != row["files"]:
            raise ValueError("the files are not those of the snapshot")
        fds = {int(fd): [str(path), int(at)] for fd, (path, at) in row["fds"].items()}
        return cls(
            fds=fds, files=files, request=request, inbox=inbox, **{n: row[n] for n in cls._JSON}
        )

    def random(self, count: int) -> bytes:
        """The next bytes of the task's random stream; no source of secrets."""
        out = bytearray()
        key = bytes.fromhex(self.seed)
        while len(out) < count:
            out += hashlib.blake2b(self.drawn.to_bytes(8, "little"), key=key).digest()
            self.drawn += 1
        return bytes(out[:count])

    def now(self) -> int:
        """Logical nanoseconds, one microsecond further at each reading."""
        self.clock_ns += 1_000
        return self.clock_ns


@dataclass(frozen=True, slots=True)
class Record:
    """Output of a slice: `stdout`, `stderr`, `emit` or `log`, committed with the slice."""

    kind: str
    sequence: int
    data: Any


def digest(content: bytes) -> str:
    """Hex BLAKE2b-256."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def request(op: str, args: dict[str, Any], ordinal: int) -> Request:
    """A request with its digest."""
    canonical = json.dumps([op, args], sort_keys=True, separators=(",", ":")).encode()
    return Request(op, args, ordinal, digest(canonical))


def dumps(value: Any) -> bytes:  # noqa: ANN401  (JSON)
    """Compact UTF-8 JSON; lone surrogates are escaped, so that it always encodes."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def error(code: str, message: str, *, retryable: bool = False) -> dict[str, Any]:
    """An error reply's body."""
    return {"error": {"code": code, "message": message[:2_000], "retryable": retryable}}


def seal(body: dict[str, Any], ordinal: int, at_ns: int) -> bytes:
    """The reply as bytes; one that is too large becomes the error `too_large`."""
    raw = dumps({**body, "n": ordinal, "at": at_ns})
    if len(raw) <= MAX_REPLY:
        return raw
    refused = error("too_large", f"a reply of {len(raw)} bytes; {MAX_REPLY} are allowed")
    return dumps({**refused, "n": ordinal, "at": at_ns})


def parse(raw: bytes) -> tuple[str, dict[str, Any]]:
    """Operation and arguments of a request.

    Raises:
        HostCallRefused: `bad_request` or `too_large`, to be answered as a reply.
    """
    if len(raw) > MAX_REQUEST:
        raise HostCallRefused(
            "too_large", f"a request of {len(raw)} bytes; {MAX_REQUEST} are allowed"
        )
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        raise HostCallRefused("bad_request", "the request is not JSON") from None
    if not isinstance(row, dict) or row.get("v") != VERSION:
        raise HostCallRefused("bad_request", 'a request is an object with "v": 1')
    op, args = row.get("op"), row.get("args", {})
    if not isinstance(op, str) or not isinstance(args, dict):
        raise HostCallRefused("bad_request", '"op" is a string and "args" an object')
    check(op, args)
    return op, args


def check(op: str, args: dict[str, Any]) -> None:
    """Return when the operation exists and its arguments have the right shape.

    Raises:
        HostCallRefused: `bad_request`, naming the argument.
    """
    if op not in EFFECTS and op not in LOCAL:
        raise HostCallRefused("bad_request", f"unknown operation {op[:80]!r}")
    shape = _SHAPES.get(op)
    if shape is not None:
        shape(args)


def reads_rest(raw: bytes) -> bool:
    """The request reads on in a reply; whatever else it says."""
    if b"reply.rest" not in raw:
        return False
    try:
        return parse(raw)[0] == "reply.rest"
    except HostCallRefused:
        return False


def _text(args: dict[str, Any], name: str, most: int = MAX_NAME) -> str:
    value = args.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise HostCallRefused("bad_request", f"{name}: a text of 1 to {most} characters")
    return value


def _number(args: dict[str, Any], name: str, most: int, default: int | None = None) -> int:
    value = args.get(name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise HostCallRefused("bad_request", f"{name}: a whole number from 0 to {most}")
    return value


def _chat(args: dict[str, Any]) -> None:
    messages = args.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HostCallRefused("bad_request", "messages: a list with at least one message")
    if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
        raise HostCallRefused("bad_request", "messages: objects with a role")


def _raw(args: dict[str, Any]) -> None:
    _text(args, "dialect", 40)
    if not isinstance(args.get("body"), dict):
        raise HostCallRefused("bad_request", "body: an object")


def _tool(args: dict[str, Any]) -> None:
    _text(args, "name")
    if not isinstance(args.get("args", {}), dict):
        raise HostCallRefused("bad_request", "args: an object")


def _put(args: dict[str, Any]) -> None:
    _text(args, "key")
    if "value" not in args:
        raise HostCallRefused("bad_request", "value: missing")


def _acquire(args: dict[str, Any]) -> None:
    _text(args, "name")
    _number(args, "ttl_ms", 24 * 3_600_000)
    _number(args, "wait_ms", 24 * 3_600_000, 0)


def _release(args: dict[str, Any]) -> None:
    _text(args, "name")


def _batch(args: dict[str, Any]) -> None:
    calls = args.get("calls")
    if not isinstance(calls, list) or not 0 < len(calls) <= MAX_BATCH:
        raise HostCallRefused("bad_request", f"calls: a list of 1 to {MAX_BATCH} requests")
    for one in calls:
        inner = one.get("args", {}) if isinstance(one, dict) else None
        if not isinstance(inner, dict) or one.get("op") not in BATCHED:
            raise HostCallRefused("bad_request", f"calls: only {', '.join(sorted(BATCHED))}")
        check(one["op"], inner)


_SHAPES: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "llm.chat": _chat,
    "llm.raw": _raw,
    "tool.call": _tool,
    "memory.get": lambda args: _text(args, "key"),
    "memory.put": _put,
    "sleep": lambda args: _number(args, "ms", MAX_SLEEP_MS),
    "lock.acquire": _acquire,
    "lock.release": _release,
    "checkpoint": lambda args: _text(args, "label"),
    "batch": _batch,
    "random": lambda args: _number(args, "bytes", MAX_RANDOM),
    "reply.rest": lambda args: _number(args, "offset", MAX_REPLY),
}


class BudgetGone(Exception):
    """The task went on after a budget's refusal, and ends; the words say which."""


def room_for_output(size: int, state: State) -> bool:
    """There is room for so many bytes of output, which are counted.

    Raises:
        BudgetGone: It was refused a thousand times; a guest that ignores errors would never end.
    """
    if state.written + size <= MAX_OUTPUT:
        state.written += size
        return True
    state.refused += 1
    if state.refused > MAX_REFUSED:
        raise BudgetGone(f"{MAX_OUTPUT} bytes of output are spent, and it went on")
    return False


def serve(raw: bytes, state: State, outbox: list[Record]) -> bytes | Request:
    """The reply of a local operation or of a refusal, or the effect that must wait.

    Raises:
        BudgetGone: Effects or output went on after they were spent.
    """
    try:
        op, args = parse(raw)
    except HostCallRefused as refused:
        return dumps({**error(refused.code, refused.message), "at": state.clock_ns})
    if op in LOCAL:
        body = _local(op, args, state, outbox)
        return dumps({**body, "at": state.clock_ns})
    count = len(args["calls"]) if op == "batch" else 1
    if state.next_ordinal + count > MAX_EFFECTS:
        if state.spent:
            raise BudgetGone(f"{MAX_EFFECTS} effects are spent, and it went on")
        state.spent = True
        message = f"{MAX_EFFECTS} effects are spent; the next one ends the task"
        return dumps({**error("budget", message), "at": state.clock_ns})
    wanted = request(op, args, state.next_ordinal)
    state.next_ordinal += count
    return wanted


def _local(op: str, args: dict[str, Any], state: State, outbox: list[Record]) -> dict[str, Any]:
    if op == "now":
        return {"ok": state.now()}
    if op == "random":
        return {"ok": base64.b64encode(state.random(int(args["bytes"]))).decode()}
    if op == "reply.rest":
        rest = state.inbox[int(args["offset"]) :]
        return {"ok": base64.b64encode(rest[: 512 << 10]).decode(), "left": len(rest)}
    if op == "task.info":
        given = state.files.get("/agent/input.json", b"null")
        return {"ok": {**state.info, "input": json.loads(given)}}
    size = len(dumps(args))
    if size > MAX_EMIT:
        return error("too_large", f"{op} of {size} bytes; {MAX_EMIT} are allowed")
    if not room_for_output(size, state):
        return error("too_large", f"{MAX_OUTPUT} bytes of output are spent")
    state.sequence += 1
    outbox.append(Record(op, state.sequence, args.get("data") if op == "emit" else args))
    return {"ok": state.sequence}


MAX_OUTPUT: Final = 16 << 20
"""Bytes of stdout, stderr, emits and logs together that a task may produce."""
MAX_REFUSED: Final = 1_000
