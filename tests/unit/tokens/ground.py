"""What the tests of tokens.py stand on: tiktoken over a tiny vocabulary, a clock moved by hand."""

from __future__ import annotations

import base64
import threading

from gateway.clock import Timer
from gateway.tokens import PINNED, Encoder, Missing, encoder

MERGES = (
    "th", "the", " t", " th", " the", "in", "an", "and", " a", " and", "\n\n", "\n\n\n\n", "  ",
    "    ", "aa", "aaaa", "<|", "|>", "end", "of", "text", "endof", "endoftext", "12", "123", "/\n",
    "!\n",
)  # fmt: skip


def vocabulary() -> bytes:
    """A vocabulary in tiktoken's form: all single bytes, then the merges."""
    pieces = [bytes([byte]) for byte in range(256)]
    for merge in MERGES:
        for size in range(2, len(merge) + 1):  # each merge needs its beginnings
            if merge[:size].encode() not in pieces:
                pieces.append(merge[:size].encode())
    lines = [base64.b64encode(piece) + b" %d" % rank for rank, piece in enumerate(pieces)]
    return b"\n".join(lines) + b"\n"


SMALL = {name: encoder(name, pinned.pattern, vocabulary()) for name, pinned in PINNED.items()}
"""Real tiktoken with the real splitting patterns, without a file."""


def small(name: str) -> Encoder | Missing:
    """Opens the small encoders."""
    return SMALL.get(name) or Missing(f"no {name}")


class HandClock:
    """Time that stands still; timers fire when told."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def now(self) -> int:
        return 0

    def wall(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")

    def after(self, delay: int, callback) -> Timer:
        timer = Timer(delay, callback)
        self.timers.append(timer)
        return timer

    def alarm(self, at: int, callback) -> Timer:
        return self.after(at, callback)

    def fire(self) -> None:
        """Every timer set so far is due."""
        due, self.timers = self.timers, []
        for timer in due:
            timer.fire()


class Gate:
    """An encoder that counts characters and waits at its gate first."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.pieces: list[int] = []

    def encode_ordinary(self, text: str) -> list[int]:
        self.pieces.append(len(text))
        self.entered.set()
        assert self.open.wait(10)
        return [0] * len(text)


class Words:
    """An encoder that counts words and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode_ordinary(self, text: str) -> list[int]:
        self.seen.append(text)
        return [0] * len(text.split())
