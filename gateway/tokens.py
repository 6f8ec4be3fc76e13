"""tiktoken behind a size bound, a message cache, turns and threads; without vocabulary, by bytes.

The law of this file:

1. Counting never fails, blocks or hangs a call. What cannot be counted in bounds is estimated, and
   `Counted.because` says why.
2. Only text is tokenized. Media count by their own rules from their size; a payload is never seen.
3. Special-token spellings are ordinary text: our encoders know no special tokens at all.
4. The vocabulary's hash is checked before a byte of it is used, and tiktoken's own loader, which
   deletes a wrong file and downloads without a timeout, is never called.
5. The common case is synchronous: a conversation whose history is cached costs a hash per message.
6. Every text goes to tiktoken in slices of at most 64 Ki characters. That bounds the time between
   two looks at a cancellation, and tiktoken panics on a million blanks in one piece (the stack of
   its regular expression overflows, and the panic is no `Exception`).

Sizes are counted in characters, which are bytes for ASCII: what tiktoken's time depends on.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import tiktoken

from gateway.call import Family, Part, PartKind, Piece
from gateway.units import MICRO, Micros, Tokens, valueclass

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.clock import Clock

__all__ = ["Counted", "Counter", "Encoder", "Missing", "Vocabulary", "guess", "guess_bytes"]

INLINE = 12_000
"""Uncached characters counted at once: at worst 3 ms (a repeated letter), usually below 1 ms."""

IN_TURNS = 128 * 1024
"""Uncached characters of one call that are counted on the loop, `INLINE` of them between two looks
at everything else, if no single text is longer: a thread would fight for the interpreter after each
text (docs/adr/0059). More goes to a thread, which leaves the loop alone for long."""

DIRECT = 16
"""Shorter texts are counted each time: cheaper than the cache's memory. An agent's history is full
of texts a little longer (arguments, results), and counting one costs 3 to 10 us (docs/adr/0032)."""

SMALL = 2_048
"""Characters of short texts that a prompt counts on the spot, one by one."""

ROLES = frozenset({"user", "assistant", "system", "developer", "tool"})
"""Words of nearly every message: their counts are kept."""

SLICE = 64 * 1024
"""Characters given to tiktoken at once."""

LOOKBACK = 16 * 1024
"""How far back from a slice's end a harmless place to cut is searched."""

MAX_UNCACHED = 4 * 1024 * 1024
"""Uncached characters of one call beyond which it is estimated."""

HASH_SHORT = 64 * 1024
"""Characters up to which a text is hashed by Python itself, at four times the speed of BLAKE2b."""

HASH_INLINE = 1024 * 1024
"""Characters of one call hashed at once (about 1.5 ms); what is beyond is hashed in the thread."""

PATIENCE: Micros = 2 * MICRO
"""How long a call waits for its count."""

THREADS = 2
PLACES = 64
"""Counts running and queued at most; beyond it calls are estimated."""

CACHED = 50_000
"""Counts remembered, in two generations of half as many."""

SAMPLE = 64 * 1024
"""Characters looked at to learn the script of a text longer than sixteen times this."""


@valueclass(frozen=True, slots=True)
class Counted:
    """A number of tokens.

    Attributes:
        tokens: The count, media and overhead included.
        exact: Whether all text was tokenized; media rules do not make it inexact.
        because: "" if exact, else "vocabulary", "size", "busy", "slow" or "fault": a metric label.
    """

    tokens: Tokens
    exact: bool = True
    because: str = ""


class Encoder(Protocol):
    """What of `tiktoken.Encoding` is used."""

    def encode_ordinary(self, text: str, /) -> list[int]:
        """Token ids of the text, special spellings taken literally."""
        ...


@dataclass(frozen=True, slots=True)
class Missing:
    """No encoder, and the one line that says why and how to repair it."""

    warning: str


_T = TypeVar("_T")

Open: TypeAlias = "Callable[[str], Encoder | Missing]"

FAULTS = (UnicodeError, ValueError, RuntimeError, OverflowError, MemoryError)
"""What an encoder may raise; mapped here to an estimate."""


# --- the vocabulary ---------------------------------------------------------------------------

# tiktoken's own patterns, regrouped: what asks nothing of its neighbours stands in one group, which
# the engine then hands to its automaton as one; alternatives apart are tried one after the other,
# and possessive ones by backtracking. The same texts split at the same places (docs/adr/0059).
_O200K = (
    r"(?:[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+)"
    r"|\s+(?!\S)|\s+"
)

_CL100K = (
    r"(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s+$|\s*[\r\n])|\s+(?!\S)|\s"
)


@dataclass(frozen=True, slots=True)
class Pinned:
    """An encoding's file and how it splits text; tests compare both with tiktoken's own."""

    file: str
    sha256: str
    pattern: str


PINNED = {
    "o200k_base": Pinned(
        "fb374d419588a4632f3f557e76b4b70aebbca790",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        _O200K,
    ),
    "cl100k_base": Pinned(
        "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        _CL100K,
    ),
}


def encoder(name: str, pattern: str, vocabulary: bytes) -> Encoder:
    """A tiktoken encoder without special tokens.

    Args:
        name: For `repr` only.
        pattern: How text is split before merging.
        vocabulary: Lines of base64 token, blank, rank.

    Raises:
        ValueError: The vocabulary has another form.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in vocabulary.splitlines():
            token, rank = line.split()
            ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
    except binascii.Error as error:
        raise ValueError(f"not a vocabulary: {error}") from error
    made = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    # The Rust side holds its own copy and counting needs no other: 27 MB less for o200k.
    ranks.clear()
    return made


class Vocabulary:
    """The folder of verified vocabulary files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, encoding: str) -> Encoder | Missing:
        """The encoder, from a file whose hash was right; takes 0.4 s, so call it in a thread."""
        pinned = PINNED.get(encoding)
        if pinned is None:
            known = ", ".join(PINNED)
            return Missing(
                f"tokenizer {encoding!r} is unknown, tokens are estimated; known: {known}"
            )
        path = self._folder / pinned.file
        try:
            data = path.read_bytes()
        except OSError as error:
            return Missing(self._warning(encoding, path, f"is absent ({error.strerror})"))
        seen = sha256(data).hexdigest()
        if seen != pinned.sha256:
            return Missing(self._warning(encoding, path, f"has SHA-256 {seen}"))
        return encoder(encoding, pinned.pattern, data)

    def _warning(self, encoding: str, path: Path, what: str) -> str:
        return (
            f"tokens are estimated: the {encoding} vocabulary {path} {what}, "
            f"wanted SHA-256 {PINNED[encoding].sha256}; to repair: "
            f"TIKTOKEN_CACHE_DIR={self._folder} python deploy/vocabulary.py"
        )


# --- pure rules -------------------------------------------------------------------------------


def guess_bytes(size: int, *, ascii_share: float = 1.0) -> Tokens:
    """Estimated tokens of that many UTF-8 bytes, rounded up: 3.4 bytes each, 2.6 outside ASCII."""
    return -(-size * 10 // (34 if ascii_share >= 0.9 else 26))


def guess(text: str) -> Tokens:
    """Estimated tokens of the text; characters ÷ 4 would see a quarter of mixed Chinese and Hindi.

    Weakness: of a text beyond a million characters sixteen samples decide script and size.
    """
    length = len(text)
    if text.isascii():
        return guess_bytes(length)
    sample = text
    if length > 16 * SAMPLE:
        sample = "".join(text[at : at + SAMPLE // 16] for at in range(0, length, length // 16))
    size = len(sample.encode("utf-8", "surrogatepass"))
    plain = len(sample.encode("ascii", "ignore"))
    return guess_bytes(size * length // len(sample), ascii_share=plain / len(sample))


def cut(text: str, start: int) -> int:
    """Where the slice beginning at `start` ends.

    The end is before a blank that follows something else than white space, or after a line end that
    is followed by neither white space nor "/". At such a place both encodings split anyway,
    whatever stands around it, so the slices' counts add up to the whole's.

    Weakness: where there is no such place in the last 16 Ki characters the cut is blind and may add
    a token or two.
    """
    end = start + SLICE
    if end >= len(text):
        return len(text)
    floor = end - LOOKBACK
    at = text.rfind("\n", floor, end)
    if at >= 0 and not text[at + 1].isspace() and text[at + 1] != "/":
        return at + 1
    at = text.rfind(" ", floor, end)
    while at > floor and text[at - 1].isspace():
        at = text.rfind(" ", floor, at)
    return at if at > floor else end


def slices(text: str) -> Iterable[str]:
    """The text in pieces of at most `SLICE` characters."""
    start = 0
    while start < len(text):
        end = cut(text, start)
        yield text[start:end]
        start = end


def image(width: int, height: int, detail: str, family: Family) -> Tokens:
    """Tokens of an image; an unknown size (0) counts as one that fills the provider's frame.

    Source: OpenAI's and Anthropic's vision guides: 85 + 170 per tile of 512 after fitting into
    2048 by 2048 and shrinking the short side to 768; a 750th of the pixels after fitting the
    long side into 1568.
    """
    known = width > 0 and height > 0
    if family is Family.ANTHROPIC:
        if not known:
            return 1_600
        scale = min(1.0, 1568 / max(width, height))
        return max(1, min(1_600, round(width * scale * height * scale / 750)))
    if detail == "low":
        return 85
    if not known:
        return 85 + 170 * 4
    scale = min(1.0, 2048 / max(width, height))
    scale = min(scale, 768 / min(width, height))
    across, down = (max(1, -(-round(side * scale) // 512)) for side in (width, height))
    return 85 + 170 * across * down


def media(part: Part, family: Family) -> Tokens:
    """Tokens of a part that is no text, from its size alone.

    Audio: ten tokens a second at 16 kB a second. Files: a page of 2,000 tokens per 100 kB, at
    least one page and at most a hundred, because scans are large and their pages still count once.
    """
    if part.kind is PartKind.IMAGE:
        return image(part.width, part.height, part.detail, family)
    if part.kind is PartKind.AUDIO:
        return min(100_000, max(500, part.count // 1_600))
    if part.kind is PartKind.FILE:
        return min(200_000, max(2_000, part.count // 50))
    return max(0, part.count)


# --- counting ---------------------------------------------------------------------------------

Key: TypeAlias = tuple[str, str, int | bytes]
"""Tenant, encoding, fingerprint. The tenant, lest timing reveals what others have sent."""


def fingerprint(text: str) -> int | bytes:
    """What stands for a text: Python's own keyed hash of 64 bits, BLAKE2b-128 of a long one.

    The key of that hash is the process's secret, and 50,000 of its values meet by chance once in
    10^10 processes. Hashing a long text would hold the interpreter; BLAKE2b lets it go. Lone
    surrogates are taken as they are (docs/adr/0032).
    """
    if len(text) <= HASH_SHORT:
        return hash(text)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class _Counts:
    """Key → count, at most `CACHED`, the half least recently used forgotten at once."""

    __slots__ = ("_new", "_old")

    def __init__(self) -> None:
        self._new: dict[Key, Tokens] = {}
        self._old: dict[Key, Tokens] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def peek(self, key: Key) -> Tokens | None:
        """The count, without remembering that it was used: safe in any thread."""
        count = self._new.get(key)
        return self._old.get(key) if count is None else count

    def get(self, key: Key) -> Tokens | None:
        """The count, kept for longer."""
        count = self._new.get(key)
        if count is None:
            count = self._old.pop(key, None)
            if count is not None:
                self.put(key, count)
        return count

    def put(self, key: Key, count: Tokens) -> None:
        """The count is remembered."""
        if len(self._new) >= CACHED // 2:
            self._old, self._new = self._new, {}
        self._new[key] = count


@dataclass(slots=True)
class _Text:
    """A text to be counted; `key` has b"" while it is unhashed, is None where not cached."""

    text: str
    key: Key | None = None
    count: Tokens | None = None


class _Job:
    """Texts of one call, counted in a thread or in turns; the loop may stop it at any time."""

    __slots__ = ("_at", "_counts", "_encoder", "stopped", "texts")

    def __init__(self, encoder: Encoder, texts: list[_Text], counts: _Counts) -> None:
        self._encoder = encoder
        self._counts = counts
        self._at = 0
        self.texts = texts
        self.stopped = False

    @property
    def over(self) -> bool:
        """Nothing is left to do."""
        return self.stopped or self._at == len(self.texts)

    def run(self, most: int = MAX_UNCACHED) -> None:
        """Every text has its count, unless the job was stopped or `most` characters were counted.

        A text that the encoder fails at is passed: the next run goes on behind it.
        """
        while most > 0 and not self.over:
            item = self.texts[self._at]
            self._at += 1
            if item.key is not None and item.key[2] == b"":
                item.key = (item.key[0], item.key[1], fingerprint(item.text))
                item.count = self._counts.peek(item.key)
            if item.count is None:
                most -= len(item.text)
                item.count = self._measure(item.text)

    def _measure(self, text: str) -> Tokens | None:
        total = 0
        for piece in slices(text):
            if self.stopped:
                return None
            total += len(self._encoder.encode_ordinary(piece))
        return total


class _Turns:
    """Jobs that share the loop: each round of it counts some texts of one of them, in rotation."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[tuple[_Job, Callable[[], None]]] = deque()

    def add(self, job: _Job, then: Callable[[], None]) -> None:
        """The job is under way; `then` is called once it is over."""
        self._waiting.append((job, then))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        job, then = self._waiting[0]
        try:
            with contextlib.suppress(*FAULTS):
                job.run(INLINE)
        finally:  # whatever an encoder throws, the others go on
            if job.over:
                self._waiting.popleft()
                then()
            else:
                self._waiting.rotate(-1)
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._turn)


# To ask an enumeration for a member costs ten times what a name does.
_OVERHEAD = PartKind.OVERHEAD


class Counter:
    """Counts prompts. One per process, used from one event loop.

    Args:
        open_encoding: Gives an encoder by name, usually `Vocabulary(folder).open`.
        clock: For the patience of calls.
        inline: Never use a thread: for virtual time, where threads do not exist.
    """

    def __init__(self, open_encoding: Open, *, clock: Clock, inline: bool = False) -> None:
        self._open = open_encoding
        self._clock = clock
        self._inline = inline
        self._encoders: dict[str, Encoder | Missing] = {}
        self._loading: dict[str, Future[Encoder | Missing]] = {}
        self._counts = _Counts()
        self._words: dict[tuple[str, str], Tokens] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._turns = _Turns()
        self._jobs: set[_Job] = set()

    @property
    def cached(self) -> int:
        """Counts remembered."""
        return len(self._counts)

    @property
    def busy(self) -> int:
        """Places taken, at most `PLACES`."""
        return len(self._jobs)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each encoding asked for and not there."""
        return tuple(e.warning for e in self._encoders.values() if isinstance(e, Missing))

    def exact(self, encoding: str) -> bool:
        """Whether the encoding is loaded: for readiness and `tidegate_tokenizer_exact`."""
        return not isinstance(self._encoders.get(encoding) or Missing(""), Missing)

    async def preload(self, encodings: Iterable[str]) -> tuple[str, ...]:
        """The encodings are loaded, those missing before are tried again; returns the warnings.

        Call it before serving and before a new policy is swapped in: building an encoder holds the
        interpreter for 0.2 s. `gc.freeze()` afterwards spares the collector what it made.
        """
        for name in encodings:
            if not self.exact(name):
                future = self._load(name)
                await self._patiently(future, None)
                self._loaded(name, future)
        return self.warnings

    def close(self) -> None:
        """Running counts stop at their next slice; calls still waiting get estimates."""
        for job in self._jobs:
            job.stopped = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def count(
        self,
        parts: Iterable[Piece],
        *,
        encoding: str,
        tenant: str,
        family: Family = Family.OPENAI,
    ) -> Counted | Awaitable[Counted]:
        """The tokens of a prompt: at once if little of it is new, else a coroutine to await.

        Args:
            parts: Pieces of the prompt.
            encoding: tiktoken's name, of the deployment to be tried.
            tenant: Whose cached counts may answer.
            family: Whose rule counts images.
        """
        total = 0
        new: list[_Text] = []
        size = 0
        direct = SMALL
        may_hash = HASH_INLINE
        find = self._counts.get
        words = self._words
        encoder = self._encoders.get(encoding)
        ready = encoder if encoder is not None and not isinstance(encoder, Missing) else None
        for part in parts:
            if not isinstance(part, str):
                over = part.kind is _OVERHEAD
                total += part.count if over else media(part, family)
                continue
            length = len(part)
            key: Key | None = None
            if length < DIRECT:
                known = words.get((encoding, part))
            elif length > may_hash:
                key, known = (tenant, encoding, b""), None
            else:
                may_hash -= length
                key = (tenant, encoding, fingerprint(part))
                known = find(key)
            if known is None and ready is not None and length <= direct:
                direct -= length
                known = self._short(ready, encoding, part, key)
            if known is not None:
                total += known
                continue
            if part:
                new.append(_Text(part, key))
                size += length
        return self._rest(encoding, total, new, size) if new else Counted(total)

    def _short(self, encoder: Encoder, encoding: str, text: str, key: Key | None) -> Tokens | None:
        """Tokens of a short text, counted on the spot; None where the encoder fails."""
        try:
            count = len(encoder.encode_ordinary(text))
        except FAULTS:
            return None
        if key is not None:
            self._counts.put(key, count)
        elif text in ROLES:
            self._words[encoding, text] = count
        return count

    async def local_count(
        self,
        parts: Iterable[Piece],
        *,
        encoding: str,
        tenant: str,
        family: Family = Family.ANTHROPIC,
    ) -> Tokens:
        """What the gateway itself answers to `count_tokens`; estimates are not told apart there."""
        counted = self.count(parts, encoding=encoding, tenant=tenant, family=family)
        return (counted if isinstance(counted, Counted) else await counted).tokens

    def _rest(
        self, encoding: str, total: Tokens, new: list[_Text], size: int
    ) -> Counted | Awaitable[Counted]:
        encoder = self._encoders.get(encoding)
        if encoder is None and self._inline:
            encoder = self._loaded(encoding, self._load(encoding))
        if isinstance(encoder, Missing):
            return self._sum(total, new, "vocabulary")
        if size > MAX_UNCACHED:
            return self._sum(total, new, "size")
        if encoder is None:
            return self._when_loaded(encoding, total, new, size)
        if size <= INLINE or self._inline:
            with contextlib.suppress(*FAULTS):
                _Job(encoder, new, self._counts).run()
            return self._sum(total, new, "fault")
        if size <= IN_TURNS and max([len(item.text) for item in new]) <= INLINE:
            return self._in_turns(encoder, total, new)
        return self._in_thread(encoder, total, new)

    def _sum(self, total: Tokens, texts: list[_Text], otherwise: str) -> Counted:
        """All texts together: counted where they were, estimated where not, for that reason."""
        exact = True
        for item in texts:
            if item.count is None:
                exact = False
                total += guess(item.text)
            else:
                total += item.count
                if item.key is not None:
                    self._counts.put(item.key, item.count)
        return Counted(total) if exact else Counted(total, exact=False, because=otherwise)

    async def _in_turns(self, encoder: Encoder, total: Tokens, new: list[_Text]) -> Counted:
        if len(self._jobs) >= PLACES:
            return self._sum(total, new, "busy")
        job = _Job(encoder, new, self._counts)
        ended = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        timer = self._clock.after(PATIENCE, end)
        self._jobs.add(job)
        self._turns.add(job, end)
        try:
            await ended
        finally:
            late = not job.over or job.stopped
            job.stopped = True  # also when the client hung up: no further turn is spent on it
            self._jobs.discard(job)
            timer.cancel()
        return self._sum(total, new, "slow" if late else "fault")

    async def _in_thread(self, encoder: Encoder, total: Tokens, new: list[_Text]) -> Counted:
        if len(self._jobs) >= PLACES:
            return self._sum(total, new, "busy")
        job = _Job(encoder, new, self._counts)
        future = self._submit(job.run)
        if future is None:
            return self._sum(total, new, "busy")
        self._jobs.add(job)
        future.add_done_callback(_on_loop(lambda: self._jobs.discard(job)))
        try:
            await self._patiently(future)
        finally:
            # Also when the client hung up: the thread ends at its next slice.
            job.stopped = True
            future.cancel()
        late = not future.done() or future.cancelled()
        return self._sum(total, new, "slow" if late else "fault")

    async def _when_loaded(
        self, encoding: str, total: Tokens, new: list[_Text], size: int
    ) -> Counted:
        future = self._load(encoding)
        if not await self._patiently(future):
            return self._sum(total, new, "vocabulary")
        self._loaded(encoding, future)
        counted = self._rest(encoding, total, new, size)
        return counted if isinstance(counted, Counted) else await counted

    def _load(self, name: str) -> Future[Encoder | Missing]:
        """The one load of that encoding under way."""
        future = self._loading.get(name)
        if future is None:
            submitted = None if self._inline else self._submit(lambda: self._open(name))
            if submitted is None:
                submitted = Future()
                submitted.set_result(self._open(name))
            future = self._loading[name] = submitted
        return future

    def _loaded(self, name: str, future: Future[Encoder | Missing]) -> Encoder | Missing:
        self._loading.pop(name, None)
        error: object = "closed" if future.cancelled() else future.exception()
        made = Missing(f"tokens are estimated: {name}: {error}") if error else future.result()
        self._encoders[name] = made
        return made

    def _submit(self, work: Callable[[], _T]) -> Future[_T] | None:
        """The work under way in a thread; None once closed."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        try:
            return self._pool.submit(work)
        except RuntimeError:  # shut down
            return None

    async def _patiently(self, future: Future[_T], patience: Micros | None = PATIENCE) -> bool:
        """Whether the future was done in time; it is neither cancelled nor read."""
        if future.done():
            return True
        over = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not over.done():
                over.set_result(None)

        future.add_done_callback(_on_loop(end))
        timer = None if patience is None else self._clock.after(patience, end)
        try:
            await over
        finally:
            if timer is not None:
                timer.cancel()
        return future.done()


def _on_loop(callback: Callable[[], None]) -> Callable[[object], None]:
    """The callback for any thread: runs in the loop that is running now, unless that has closed."""
    loop = asyncio.get_running_loop()

    def call(_: object) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback)

    return call
