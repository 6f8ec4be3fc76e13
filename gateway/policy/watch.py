"""Hot reload: build whole, then swap one reference. A bad file never replaces a good one.

The watch asks twice a second whether anything it was built from has changed (file, folder, secret
files; symlinks followed, so that a Kubernetes mount that swaps `..data` is seen), waits until the
change has settled, loads and compiles away from the loop, and swaps `current` between two awaits.
Calls keep the snapshot they began with. Polling is deliberate: inotify misses network mounts and
overlay file systems, and ten stats a second cost nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from gateway.errors import PolicyError
from gateway.policy.compile import compile as compiled
from gateway.policy.load import SUFFIXES, load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from gateway.clock import Clock
    from gateway.policy.load import Policy
    from gateway.snapshot import Snapshot

EVERY = 0.5
"""Seconds between two looks; a change acts within two of them plus the time to load."""

RETRY_AFTER_LOOKS = 20
"""After so many looks a refused policy is tried again: what it lacks (a secret file that does not
exist yet) may be something the watch does not know of."""

MAX_ENTRIES = 1_000
"""Entries of a folder looked at."""

Stamp: TypeAlias = "dict[str, tuple[int, int, int, int] | None]"


class Origin(Protocol):
    """Where a policy comes from; all methods may block."""

    def load(self) -> Policy:
        """The policy. Raises PolicyError."""
        ...

    def stamp(self, watched: tuple[Path, ...]) -> Stamp:
        """What would differ if anything had changed; None for what does not exist."""
        ...


class Files:
    """A policy file or folder on disk."""

    def __init__(self, path: Path, *, env: Mapping[str, str]) -> None:
        self.path = path
        self._env = env

    def load(self) -> Policy:
        """The policy as it stands."""
        return load(self.path, env=self._env)

    def stamp(self, watched: tuple[Path, ...]) -> Stamp:
        """Device, inode, size and time of each file, symlinks followed."""
        paths = {self.path, *watched}
        try:
            if self.path.is_dir():
                entries = (e for e in self.path.iterdir() if e.suffix in SUFFIXES)
                paths.update(entry for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False))
        except OSError:
            pass  # the stamp of the folder itself tells
        return {str(path): _stat(path) for path in paths}


def _stat(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """How the policy stands, for status and metrics.

    Attributes:
        loaded_at: Wall-clock seconds of the last swap.
        changed_at: When the newest of its files was written, micros since the epoch: of two
            gateways' policies the later one holds for what they share.
        last_error: Problems of the last refused load, a line each; "" after a good one.
        failed_at: Wall-clock seconds of that load; 0 if the last was good.
        refused: Loads refused since the start.
        warnings: Of the policy in force.
    """

    revision: int
    digest: str
    loaded_at: float
    files: tuple[str, ...]
    changed_at: int = 0
    last_error: str = ""
    failed_at: float = 0.0
    refused: int = 0
    warnings: tuple[str, ...] = ()


class PolicyWatch:
    """The policy in force, and its successor when there is one.

    Attributes:
        current: The snapshot for new calls. Read it once per call.
        status: How the policy stands.
        on_swap: Called with (old, new) after each swap, in order; must not block.
        on_refused: Called with the problems after each refused load whose problems are new.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        clock: Clock,
        off_loop: Callable[[Callable[[], object]], Awaitable[object]] = asyncio.to_thread,
    ) -> None:
        """Loads the first policy, blocking.

        Args:
            origin: Where it comes from.
            clock: Time.
            off_loop: Runs a blocking function away from the loop.

        Raises:
            PolicyError: There is no good policy to begin with.
        """
        self._origin = origin
        self._clock = clock
        self._off_loop = off_loop
        before = origin.stamp(())
        policy = origin.load()
        self._stamp = _kept(before, origin.stamp(policy.watched))
        self._fingerprint = policy.fingerprint
        self._watched = policy.watched
        self._asked = False
        self.current: Snapshot = compiled(policy, revision=1)
        self.status = self._good(policy, self.current)
        self.on_swap: list[Callable[[Snapshot, Snapshot], None]] = []
        self.on_refused: list[Callable[[str], None]] = []

    def poke(self) -> None:
        """Load anew at the next look, changed or not: for SIGHUP, from a signal handler."""
        self._asked = True

    async def run(self) -> None:
        """Watch until cancelled."""
        seen: Stamp | None = None
        looks_since_refusal = 0
        while True:
            await self._clock.sleep(EVERY)
            now = await self._look()
            refused = bool(self.status.last_error)
            looks_since_refusal = looks_since_refusal + 1 if refused else 0
            settled = now != self._stamp and now == seen
            if self._asked or settled or looks_since_refusal >= RETRY_AFTER_LOOKS:
                self._asked = False
                looks_since_refusal = 0
                await self.reload()
                seen = None
            else:
                seen = now

    async def _look(self) -> Stamp:
        found = await self._off_loop(lambda: self._origin.stamp(self._watched))
        assert isinstance(found, dict)  # noqa: S101 - the runner returns what it ran
        return found

    async def reload(self) -> bool:
        """Load, validate, compile, swap. True if the policy on disk is now in force.

        An unchanged policy is in force already: no swap, no new revision. If another load has
        swapped meanwhile, what was read may be older than that: it is read again.
        """
        before = self.current
        outcome = await self._off_loop(lambda: self._build(before.revision + 1))
        assert isinstance(outcome, _Built)  # noqa: S101 - the runner returns what it ran
        if self.current is not before:
            return await self.reload()
        self._stamp = outcome.stamp
        if outcome.policy is None or outcome.snapshot is None:
            self._refuse(outcome.problems)
            return False
        self._watched = outcome.policy.watched
        if outcome.policy.fingerprint == self._fingerprint:
            self.status = replace(self.status, last_error="", failed_at=0.0)
            return True
        self.current = outcome.snapshot
        self._fingerprint = outcome.policy.fingerprint
        self.status = self._good(outcome.policy, outcome.snapshot)
        for callback in self.on_swap:
            callback(before, outcome.snapshot)
        return True

    def _build(self, revision: int) -> _Built:
        """Everything that blocks. The stamp is taken first, so that a change meanwhile is seen."""
        stamp = self._origin.stamp(self._watched)
        try:
            policy = self._origin.load()
            snapshot = compiled(policy, revision=revision)
        except PolicyError as wrong:
            return _Built(stamp=stamp, problems=str(wrong))
        except Exception as wrong:  # noqa: BLE001 - a defect of ours must not take a good policy away
            # Its text could repeat a value of the file, so only its kind is told.
            return _Built(stamp=stamp, problems=f"loading failed: {type(wrong).__name__}")
        return _Built(
            stamp=_kept(stamp, self._origin.stamp(policy.watched)),
            policy=policy,
            snapshot=snapshot,
        )

    def _refuse(self, problems: str) -> None:
        new = problems != self.status.last_error
        self.status = replace(
            self.status,
            last_error=problems,
            failed_at=self._clock.wall(),
            refused=self.status.refused + 1,
        )
        if new:
            for callback in self.on_refused:
                callback(problems)

    def _good(self, policy: Policy, snapshot: Snapshot) -> PolicyStatus:
        return PolicyStatus(
            revision=snapshot.revision,
            digest=snapshot.digest,
            loaded_at=self._clock.wall(),
            changed_at=max((seen[3] // 1_000 for seen in self._stamp.values() if seen), default=0),
            files=policy.files,
            refused=self.status.refused if hasattr(self, "status") else 0,
            warnings=tuple(str(warning) for warning in policy.warnings),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """Outcome of one load."""

    stamp: Stamp
    policy: Policy | None = None
    snapshot: Snapshot | None = None
    problems: str = ""


def _kept(before: Stamp, after: Stamp) -> Stamp:
    """The later stamp's files, as they were before the load where that is known."""
    return {path: before.get(path, found) for path, found in after.items()}
