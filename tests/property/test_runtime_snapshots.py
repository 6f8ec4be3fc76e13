"""Random histories of memory through chains of snapshots: always what was captured."""

from __future__ import annotations

import contextlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import snapshot
from runtime.abi import State
from runtime.errors import SnapshotCorrupt, SnapshotMismatch

KEY = b"k" * 32
HERE = snapshot.Identity(plain_hash="p", module_hash="m", arch="x86_64")


def image(memory: bytes) -> snapshot.Image:
    return snapshot.Image(
        identity=HERE, step=0, arguments=(), pending=None, globals={}, memory=memory,
        stack=bytes(64), state=State(argv=[]),
    )  # fmt: skip


@st.composite
def histories(draw) -> list[bytes]:
    """Memories after each slice: pages written, zeroed, left, and memory grown."""
    size = draw(st.integers(0, 3))
    memory = bytearray(size * 65_536)
    out = [bytes(memory)]
    for _ in range(draw(st.integers(1, 6))):
        memory += bytes(65_536 * draw(st.sampled_from([0, 0, 0, 1])))
        for _ in range(draw(st.integers(0, 5)) if memory else 0):
            page = draw(st.integers(0, len(memory) // 4_096 - 1)) * 4_096
            content = draw(
                st.sampled_from([bytes(4_096), b"x" * 4_096, b"\0" * 4_095 + b"y", b"z"])
            )
            memory[page : page + len(content)] = content
        out.append(bytes(memory))
    return out


@settings(max_examples=150, deadline=None)
@given(histories(), st.booleans())
def test_every_point_of_a_history_comes_back(history, based):
    base = ("base", b"q" * 65_536) if based else ("", b"")
    first = snapshot.encode(image(history[0]), KEY, beneath=base)
    chain = [snapshot.decode(first, KEY)]
    before = (snapshot.ident(first), history[0])
    assert snapshot.restore(chain, base=base).memory == history[0]
    for memory in history[1:]:
        data = snapshot.encode(image(memory), KEY, kind="delta", beneath=before)
        chain.append(snapshot.decode(data, KEY))
        assert snapshot.restore(chain, base=base).memory == memory
        before = (snapshot.ident(data), memory)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_a_resigned_mutant_is_refused_or_restores_an_image(seed, cuts):
    """Behind the hash: header and body bytes altered and signed again never crash the reader."""
    rng = random.Random(seed)
    whole = snapshot.encode(image(b"a" * 4_096 + bytes(61_440)), KEY)
    data = bytearray(whole[: -snapshot.HASH])
    for _ in range(cuts):
        data[rng.randrange(len(data))] = rng.randrange(256)
    tag = snapshot.hashlib.blake2b(bytes(data), key=KEY, digest_size=32).digest()
    with contextlib.suppress(SnapshotCorrupt, SnapshotMismatch):
        snapshot.restore([snapshot.decode(bytes(data) + tag, KEY)])
