"""The approval table: `approvals.py` decides, this file writes, each change a compare-and-swap."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from scheduler.approvals import OPEN, Approval, Caps, Document, Move, Signed, Stand, move
from scheduler.canonical import canonical
from scheduler.errors import ApprovalsFull, IllegalTransition, UnknownApproval
from scheduler.stores.statements import statements

if TYPE_CHECKING:
    import sqlite3

    from scheduler.stores.bodies import Texts
    from scheduler.stores.lanes import Lane
    from scheduler.units import Micros


class ConsentTable:
    """`Approvals` on SQLite.

    Args:
        writer, reader: The store's lanes.
        texts: How arguments lie in the table.
    """

    def __init__(
        self, writer: Lane[sqlite3.Connection], reader: Lane[sqlite3.Connection], texts: Texts
    ) -> None:
        self._texts = texts
        self._sql = statements("approvals.sql")
        self._writer = writer
        self._reader = reader

    def _approval(self, db: sqlite3.Connection, row: sqlite3.Row) -> Approval:
        """The approval of a row; void where nobody can read any more what consent was asked for."""
        state, ident, found = Stand(row["state"]), row["id"], row["arguments"]
        text = found if isinstance(found, str) else self._texts.text(found, f"approval/{ident}")
        if text is None:
            text, state = "{}", Stand.VOID
        document = Document(
            id=ident, owner=row["owner"], agent=row["agent"], tenant=row["tenant"],
            tool=row["tool"], arguments=json.loads(text), policy=row["policy"],
            rule=row["rule"], expires=row["expires"], nonce=row["nonce"],
        )  # fmt: skip
        return Approval(
            seq=row["seq"], document=document, state=state, reason=row["reason"],
            call=row["call"], requested=row["requested"], decided=row["decided"], used=row["used"],
            approver=row["approver"], signature=bytes(row["signature"]), note=row["note"],
            grants=self._grants(db, row),
        )  # fmt: skip

    def _grants(self, db: sqlite3.Connection, row: sqlite3.Row) -> tuple[Signed, ...]:
        found = db.execute(self._sql["grants"], {"id": row["id"]}).fetchall()
        grants = tuple(
            Signed(approver=one[0], signature=bytes(one[1]), note=one[2], at=one[3])
            for one in found
        )
        if grants or not row["approver"] or row["state"] == Stand.DENIED.value:
            return grants
        alone = Signed(
            approver=row["approver"], signature=bytes(row["signature"]), note=row["note"],
            at=row["decided"],
        )  # fmt: skip
        return (alone,)  # granted before grants had a table

    def _find(self, db: sqlite3.Connection, approval: str) -> Approval:
        row = db.execute(self._sql["by_id"], {"id": approval}).fetchone()
        if row is None:
            raise UnknownApproval(approval)
        return self._approval(db, row)

    async def ask(
        self, document: Document, *, reason: str, call: str, now: Micros, caps: Caps
    ) -> Approval:
        """See `Approvals`."""

        def ask(db: sqlite3.Connection) -> Approval:
            binding = document.binding()
            row = db.execute(self._sql["newest"], {"binding": binding}).fetchone()
            if row is not None:
                known = self._approval(db, row)
                standing = known.state in OPEN or known.state is Stand.DENIED
                if standing and now < known.document.expires:
                    return known
            (rows,) = db.execute(self._sql["rows"]).fetchone()
            if rows >= caps.rows:
                raise ApprovalsFull("rows", caps.rows)
            (owned,) = db.execute(self._sql["open_of_owner"], {"owner": document.owner}).fetchone()
            if owned >= caps.open_of_owner:
                raise ApprovalsFull("open_of_owner", caps.open_of_owner)
            db.execute(
                self._sql["ask"],
                {
                    "id": document.id, "owner": document.owner, "agent": document.agent,
                    "tenant": document.tenant, "tool": document.tool,
                    "arguments": self._written(document),
                    "policy": document.policy, "rule": document.rule,
                    "expires": document.expires, "nonce": document.nonce, "binding": binding,
                    "reason": reason, "call": call, "now": now,
                },
            )  # fmt: skip
            return self._find(db, document.id)

        return await self._writer.ask(ask)

    def _written(self, document: Document) -> str | bytes:
        plain = canonical(dict(document.arguments))
        sealed = self._texts.column(plain, f"approval/{document.id}")
        return plain.decode() if sealed is plain else sealed

    async def decide(
        self, approval: str, event: Move, signed: Signed, *, needed: int = 1
    ) -> Approval:
        """See `Approvals`."""

        def decide(db: sqlite3.Connection) -> Approval:
            known = self._find(db, approval)
            after = move(known.state, event)
            if signed.at >= known.document.expires:
                raise IllegalTransition("the approval has expired")
            values = {
                "id": approval, "state": after.value, "now": signed.at,
                "approver": signed.approver, "signature": signed.signature, "note": signed.note,
            }  # fmt: skip
            if event is Move.GRANT:
                if any(one.approver == signed.approver for one in known.grants):
                    raise IllegalTransition(f"{signed.approver} has granted it already")
                db.execute(self._sql["grant"], values)
                if len(known.grants) + 1 < needed:
                    return self._find(db, approval)
            db.execute(self._sql["decide"], values)
            return self._find(db, approval)

        return await self._writer.ask(decide)

    async def use(self, approval: str, call: str, *, now: Micros) -> Approval:
        """See `Approvals`."""

        def use(db: sqlite3.Connection) -> Approval:
            known = self._find(db, approval)
            if known.state is Stand.USED and known.call == call:
                return known
            move(known.state, Move.USE)
            if now >= known.document.expires:
                raise IllegalTransition("the approval has expired")
            db.execute(self._sql["use"], {"id": approval, "call": call, "now": now})
            return self._find(db, approval)

        return await self._writer.ask(use)

    async def void(self, approval: str, note: str, *, now: Micros) -> Approval:
        """See `Approvals`."""
        return await self._writer.ask(lambda db: self._finish(db, approval, Move.VOID, note, now))

    def _finish(
        self, db: sqlite3.Connection, approval: str, event: Move, note: str, now: Micros
    ) -> Approval:  # fmt: skip
        row = db.execute(self._sql["by_id"], {"id": approval}).fetchone()
        if row is None:
            raise UnknownApproval(approval)
        after = move(Stand(row["state"]), event)  # by the row: what is unreadable ends as well
        db.execute(
            self._sql["finish"], {"id": approval, "state": after.value, "note": note, "now": now}
        )
        return self._find(db, approval)

    async def find(self, approval: str) -> Approval:
        """See `Approvals`."""
        return await self._reader.ask(lambda db: self._find(db, approval))

    async def expire(self, *, now: Micros, limit: int) -> list[Approval]:
        """See `Approvals`."""

        def expire(db: sqlite3.Connection) -> list[Approval]:
            rows = db.execute(self._sql["overdue"], {"now": now, "limit": limit}).fetchall()
            return [self._finish(db, row["id"], Move.EXPIRE, row["note"], now) for row in rows]

        return await self._writer.ask(expire)

    async def listing(self, *, state: Stand | None, after: int, limit: int) -> list[Approval]:
        """See `Approvals`."""
        values = {"state": state.value if state else "", "after": after, "limit": limit}
        return await self._reader.ask(
            lambda db: [self._approval(db, row) for row in db.execute(self._sql["listing"], values)]
        )

    async def prune(self, *, before: Micros, limit: int) -> int:
        """See `Approvals`."""
        values = {"before": before, "limit": limit}
        return await self._writer.ask(lambda db: db.execute(self._sql["prune"], values).rowcount)

    async def counts(self) -> dict[Stand, int]:
        """See `Approvals`."""
        return await self._reader.ask(
            lambda db: {Stand(row[0]): row[1] for row in db.execute(self._sql["counts"])}
        )
