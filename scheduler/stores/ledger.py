"""The effect table: `effects.py` decides, this file writes, each change a compare-and-swap.

It runs on the lanes of `sqlite.py`: one writer thread with group commit, so that sixteen effects of
one moment share one fsync.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from scheduler.effects import (
    REPEATABLE,
    Bounds,
    Class,
    Effect,
    Go,
    Judgment,
    Mark,
    NewEffect,
    judge,
)
from scheduler.errors import IllegalTransition, LedgerFull, StaleEpoch, UnknownEffect
from scheduler.stores.statements import statements

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from typing import Any

    from scheduler.stores.bodies import Texts
    from scheduler.stores.lanes import Lane
    from scheduler.units import Micros

OVERDUE = "its outcome did not come in time"
ABANDONED = "the gateway ended while it was under way"
TOO_LARGE = "its answer was too large to keep"
UNREADABLE = "its answer was sealed under another secret"


def _effect(row: sqlite3.Row) -> Effect:
    return Effect(
        key=row["key"], owner=row["owner"], agent=row["agent"], tenant=row["tenant"],
        tool=row["tool"], kind=Class(row["kind"]), digest=row["digest"], call=row["call"],
        state=Mark(row["state"]), epoch=row["epoch"], reserved=row["reserved"],
        deadline=row["deadline"], keep=row["keep"], settled=row["settled"],
        expires=row["expires"], kept=row["result"] is not None, note=row["note"],
        tokens=row["tokens"],
    )  # fmt: skip


class EffectTable:
    """`Effects` on SQLite.

    Args:
        writer, reader: The store's lanes.
        wrote: Told how many bytes of answers went into the log.
        texts: How answers lie in the table.
    """

    def __init__(
        self,
        writer: Lane[sqlite3.Connection],
        reader: Lane[sqlite3.Connection],
        *,
        wrote: Callable[[int], None],
        texts: Texts,
    ) -> None:
        self._texts = texts
        self._sql = statements("effects.sql")
        self._writer = writer
        self._reader = reader
        self._wrote = wrote

    def _row(self, db: sqlite3.Connection, key: str) -> sqlite3.Row | None:
        row: sqlite3.Row | None = db.execute(self._sql["by_key"], {"key": key}).fetchone()
        return row

    def _change(self, db: sqlite3.Connection, name: str, values: dict[str, Any]) -> None:
        if db.execute(self._sql[name], values).rowcount != 1:
            raise StaleEpoch(values["key"])

    async def look(self, key: str) -> tuple[Effect, bytes | None] | None:
        """See `Effects`."""

        def look(db: sqlite3.Connection) -> tuple[Effect, bytes | None] | None:
            row = self._row(db, key)
            if row is None:
                return None
            effect, found = _effect(row), row["result"]
            if found is None:
                return effect, None
            answer = self._texts.text(bytes(found), f"effect/{key}")
            if answer is None:
                return replace(effect, kept=False, note=UNREADABLE), None
            return effect, answer

        return await self._reader.ask(look)

    async def reserve(self, new: NewEffect, *, now: Micros, bounds: Bounds) -> Judgment:
        """See `Effects`."""

        def reserve(db: sqlite3.Connection) -> Judgment:
            row = self._row(db, new.key)
            judgment = judge(None if row is None else _effect(row), new, now=now)
            if not isinstance(judgment, Go):
                return judgment
            if row is not None:
                db.execute(self._sql["drop"], {"key": new.key})
            rows, size = db.execute(self._sql["totals"]).fetchone()
            if rows >= bounds.rows:
                raise LedgerFull("rows", bounds.rows)
            if size >= bounds.bytes:
                raise LedgerFull("bytes", bounds.bytes)
            db.execute(
                self._sql["reserve"],
                {
                    "key": new.key, "owner": new.owner, "agent": new.agent, "tenant": new.tenant,
                    "tool": new.tool, "kind": new.kind.value, "digest": new.digest,
                    "call": new.call, "epoch": judgment.epoch, "now": now,
                    "deadline": now + new.patience, "keep": new.keep,
                },
            )  # fmt: skip
            return judgment

        return await self._writer.ask(reserve)

    async def extend(self, key: str, epoch: int, *, deadline: Micros) -> None:
        """See `Effects`."""
        values = {"key": key, "epoch": epoch, "deadline": deadline}
        await self._writer.ask(lambda db: self._change(db, "extend", values))

    async def settle(
        self, key: str, epoch: int, answer: bytes, *, tokens: int, now: Micros, bounds: Bounds
    ) -> Effect:  # fmt: skip
        """See `Effects`."""

        def settle(db: sqlite3.Connection) -> Effect:
            kept = len(answer) <= bounds.result
            size = len(answer) if kept else 0
            values = {
                "key": key, "epoch": epoch, "now": now, "tokens": tokens,
                "result": self._texts.column(answer, f"effect/{key}") if kept else None,
                "bytes": size,
                "note": "" if kept else TOO_LARGE,
            }  # fmt: skip
            self._change(db, "settle", values)
            self._wrote(size)
            return self._effect(db, key)

        return await self._writer.ask(settle)

    def _effect(self, db: sqlite3.Connection, key: str) -> Effect:
        row = self._row(db, key)
        if row is None:
            raise UnknownEffect(key)
        return _effect(row)

    async def release(self, key: str, epoch: int) -> None:
        """See `Effects`."""
        values = {"key": key, "epoch": epoch}
        await self._writer.ask(lambda db: self._change(db, "release", values))

    async def doubt(self, key: str, epoch: int, note: str) -> None:
        """See `Effects`."""

        def doubt(db: sqlite3.Connection) -> None:
            effect = self._effect(db, key)
            if effect.epoch != epoch:
                raise StaleEpoch(key)
            self._doubted(db, effect, note)

        await self._writer.ask(doubt)

    def _doubted(self, db: sqlite3.Connection, effect: Effect, note: str) -> None:
        values = {"key": effect.key, "epoch": effect.epoch, "note": note}
        self._change(db, "release" if effect.kind in REPEATABLE else "doubt", values)

    async def resolve(self, key: str, *, done: bool, note: str, now: Micros) -> Effect:
        """See `Effects`."""

        def resolve(db: sqlite3.Connection) -> Effect:
            effect = self._effect(db, key)
            if effect.state is not Mark.IN_DOUBT:
                raise IllegalTransition(f"the effect is {effect.state.value}, not in doubt")
            if not done:
                db.execute(self._sql["drop"], {"key": key})
                return effect
            values = {
                "key": key, "epoch": effect.epoch, "now": now, "tokens": 0, "result": None,
                "bytes": 0, "note": note,
            }  # fmt: skip
            self._change(db, "settle", values)
            return self._effect(db, key)

        return await self._writer.ask(resolve)

    async def overdue(self, *, now: Micros, limit: int) -> list[Effect]:
        """See `Effects`."""
        return await self._doubt_all("overdue", {"now": now, "limit": limit}, OVERDUE)

    async def abandoned(self, *, before: Micros) -> list[Effect]:
        """See `Effects`."""
        return await self._doubt_all("reserved", {"before": before}, ABANDONED)

    async def _doubt_all(self, name: str, values: dict[str, Any], note: str) -> list[Effect]:
        def doubt(db: sqlite3.Connection) -> list[Effect]:
            found = [_effect(row) for row in db.execute(self._sql[name], values).fetchall()]
            for effect in found:
                self._doubted(db, effect, note)
            return found

        return await self._writer.ask(doubt)

    async def doubts(self, *, limit: int) -> list[Effect]:
        """See `Effects`."""
        values = {"limit": limit}
        return await self._reader.ask(
            lambda db: [_effect(row) for row in db.execute(self._sql["doubts"], values)]
        )

    async def prune(self, *, now: Micros, limit: int) -> int:
        """See `Effects`."""
        values = {"now": now, "limit": limit}
        return await self._writer.ask(lambda db: db.execute(self._sql["prune"], values).rowcount)

    async def counts(self) -> dict[Mark, int]:
        """See `Effects`."""
        return await self._reader.ask(
            lambda db: {Mark(row[0]): row[1] for row in db.execute(self._sql["counts"])}
        )
