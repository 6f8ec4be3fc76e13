"""What conversations and tasks use. Pure.

Several gateways may have a hand in one book. Each adds up its own share and nothing else, and the
book is the sum of all shares that belong to the newest stretch known. A share is told whole, so
telling it twice is telling it once; one that was lost anywhere is told again by its owner, or by
whoever has heard of it; and a stretch that began anew voids all older shares, whenever they arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gateway.resilience.loops import Rule, Verdict, fullest
from gateway.resilience.memory import IDLE
from gateway.units import MINUTE, Micros, MicroUsd, Tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.resilience.loops import LoopRules


class Share(NamedTuple):
    """What one gateway used.

    Attributes:
        turn: The stretch in which it was used; the highest one counts, all others are void.
        tokens, money: Never negative.
    """

    turn: int
    tokens: Tokens
    money: MicroUsd


class Spending:
    """What a conversation used since its last user turn, and how fast.

    Attributes:
        session: Hash of the session's name; 0 without one.
        name: What the gateways of a fleet call it; 0 where nobody shares it.
        owner: What the fleet calls the owner of our share: this book of this process. "" before it
            was ever told.
        told: Our share as the fleet's book had it when last heard of; None: not at all.
        lasts: How long it is remembered without a call.
        tokens, money: Used since the last user turn; estimates until calls end.
        touched: Instant of its last call.
        turn: Rises with every new stretch; counted from the fleet's once that was heard.
        heard_at: Instant at which it last heard of the fleet.
    """

    __slots__ = (
        "_joined",
        "_level",
        "_others",
        "_own_money",
        "_own_tokens",
        "heard_at",
        "lasts",
        "money",
        "name",
        "owner",
        "session",
        "tokens",
        "told",
        "touched",
        "turn",
    )  # fmt: skip

    def __init__(self, *, session: int = 0, name: int = 0, lasts: Micros = IDLE) -> None:
        self.session = session
        self.name = name
        self.owner = ""
        self.told: Share | None = None
        self.lasts = lasts
        self.touched: Micros = 0
        self.heard_at: Micros = 0
        self.turn = 0
        self._joined = False
        self._begin()

    def _begin(self) -> None:
        self._level: Tokens = 0
        self.tokens: Tokens = 0
        self.money: MicroUsd = 0
        self._own_tokens: Tokens = 0
        self._own_money: MicroUsd = 0
        self._others: dict[str, Share] = {}

    def clear(self) -> None:
        """A new stretch: nothing was used."""
        self.turn += 1
        self._begin()

    @property
    def share(self) -> Share:
        """What was used here."""
        return Share(self.turn, self._own_tokens, self._own_money)

    def heard(
        self, now: Micros, shares: Mapping[str, Share], *, told: Share | None
    ) -> dict[str, Share]:
        """The fleet's book holds these shares: what others used is used here as well.

        Args:
            now: The instant.
            shares: By owner, ours included where it is there.
            told: Our own as it should stand there; None: it was never told.

        Returns:
            Shares of others which the book had, and has no more: whoever knows them tells them
            again. Until then they count here.
        """
        self.heard_at = now
        others = {who: share for who, share in shares.items() if who != self.owner}
        newest = max([share.turn for share in others.values()], default=0)
        if not self._joined:  # stretches that began here before are counted from the fleet's
            self._joined = True
            self.turn += newest
        elif newest > self.turn:
            self.clear()
            self.turn = newest
        self.told = told if told is not None and shares.get(self.owner) == told else None
        before, known = self._elsewhere(), self._others
        self._others = {who: share for who, share in others.items() if share.turn == self.turn}
        for who, share in known.items():
            self._others.setdefault(who, share)
        lost = {who: share for who, share in known.items() if who not in others}
        tokens, money = self._elsewhere()
        self._level = max(0, self._level + tokens - before[0])
        self.tokens, self.money = self._own_tokens + tokens, self._own_money + money
        return lost

    def _elsewhere(self) -> tuple[Tokens, MicroUsd]:
        """What others used."""
        shares = self._others.values()
        return sum([share.tokens for share in shares]), sum([share.money for share in shares])

    def pour(self, tokens: Tokens, money: MicroUsd) -> None:
        """So much more was used; negative amounts correct an estimate."""
        self._level = max(0, self._level + tokens)
        before = self._own_tokens, self._own_money
        self._own_tokens = max(0, before[0] + tokens)
        self._own_money = max(0, before[1] + money)
        self.tokens += self._own_tokens - before[0]
        self.money += self._own_money - before[1]

    def drain(self, now: Micros, rules: LoopRules) -> None:
        """The bucket is where it stands now."""
        elapsed = max(0, now - self.touched)
        self._level = max(0, self._level - rules.tokens_per_minute * elapsed // MINUTE)
        self.touched = max(self.touched, now)

    def judge(self, rules: LoopRules) -> Verdict | None:
        """What the rules say of one more call of a conversation, after `drain`."""
        return fullest((
            (Rule.TOKENS_PER_MINUTE, self._level, rules.tokens_per_minute),
            (Rule.MAX_TOKENS, self.tokens, rules.max_tokens),
            (Rule.MAX_MONEY, self.money, rules.max_money),
        ))  # fmt: skip

    def judge_task(self, rules: LoopRules) -> Verdict | None:
        """What the rules say of one more call of a task."""
        return fullest((
            (Rule.TASK_TOKENS, self.tokens, rules.task_tokens),
            (Rule.TASK_MONEY, self.money, rules.task_money),
        ))  # fmt: skip
