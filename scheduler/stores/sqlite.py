"""SQLite behind the TaskStore protocol: one writer thread with group commit, one reading thread.

The law of this file: `BEGIN IMMEDIATE … COMMIT` with WAL and `synchronous=FULL` around a *group* of
operations, each in a savepoint of its own, and an operation is answered only after the commit that
holds it. Reads see committed rows through a connection of their own. The event loop never waits for
a disk.

Several processes may share the file. Writers queue on a lock file (`flock`) around each group
instead of SQLite's busy handler, whose sleeping costs up to half a second. Ownership (who may claim
and recover) is another lock file held for the life of the process: the kernel lets go of it however
the process ends. Both are worth nothing on network file systems, which are refused.
Source: `execution.md` §3 and §15; SQLite "Write-Ahead Logging", §8.

Weakness: bodies are BLOBs in the database; bodies of megabytes cost their size twice (WAL and
checkpoint). Segment files (`execution.md` §3) come with snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler.errors import (
    HoldsFull,
    IllegalTransition,
    KeyReused,
    SchedulerError,
    StaleEpoch,
    StoreFault,
    UnknownHold,
)
from scheduler.holds import FINAL, LIVE, Event, Limits, State, move
from scheduler.stores import locks
from scheduler.stores.base import Held, Message, NewHold, Recovered, Refusal, Waiting
from scheduler.stores.bodies import Bodies, Seal, Texts, Unreadable
from scheduler.stores.consent import ConsentTable
from scheduler.stores.lanes import Job, Lane
from scheduler.stores.ledger import EffectTable
from scheduler.stores.statements import statements
from scheduler.stores.usage import UsageTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler.units import Micros

SCHEMA_VERSION = 4
CHECKPOINT_EVERY = 256
CHECKPOINT_BYTES = 16 * 1024 * 1024
"""Groups, or bytes of bodies, after which the reading thread copies the log into the database."""
MEMORY = ":memory:"
PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA foreign_keys=ON",
    "PRAGMA wal_autocheckpoint=0",
    "PRAGMA busy_timeout=5000",
    "PRAGMA secure_delete=FAST",
    "PRAGMA journal_size_limit=67108864",
)


# --- statements -----------------------------------------------------------------------------------


def _held(row: sqlite3.Row) -> Held:
    values = {key: row[key] for key in row.keys() if key != "dedupe"}  # noqa: SIM118 - not a dict
    values["state"] = State(values["state"])
    values["streams"] = bool(values["streams"])
    return Held(**values)


# --- operations ---------------------------------------------------------------------------------


def _fault(error: Exception) -> SchedulerError:
    """The database's error in our tree: kind and text, never the statement's values."""
    if isinstance(error, SchedulerError):
        return error
    return StoreFault(f"{type(error).__name__}: {error}")


def _guarded(connection: sqlite3.Connection, job: Job[sqlite3.Connection]) -> None:
    """The job is done inside a savepoint: its failure undoes it alone."""
    connection.execute("SAVEPOINT job")
    try:
        job.worked(job.operation(connection))
    except Exception as error:
        if not connection.in_transaction:
            raise  # a full disk has undone the whole group
        connection.execute("ROLLBACK TO job")
        job.failed(_fault(error))
    connection.execute("RELEASE job")


# --- the store ------------------------------------------------------------------------------------


class SqliteStore:
    """The embedded TaskStore.

    Args:
        path: The database file, or ":memory:" for tests: one connection, no locks, one thread.
        seal: Makes bodies unreadable for whoever finds the file; None writes them in plain.

    Raises:
        StoreFault: The file cannot be used; the message says why and what to do.
    """

    def __init__(self, path: Path | str, *, seal: Seal | None = None) -> None:
        self._bodies = Bodies(seal)
        self._sql = statements("held_calls.sql")
        self._path = None if str(path) == MEMORY else Path(path).absolute()
        self._groups = self._written = 0
        self._owned: int | None = None
        self._lock: int | None = None
        self._closed = False
        if self._path is not None:
            self._prepare(self._path)
        try:
            self._open()
        except sqlite3.Error as error:
            self._release()
            raise StoreFault(f"{path} cannot be opened: {error}") from error
        except StoreFault:
            self._release()
            raise
        self._writer = Lane("store-writer", self._connect, self._write)
        self._reader = (
            self._writer if self._path is None else Lane("store-reader", self._connect, _read)
        )
        texts = Texts(seal)
        self.effects = EffectTable(self._writer, self._reader, wrote=self._wrote, texts=texts)
        self.approvals = ConsentTable(self._writer, self._reader, texts)
        self.usage = UsageTable(self._writer, self._reader)

    def __repr__(self) -> str:
        """Where it is: the test interface."""
        return f"<SqliteStore {self._path or MEMORY}>"

    def _prepare(self, path: Path) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            kind = locks.file_system(path.parent.resolve())
            if kind in locks.NETWORK:
                raise StoreFault(
                    f"{path.parent} lies on a network file system ({kind}), where file locks and "
                    "SQLite's log are not safe; choose a local TIDEGATE_STATE_DIR"
                )
            self._lock = locks.opened(_beside(path, ".lock"))
            # SQLite gives its log the mode of the database, so the mode is set before it is opened.
            os.close(locks.opened(path))
        except OSError as error:
            raise StoreFault(f"{path} cannot be used: {error.strerror}") from error

    def _open(self) -> None:
        """The schema is current."""
        connection = self._connect()
        try:
            if self._path is None:
                return  # the one connection migrates itself
            with locks.turn(self._lock):
                migrate(connection)
        finally:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            str(self._path or MEMORY), isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        for pragma in PRAGMAS:
            connection.execute(pragma)
        if self._path is None:
            migrate(connection)
        return connection

    def _write(self, connection: sqlite3.Connection, jobs: list[Job[sqlite3.Connection]]) -> None:
        """One group: one commit, then all answers."""
        if not self._committed(connection, jobs) and len(jobs) > 1:
            for job in jobs:  # one of them may be what cannot be done: the others shall not suffer
                self._committed(connection, [job])
        for job in jobs:
            job.answer()
        self._groups += 1
        due = self._groups >= CHECKPOINT_EVERY or self._written >= CHECKPOINT_BYTES
        if due and self._path is not None:
            self._groups = self._written = 0
            with contextlib.suppress(StoreFault):
                self._reader.put(Job(_checkpoint, None, None))

    def _committed(
        self, connection: sqlite3.Connection, jobs: list[Job[sqlite3.Connection]]
    ) -> bool:
        """Whether the group is on disk; if not, nothing of it is, and each job says why."""
        try:
            with locks.turn(self._lock):
                connection.execute("BEGIN IMMEDIATE")
                for job in jobs:
                    _guarded(connection, job)
                connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - everybody waits for this thread: it must go on
            if connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            for job in jobs:
                job.failed(_fault(error))
            return False
        return True

    # --- ownership and end ------------------------------------------------------------------------

    def own(self) -> bool:
        """Whether this process alone may claim and recover."""
        if self._path is None or self._owned is not None:
            return True
        self._owned = locks.seized(_beside(self._path, ".owner"))
        return self._owned is not None

    async def close(self) -> None:
        """What was accepted is on disk; threads and locks are gone."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._writer.close()
        if self._reader is not self._writer:
            with contextlib.suppress(StoreFault):
                self._reader.put(Job(_checkpoint, None, None))
            self._reader.close()
        self._release()

    def _release(self) -> None:
        for handle in (self._owned, self._lock):
            if handle is not None:
                os.close(handle)
        self._owned = self._lock = None

    # --- keeping ----------------------------------------------------------------------------------

    async def keep(self, new: NewHold, *, limits: Limits) -> Held:
        """See `HeldCalls`."""
        return await self._writer.ask(lambda db: self._keep(db, new, limits))

    def _keep(self, db: sqlite3.Connection, new: NewHold, limits: Limits) -> Held:
        if new.dedupe:
            row = db.execute(self._sql["by_key"], {"dedupe": new.dedupe}).fetchone()
            if row is not None:
                if row["digest"] != new.digest:
                    raise KeyReused(row["id"])
                return _held(row)
        size = new.request.size
        calls, total = db.execute(self._sql["totals"]).fetchone()
        if calls >= limits.max_calls:
            raise HoldsFull("max_calls", limits.max_calls)
        if total + size > limits.max_bytes:
            raise HoldsFull("max_bytes", limits.max_bytes)
        (live,) = db.execute(self._sql["live_of_owner"], {"owner": new.owner}).fetchone()
        if live >= limits.max_per_owner:
            raise HoldsFull("max_per_agent", limits.max_per_owner)
        values = {name: getattr(new, name) for name in _KEPT}
        db.execute(self._sql["keep"], {**values, "bytes": size})
        self._keep_body(db, new.id, "request", new.request)
        return self._row(db, new.id)

    def _wrote(self, size: int) -> None:
        """So many bytes of bodies went into the log."""
        self._written += size

    def _keep_body(self, db: sqlite3.Connection, hold: str, part: str, message: Message) -> None:
        self._wrote(len(message.body))
        db.execute(self._sql["keep_body"], self._bodies.columns(message, hold, part))

    def _row(self, db: sqlite3.Connection, hold: str) -> Held:
        row = db.execute(self._sql["by_id"], {"id": hold}).fetchone()
        if row is None:
            raise UnknownHold(hold)
        return _held(row)

    def abandon(self, hold: str, owner: str, now: Micros) -> None:
        """See `HeldCalls`; the queue's order puts it after the `keep`."""
        with contextlib.suppress(StoreFault):
            self._writer.put(Job(lambda db: self._cancel(db, hold, owner, now), None, None))

    # --- executing --------------------------------------------------------------------------------

    async def claim(
        self, model: str, *, limit: int, now: Micros, most_bytes: int = 1 << 62
    ) -> list[tuple[Held, Message]]:
        """See `HeldCalls`."""

        def claim(db: sqlite3.Connection) -> list[tuple[Held, Message]]:
            asked = {"model": model, "limit": limit, "now": now}
            found: list[tuple[Held, Message]] = []
            left = most_bytes
            for row in db.execute(self._sql["next_open"], asked).fetchall():
                left -= row["bytes"]
                if found and left < 0:
                    break
                db.execute(self._sql["claim"], {"id": row["id"]})
                request = self._request(db, row["id"], now)
                if request is not None:
                    found.append((self._row(db, row["id"]), request))
            return found

        return await self._writer.ask(claim)

    def _request(self, db: sqlite3.Connection, hold: str, now: Micros) -> Message | None:
        """The request of a call just claimed; one that nobody can read any more is refused."""
        row = db.execute(self._sql["body"], {"id": hold, "part": "request"}).fetchone()
        try:
            return self._bodies.message(row, hold, "request")
        except Unreadable:
            said = Refusal(
                status=500, code="hold_unreadable",
                message="The call was held under another secret of the gateway and cannot be read.",
            )  # fmt: skip
            self._finish(db, hold, self._row(db, hold).epoch, Event.REFUSE, said, now=now)
            return None

    async def sending(self, hold: str, epoch: int, *, to: str, now: Micros) -> None:
        """See `HeldCalls`."""
        await self._fenced("sending", {"id": hold, "epoch": epoch, "to": to, "now": now})

    async def give_back(
        self, hold: str, epoch: int, *, reason: str, not_before: Micros, refused: bool
    ) -> None:  # fmt: skip
        """See `HeldCalls`."""
        await self._fenced(
            "give_back",
            {"id": hold, "epoch": epoch, "reason": reason, "not_before": not_before,
             "tries": int(refused)},
        )  # fmt: skip

    async def _fenced(self, name: str, values: dict[str, Any]) -> None:
        def change(db: sqlite3.Connection) -> None:
            if db.execute(self._sql[name], values).rowcount != 1:
                raise StaleEpoch(values["id"])

        await self._writer.ask(change)

    async def complete(self, hold: str, epoch: int, reply: Message, *, now: Micros) -> Held:
        """See `HeldCalls`."""

        def complete(db: sqlite3.Connection) -> Held:
            said = Refusal(status=reply.status, code="", message="")
            held = self._finish(db, hold, epoch, Event.COMPLETE, said, now=now, size=reply.size)
            self._keep_body(db, hold, "reply", reply)
            return held

        return await self._writer.ask(complete)

    async def refuse(self, hold: str, epoch: int, refusal: Refusal, *, now: Micros) -> Held:
        """See `HeldCalls`."""
        return await self._writer.ask(
            lambda db: self._finish(db, hold, epoch, Event.REFUSE, refusal, now=now)
        )

    async def doubt(self, hold: str, epoch: int, refusal: Refusal, *, now: Micros) -> Held:
        """See `HeldCalls`."""
        return await self._writer.ask(
            lambda db: self._finish(db, hold, epoch, Event.DOUBT, refusal, now=now)
        )

    def _finish(  # noqa: PLR0913 - one change, every fact of it named
        self,
        db: sqlite3.Connection,
        hold: str,
        epoch: int,
        event: Event,
        refusal: Refusal,
        *,
        now: Micros,
        size: int = 0,
    ) -> Held:
        """The one way into a final state."""
        held = self._row(db, hold)
        if held.epoch != epoch or held.state in FINAL:
            raise StaleEpoch(hold)
        values = {
            "id": hold,
            "epoch": epoch,
            "state": move(held.state, event).value,
            "status": refusal.status,
            "code": refusal.code,
            "message": refusal.message,
            "now": now,
            "bytes": size,
        }
        db.execute(self._sql["finish"], values)
        db.execute(self._sql["drop_request"], {"id": hold})
        return self._row(db, hold)

    # --- ends that nobody executes ----------------------------------------------------------------

    async def cancel(self, hold: str, owner: str, *, now: Micros) -> Held:
        """See `HeldCalls`."""
        return await self._writer.ask(lambda db: self._cancel(db, hold, owner, now))

    def _cancel(self, db: sqlite3.Connection, hold: str, owner: str, now: Micros) -> Held:
        held = self._owned_row(db, hold, owner)
        if held.state in FINAL:
            raise IllegalTransition(f"the hold is {held.state.value} already")
        sent = " It had been sent to a provider." if held.state is State.SENDING else ""
        said = Refusal(status=410, code="hold_cancelled",
                       message=f"The hold was cancelled by its owner.{sent}")  # fmt: skip
        return self._finish(db, hold, held.epoch, Event.CANCEL, said, now=now)

    def _owned_row(self, db: sqlite3.Connection, hold: str, owner: str) -> Held:
        held = self._row(db, hold)
        if held.owner != owner:
            raise UnknownHold(hold)
        return held

    async def forget(self, hold: str, owner: str) -> None:
        """See `HeldCalls`."""

        def forget(db: sqlite3.Connection) -> None:
            held = self._owned_row(db, hold, owner)
            if held.state in LIVE:
                raise IllegalTransition(f"the hold is {held.state.value}: cancel it first")
            db.execute(self._sql["forget"], {"id": hold})

        await self._writer.ask(forget)

    async def expire(self, *, now: Micros, limit: int) -> list[Held]:
        """See `HeldCalls`."""
        said = Refusal(
            status=504, code="hold_expired",
            message="The hold's deadline passed before a provider could serve the call.",
        )  # fmt: skip

        def expire(db: sqlite3.Connection) -> list[Held]:
            rows = db.execute(self._sql["overdue"], {"now": now, "limit": limit}).fetchall()
            return [
                self._finish(db, row["id"], row["epoch"], Event.EXPIRE, said, now=now)
                for row in rows
            ]

        return await self._writer.ask(expire)

    async def recover(self, *, now: Micros) -> Recovered:
        """See `HeldCalls`."""
        said = Refusal(
            status=502, code="hold_in_doubt",
            message="The gateway ended while the call was being sent. Whether the provider served "
            "it is unknown, so it was not sent again.",
        )  # fmt: skip

        def recover(db: sqlite3.Connection) -> Recovered:
            rows = [_held(row) for row in db.execute(self._sql["busy"]).fetchall()]
            doubted = tuple(
                self._finish(db, row.id, row.epoch, Event.RECOVER, said, now=now)
                for row in rows
                if move(row.state, Event.RECOVER) is State.IN_DOUBT
            )
            opened = db.execute(self._sql["reopen"]).rowcount
            return Recovered(opened=opened, doubted=doubted)

        return await self._writer.ask(recover)

    async def prune(self, *, before: Micros, limit: int) -> int:
        """See `HeldCalls`."""
        values = {"before": before, "limit": limit}
        return await self._writer.ask(lambda db: db.execute(self._sql["prune"], values).rowcount)

    # --- reading ----------------------------------------------------------------------------------

    async def find(self, hold: str, owner: str) -> Held:
        """See `HeldCalls`."""
        return await self._reader.ask(lambda db: self._owned_row(db, hold, owner))

    async def reply(self, hold: str) -> Message | None:
        """See `HeldCalls`."""

        def read(db: sqlite3.Connection) -> Message | None:
            row = db.execute(self._sql["body"], {"id": hold, "part": "reply"}).fetchone()
            return None if row is None else self._bodies.message(row, hold, "reply")

        return await self._reader.ask(read)

    async def listing(self, owner: str, *, after: int, limit: int) -> list[Held]:
        """See `HeldCalls`."""
        return await self._rows("listing", {"owner": owner, "after": after, "limit": limit})

    async def waiting(self) -> list[Waiting]:
        """See `HeldCalls`."""
        return await self._reader.ask(
            lambda db: [Waiting(*row) for row in db.execute(self._sql["waiting"])]
        )

    async def counts(self) -> dict[State, int]:
        """See `HeldCalls`."""
        return await self._reader.ask(
            lambda db: {State(row[0]): row[1] for row in db.execute(self._sql["counts"])}
        )

    async def due_pushes(self, *, now: Micros, limit: int) -> list[Held]:
        """See `HeldCalls`."""
        return await self._rows("due_pushes", {"now": now, "limit": limit})

    async def pushed(self, hold: str, *, state: str, next_at: Micros) -> None:
        """See `HeldCalls`."""
        values = {"id": hold, "state": state, "next_at": next_at}
        await self._writer.ask(lambda db: db.execute(self._sql["pushed"], values).rowcount)

    async def _rows(self, name: str, values: dict[str, Any]) -> list[Held]:
        return await self._reader.ask(
            lambda db: [_held(row) for row in db.execute(self._sql[name], values)]
        )


_KEPT = tuple(one.name for one in fields(NewHold) if one.name != "request")


def _read(connection: sqlite3.Connection, jobs: Iterable[Job[sqlite3.Connection]]) -> None:
    """Each on its own: a reader holds no transaction, so the log can be copied back."""
    for job in jobs:
        try:
            job.worked(job.operation(connection))
        except Exception as error:  # noqa: BLE001 - everybody waits for this thread: it must go on
            job.failed(_fault(error))
        job.answer()


def _checkpoint(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def migrate(connection: sqlite3.Connection) -> None:
    """The schema is the current one; what is newer than this program is refused.

    Raises:
        StoreFault: The file was written by a newer Tidegate.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StoreFault(
            f"the store has schema {version}, this program knows {SCHEMA_VERSION}: "
            "it was written by a newer Tidegate"
        )
    folder = resources.files("scheduler.stores") / "sql"
    for number in range(version + 1, SCHEMA_VERSION + 1):
        (name,) = (
            entry.name for entry in folder.iterdir() if entry.name.startswith(f"{number:04d}_")
        )
        script = (folder / name).read_text()
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version={number};\nCOMMIT;"
        )
