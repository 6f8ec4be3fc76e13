"""Faults of the sandbox room.

```
SandboxError           abstract: code
├─ ModuleRefused       registration said no: code, sentence, function, offset
├─ SnapshotCorrupt     bytes that are not what they claim to be: never half-loaded
├─ SnapshotMismatch    sound bytes of another module, version, machine or owner
├─ HostCallRefused     a request the host does not serve
├─ GuestMissing        an interpreter that is not installed
└─ SettingsError       a variable that cannot be read
```

How a slice ended (preempted, waiting, trapped) is an outcome, a value of `sandbox.py`, not a fault.
"""

from __future__ import annotations


class SandboxError(Exception):
    """Root of this room's faults; `code` is stable and goes to logs and metrics."""

    code = "sandbox"


class ModuleRefused(SandboxError):
    """The module cannot be made suspendable, or is not a module.

    Args:
        code: `malformed`, `too_large`, `unsupported:<feature>`, `instrumentation_failed`,
            `invalid_output`, `syntax`, `diverged`, `untestable` or `compile_failed`.
        sentence: What was found, in one sentence.
        function: Index of the function in the module's own numbering, where one is to blame.
        offset: Byte offset in the file, where known.
    """

    def __init__(
        self, code: str, sentence: str, *, function: int | None = None, offset: int | None = None
    ) -> None:
        super().__init__(code, sentence, function, offset)
        self.code = code
        self.sentence = sentence
        self.function = function
        self.offset = offset

    def __str__(self) -> str:
        """`code: sentence in function N at 0xOFFSET`."""
        where = f" in function {self.function}" if self.function is not None else ""
        where += f" at 0x{self.offset:x}" if self.offset is not None else ""
        return f"{self.code}: {self.sentence}{where}"


class SnapshotCorrupt(SandboxError):
    """Truncated, altered or unreadable snapshot bytes."""

    code = "snapshot_corrupt"


class SnapshotMismatch(SandboxError):
    """A sound snapshot that does not belong here: other module, format, processor, epoch."""

    code = "snapshot_mismatch"


class HostCallRefused(SandboxError):
    """A host call answered with an error reply of this code."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.retryable = retryable


class GuestMissing(SandboxError):
    """An interpreter is not installed here, and why."""

    code = "guest_missing"


class SettingsError(SandboxError):
    """A TIDEGATE_* variable of the runtime cannot be used."""

    code = "settings"
