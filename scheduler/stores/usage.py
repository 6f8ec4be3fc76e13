"""The usage table: what was spent of calendar amounts, so that a restart forgets no budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.stores.base import Spent
from scheduler.stores.statements import statements

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from scheduler.stores.lanes import Lane
    from scheduler.units import Micros


class UsageTable:
    """`Usage` on SQLite.

    Args:
        writer, reader: The store's lanes.
    """

    def __init__(
        self, writer: Lane[sqlite3.Connection], reader: Lane[sqlite3.Connection]
    ) -> None:  # fmt: skip
        self._sql = statements("usage.sql")
        self._writer = writer
        self._reader = reader

    async def record(self, rows: Sequence[Spent], *, before: Micros) -> None:
        """See `Usage`."""
        values = [
            {
                "pool": row.pool, "unit": row.unit, "calendar": row.calendar, "start": row.start,
                "until": row.until, "used": row.used,
            }
            for row in rows
        ]  # fmt: skip

        def record(db: sqlite3.Connection) -> None:
            db.executemany(self._sql["record"], values)
            db.execute(self._sql["prune"], {"before": before})

        await self._writer.ask(record)

    async def standing(self, *, now: Micros) -> list[Spent]:
        """See `Usage`."""
        return await self._reader.ask(
            lambda db: [
                Spent(**dict(row)) for row in db.execute(self._sql["standing"], {"now": now})
            ]
        )
