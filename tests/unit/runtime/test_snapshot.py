"""Snapshots: what goes in comes out, and what was touched does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime import snapshot
from runtime.abi import Pending, State, request
from runtime.errors import SnapshotCorrupt, SnapshotMismatch

KEY = b"k" * 32
HERE = snapshot.Identity(plain_hash="p", module_hash="m", arch="x86_64")
NAN_WITH_PAYLOAD = 0x7FF0_DEAD_BEEF_0001


def image(memory: bytes = b"", **changes) -> snapshot.Image:
    whole = snapshot.Image(
        identity=HERE,
        step=1,
        arguments=(1, 2**64 - 1),
        pending=None,
        globals={"__g0": (0, 5), "__g1": (3, NAN_WITH_PAYLOAD)},
        memory=memory,
        stack=b"\x07" * 80,
        state=State(argv=["a", "ü"], files={"/agent/main.js": b"x" * 5_000}, inbox=b"\xff\0"),
    )
    return replace(whole, **changes)


def pages(**at: bytes) -> bytes:
    """Three wasm pages with these bytes at page numbers `pN` of 4 KiB."""
    memory = bytearray(3 * 65_536)
    for name, content in at.items():
        start = int(name[1:]) * 4_096
        memory[start : start + len(content)] = content
    return bytes(memory)


def back(data: bytes, **more) -> snapshot.Image:
    return snapshot.restore([snapshot.decode(data, KEY)], **more)


def test_an_image_comes_back_whole():
    waiting = Pending(request("tool.call", {"name": "t", "args": {"ä": 1}}, 4), {"via": "channel"})
    before = image(pages(p0=b"abc", p47=b"z" * 4_096), pending=waiting)
    assert back(snapshot.encode(before, KEY)) == before


def test_a_float_keeps_the_payload_of_its_nan():
    assert back(snapshot.encode(image(), KEY)).globals["__g1"] == (3, NAN_WITH_PAYLOAD)


def test_zeros_cost_nothing():
    assert len(snapshot.encode(image(bytes(100 * 65_536)), KEY)) < 2_000


def test_a_page_that_became_zero_is_recorded():
    parent = image(pages(p3=b"x" * 4_096, p9=b"y"))
    first = snapshot.encode(parent, KEY)
    child = image(pages(p9=b"y"))
    second = snapshot.encode(
        child, KEY, kind="delta", beneath=(snapshot.ident(first), parent.memory)
    )
    chain = [snapshot.decode(first, KEY), snapshot.decode(second, KEY)]
    assert chain[1].runs == [(3, 1, None)]
    assert snapshot.restore(chain) == child


def test_a_full_snapshot_holds_only_what_differs_from_its_base():
    base = ("base-1", pages(p1=b"interpreter" * 300))
    now = image(pages(p1=b"interpreter" * 300, p2=b"mine"))
    data = snapshot.encode(now, KEY, beneath=base)
    assert [run[:2] for run in snapshot.decode(data, KEY).runs] == [(2, 1)]
    assert back(data, base=base) == now
    with pytest.raises(SnapshotMismatch, match="base-1"):
        back(data, base=("base-2", base[1]))


def test_files_may_stay_outside_but_not_be_others():
    data = snapshot.encode(image(), KEY, embed_files=False)
    assert len(data) < len(snapshot.encode(image(), KEY))
    assert back(data, files={"/agent/main.js": b"x" * 5_000}) == image()
    with pytest.raises(SnapshotCorrupt, match="files are not those"):
        back(data, files={"/agent/main.js": b"y"})


def test_no_bit_of_a_snapshot_can_be_flipped():
    data = snapshot.encode(image(pages(p0=b"abc")), KEY)
    for place in range(0, len(data), 7):
        for bit in (0, 7):
            altered = bytearray(data)
            altered[place] ^= 1 << bit
            with pytest.raises(SnapshotCorrupt):
                snapshot.decode(bytes(altered), KEY)


def test_no_prefix_of_a_snapshot_is_one():
    data = snapshot.encode(image(), KEY)
    for size in [*range(200), *range(200, len(data), 11)]:
        with pytest.raises(SnapshotCorrupt):
            snapshot.decode(data[:size], KEY)
    with pytest.raises(SnapshotCorrupt):
        snapshot.decode(data + b"\0", KEY)


def test_another_key_opens_nothing():
    with pytest.raises(SnapshotCorrupt, match="another snapshot key"):
        snapshot.decode(snapshot.encode(image(), KEY), b"j" * 32)


def header() -> dict:
    return dict(snapshot.decode(snapshot.encode(image(pages(p1=b"a")), KEY), KEY).header)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("raw", 1 << 29),
        ("raw", -1),
        ("memory", 1 << 40),
        ("memory", 5),
        ("runs", 10**9),
        ("stack", 10**9),
        ("inbox", "many"),
        ("memory", True),
        ("embedded", {"/x": -5}),
        ("embedded", [1]),
        ("globals", {"__g0": [0, "zz"]}),
        ("wasi", {}),
        ("state", {"is": "waiting"}),
        ("state", None),
        ("arguments", 7),
    ],
)
def test_a_signed_header_is_still_not_believed(field, value):
    """A holder of the key can sign anything; it must not crash us or inflate without end."""
    body = snapshot.encode(image(pages(p1=b"a")), KEY)
    sizes = snapshot.HEAD.unpack_from(body)
    packed = body[snapshot.HEAD.size + sizes[3] : -snapshot.HASH]
    raw = snapshot._inflate(packed, header()["raw"])
    forged = snapshot.seal({**header(), field: value}, raw, KEY, flags=1)
    with pytest.raises(SnapshotCorrupt):
        back(forged)


def test_a_bomb_is_refused_before_it_is_inflated():
    bomb = snapshot.seal({**header(), "raw": 90_000}, bytes(1 << 26), KEY, flags=1)
    with pytest.raises(SnapshotCorrupt, match="declared size"):
        snapshot.decode(bomb, KEY)


def test_a_later_format_is_named():
    data = bytearray(snapshot.encode(image(), KEY))
    data[4] = 9
    resealed = bytes(data[: -snapshot.HASH])
    tag = snapshot.hashlib.blake2b(resealed, key=KEY, digest_size=32).digest()
    with pytest.raises(SnapshotMismatch, match="format 9"):
        snapshot.decode(resealed + tag, KEY)


@pytest.mark.parametrize("field", ["plain_hash", "module_hash", "variant", "abi", "shim", "nan"])
def test_another_module_is_refused_by_name(field):
    with pytest.raises(SnapshotMismatch, match=field):
        snapshot.fits(image(), replace(HERE, **{field: "other"}))


def test_another_processor_needs_canonical_nans():
    elsewhere = replace(HERE, arch="aarch64")
    with pytest.raises(SnapshotMismatch, match="aarch64"):
        snapshot.fits(image(), elsewhere)
    moved = replace(HERE, nan="canonical")
    snapshot.fits(image(identity=moved), replace(elsewhere, nan="canonical"))


def test_a_chain_is_one_full_snapshot_and_its_own_deltas():
    first = snapshot.encode(image(pages(p0=b"1")), KEY)
    other = snapshot.encode(image(pages(p0=b"2")), KEY)
    delta = snapshot.encode(
        image(pages(p0=b"3")), KEY, kind="delta", beneath=(snapshot.ident(first), pages(p0=b"1"))
    )
    full, wrong, last = (snapshot.decode(one, KEY) for one in (first, other, delta))
    assert snapshot.restore([full, last]).memory == pages(p0=b"3")
    for chain in ([wrong, last], [last], [full, full], [], [last, full]):
        with pytest.raises(SnapshotMismatch):
            snapshot.restore(chain)
