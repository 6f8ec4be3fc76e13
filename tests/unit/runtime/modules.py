"""Modules built byte by byte, so that tests can hold what no assembler would write."""

from __future__ import annotations

from runtime.instrument.module import ORDER, encode, uleb


def vec(items: list[bytes]) -> bytes:
    return uleb(len(items)) + b"".join(items)


def name(text: str) -> bytes:
    return uleb(len(text)) + text.encode()


def body(code: bytes, local_groups: list[tuple[int, int]] | None = None) -> bytes:
    groups = vec([uleb(count) + bytes([kind]) for count, kind in local_groups or []])
    content = groups + code + b"\x0b"
    return uleb(len(content)) + content


def wasm(
    bodies: list[bytes],
    *,
    types: list[bytes] | None = None,
    of_type: list[int] | None = None,
    exports: list[tuple[str, int, int]] | None = None,
    imports: list[tuple[str, str, int]] | None = None,
    **sections: bytes,
) -> bytes:
    """A module of these function bodies (type 0 is () -> ()), with further raw sections by `sN`."""
    parts = {
        1: vec(types or [b"\x60\0\0"]),
        3: vec([uleb(one) for one in of_type or [0] * len(bodies)]),
        10: vec(bodies),
    }
    if imports:
        parts[2] = vec([name(m) + name(n) + b"\0" + uleb(t) for m, n, t in imports])
    if exports:
        parts[7] = vec([name(n) + bytes([k]) + uleb(i) for n, k, i in exports])
    parts |= {int(key[1:]): content for key, content in sections.items()}
    return encode([(ident, parts[ident]) for ident in ORDER if ident in parts])
