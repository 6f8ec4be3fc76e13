"""Metrics of several processes on one page: each sample gets a label that names its process."""

from __future__ import annotations


def merged(pages: dict[str, bytes]) -> bytes:
    """One page of all; a family's help and type stand once, its samples together.

    Args:
        pages: Prometheus text by the name of the process; read leniently, since a page that is cut
            must not take the others with it.
    """
    heads: dict[str, list[bytes]] = {}
    samples: dict[str, list[bytes]] = {}
    for name, page in pages.items():
        label = b'worker="' + name.encode() + b'"'
        family = ""
        for line in page.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2].decode("utf-8", "replace")
                known = heads.setdefault(family, [])
                samples.setdefault(family, [])
                if line not in known and len(known) < 2:
                    known.append(line)
            elif line and not line.startswith(b"#") and family:
                samples[family].append(_labelled(line, label))
    out: list[bytes] = []
    for family, head in heads.items():
        out += head
        out += samples[family]
    return b"\n".join([*out, b""])


def _labelled(line: bytes, label: bytes) -> bytes:
    """The sample with one label more, its first."""
    name, brace, rest = line.partition(b"{")
    if brace and b" " not in name:
        return name + b"{" + label + (b"" if rest.startswith(b"}") else b",") + rest
    name, _, value = line.partition(b" ")
    return name + b"{" + label + b"} " + value
