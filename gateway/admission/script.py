"""The function libraries that run in the shared store: their names and their sources."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path


@cache
def library(file: str = "admit") -> tuple[str, bytes]:
    """Name of library and function, and the source to load it from; the pool core by default.

    The name holds a digest of the content: two releases that differ never call each other's code;
    whether they understand each other's state is said by the layout number in that state.
    """
    body = Path(__file__).with_name(f"{file}.lua").read_bytes()
    name = f"tidegate_{file}_{sha1(body, usedforsecurity=False).hexdigest()[:12]}"
    return name, f"#!lua name={name}\nlocal NAME = '{name}'\n".encode() + body
