"""The world around a strategy: agents, the way to the provider, its meters, outages, others.

A strategy is asked to `submit` a call and decides when to `World.send` it; the world tells it how
each attempt went. Nothing here knows how a strategy decides, and no strategy can look at the meters
otherwise than through answers: what is compared is what clients can know.

A call's time line, all from the attempt's sending:

    network       it arrives: the meters charge or refuse it, or an outage has it
    first_token   the head: from here nobody may send it again
    every 3 s     what was produced is charged, where the provider charges as it produces
    takes         the end: the provider settles, the agent pauses and asks again

Weakness: one credential, no packet loss, answers of one pace for all models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gateway.admission.profiles import Profile, Usage
from gateway.resilience.attempts import Kind
from gateway.simulate import meters
from gateway.simulate.scenario import WHOLE, Fault
from gateway.simulate.workload import Agent, Op, stream
from gateway.units import MICRO, MINUTE, Micros, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gateway.simulate.books import Books
    from gateway.simulate.engine import Engine
    from gateway.simulate.scenario import Foreign, Scenario
    from gateway.simulate.scopes import Scope, Target

PIECE: Micros = 3 * MICRO
"""A realtime meter is charged for what was produced so often, and at the end."""

SIP: Micros = MICRO // 2
"""A foreign consumer asks so often."""

KINDS = {
    meters.Kind.QUOTA: Kind.QUOTA,
    meters.Kind.RAMP: Kind.RAMP,
    meters.Kind.CAPACITY: Kind.CAPACITY,
    meters.Kind.PERIOD: Kind.PERIOD,
}
QUOTAS = frozenset({Kind.QUOTA, Kind.RAMP, Kind.PERIOD})
"""Refusals that a 429 says."""


class Strategy(Protocol):
    """Who decides when calls are sent."""

    def submit(self, op: Op) -> None:
        """An agent asks. Ends in `World.ended` or `World.refused`."""
        ...

    def head(self, op: Op) -> None:
        """The answer has begun."""
        ...

    def turned_away(self, op: Op, kind: Kind, retry_after: Micros | None, code: str) -> None:
        """The attempt failed before its answer began."""
        ...

    def finished(self, op: Op, *, complete: bool) -> None:
        """The answer is over; `op.usage` says what it cost. Incomplete: the client left."""
        ...

    def withdrawn(self, op: Op) -> None:
        """The client left before the answer began; nothing more will be heard of it."""
        ...

    def waiting(self) -> tuple[int, int, int]:
        """Calls that have not been sent, by tier."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class World:
    """One run: engine, provider, agents and one strategy, which is set before `start`."""

    def __init__(
        self, engine: Engine, scenario: Scenario, targets: dict[str, Target], books: Books
    ) -> None:
        self.engine = engine
        self.scenario = scenario
        self.targets = targets
        self.books = books
        self.first: dict[str, Target] = {}
        self.tenants: dict[str, str] = {}
        self.strategy: Strategy | None = None
        self._up = scenario.upstream
        self._net = stream(scenario.seed, "network")
        self._outages = scenario.outages
        self._numbers = 0
        self._recorded: Iterator[Op] = iter(())

    def first_target(self, model: str) -> Target:
        """Where a client without a gateway sends calls of that model."""
        return self.first[model]

    # --- demand

    def start(self, sources: Iterable[Agent], recorded: Iterable[Op] = ()) -> None:
        """Agents begin; recorded calls come at their own instants."""
        for agent in sources:
            self.engine.at(agent.first(), self._issue, agent)
        self._recorded = iter(recorded)
        self._replay(None)
        for other in self.scenario.foreign:
            self.engine.at(other.start, self._sip, other)

    def _issue(self, agent: Agent) -> None:
        now = self.engine.now
        if now < self.scenario.duration:
            self._numbers += 1
            self._enter(agent.ask(self._numbers, now))

    def _replay(self, due: Op | None) -> None:
        """The recorded call is asked, and the next one is awaited: never all of them at once."""
        if due is not None:
            self._enter(due)
        upcoming = next(self._recorded, None)
        if upcoming is not None:
            self.engine.at(upcoming.asked, self._replay, upcoming)

    def _enter(self, op: Op) -> None:
        op.tenant = self.tenants.get(op.principal, op.principal)
        self.books.asked(op)
        if op.leaves:
            self.engine.at(op.leaves, self._leave, op)
        assert self.strategy is not None  # noqa: S101 - set before start
        self.strategy.submit(op)

    def _leave(self, op: Op) -> None:
        """The client hangs up, wherever its call is."""
        if op.over:
            return
        if op.serving:
            self._finish(op, complete=False)
            return
        assert self.strategy is not None  # noqa: S101
        op.over = True
        self.strategy.withdrawn(op)
        self.books.left(op, self.engine.now)
        self._pause(op)

    def ended(self, op: Op) -> None:
        """The call is over for its strategy: the agent pauses and asks again."""
        self._pause(op)

    def refused(
        self, op: Op, *, because: str, code: str, retry_after: Micros | None = None
    ) -> None:
        """The call ends without an answer."""
        op.over = True
        self.books.refused(op, self.engine.now, because=because, code=code, hint=retry_after)
        self._pause(op)

    def _pause(self, op: Op) -> None:
        source = op.source
        if isinstance(source, Agent):
            now = self.engine.now
            self.engine.at(now + source.pause(now), self._issue, source)

    # --- the way to the provider

    def send(self, op: Op, target: Target) -> None:
        """The attempt leaves now."""
        op.sent = self.engine.now
        op.target = target
        delay = self._up.network + int(self._net.expovariate(1.0) * self._up.jitter)
        self.engine.after(delay, self._arrive, op)

    def _arrive(self, op: Op) -> None:
        if op.over:
            return  # its client has left while it was on the wire; nothing was charged
        now, target = self.engine.now, op.target
        for outage in self._outages:
            if outage.start <= now < outage.end and outage.provider in ("", target.provider):
                self._suffer(op, outage.fault)
                return
        demand = meters.Demand(input=op.input - op.cached, cache_read=op.cached, cap=op.cap or None)
        tickets: list[meters.Ticket] = []
        for scope in target.scopes:
            said = scope.meter.arrive(now, demand)
            if isinstance(said, meters.Refusal):
                for earlier, ticket in zip(target.scopes, tickets, strict=False):
                    earlier.meter.withdraw(now, ticket)
                self._turn_away(op, KINDS[said.kind], said.retry_in, said.dimension)
                return
            tickets.append(said)
        op.tickets = tickets
        op.serving = True
        op.produced = 0
        op.ends = now + op.takes
        self.books.arrived(op, target.scopes, tickets, now)
        engine, takes = self.engine, op.takes
        first = min(self._up.first_token, takes)
        engine.at(now + first, self._head, op)
        if target.realtime and takes - first > PIECE:
            engine.at(now + first + PIECE, self._produce, op)
        engine.at(now + takes, self._end, op)

    def _suffer(self, op: Op, fault: Fault) -> None:
        if fault is Fault.HANGS:
            self.engine.after(self._up.patience, self._fail, (op, Kind.FAULT, None, "timeout"))
        elif fault is Fault.OVERLOADED:
            self._turn_away(op, Kind.CAPACITY, None, "overloaded_error")
        else:
            self._turn_away(op, Kind.FAULT, None, "502")

    def _turn_away(self, op: Op, kind: Kind, retry_after: Micros | None, code: str) -> None:
        self.books.turned_away(op, kind, self.engine.now)
        self.engine.after(self._up.refusal, self._fail, (op, kind, retry_after, code))

    def _fail(self, told: tuple[Op, Kind, Micros | None, str]) -> None:
        op, kind, retry_after, code = told
        if not op.over:
            assert self.strategy is not None  # noqa: S101
            self.strategy.turned_away(op, kind, retry_after, code)

    # --- answers

    def _head(self, op: Op) -> None:
        if not op.over:
            assert self.strategy is not None  # noqa: S101
            self.strategy.head(op)

    def _produce(self, op: Op) -> None:
        """A stretch of output is produced; the last one is charged with the end."""
        if op.over:
            return
        first = min(self._up.first_token, op.takes)
        self._charge(op, op.output * PIECE // (op.takes - first))
        next_piece = self.engine.now + PIECE
        if next_piece < op.ends:
            self.engine.at(next_piece, self._produce, op)

    def _charge(self, op: Op, output: Tokens) -> None:
        target, tickets, now = op.target, op.tickets, self.engine.now
        op.produced += output
        for scope, ticket in zip(target.scopes, tickets, strict=True):
            if scope.profile is Profile.REALTIME:
                scope.meter.produce(now, ticket, output)
                self.books.produced(scope, output, now)

    def _end(self, op: Op) -> None:
        if not op.over:
            self._finish(op, complete=True)

    def _finish(self, op: Op, *, complete: bool) -> None:
        """The answer is over: the provider settles by what it produced."""
        now, target, tickets = self.engine.now, op.target, op.tickets
        if complete and op.produced < op.output:
            self._charge(op, op.output - op.produced)
        op.over = True
        op.serving = False
        op.produced = op.output if complete else op.produced
        for scope, ticket in zip(target.scopes, tickets, strict=True):
            before = ticket.output
            scope.meter.finish(now, ticket, op.produced)
            if scope.profile is Profile.RESERVE_SETTLE:
                self.books.returned(scope, ticket, before)
        op.usage = Usage(
            input=op.input - op.cached, output=op.produced, cache_read=op.cached, cache_write=0
        )
        self.books.ended(op, now, complete=complete)
        assert self.strategy is not None  # noqa: S101
        self.strategy.finished(op, complete=complete)

    # --- others

    def _sip(self, other: Foreign) -> None:
        """Somebody else asks for its share of the quota, and is refused like everybody."""
        now = self.engine.now
        if now >= other.end:
            return
        for target in self.targets.values():
            for scope in target.scopes:
                if scope.pool == other.pool:
                    self._foreign(scope, other, now)
                    self.engine.after(SIP, self._sip, other)
                    return

    def _foreign(self, scope: Scope, other: Foreign, now: Micros) -> None:
        quota = scope.meter.quota
        limit = quota.tokens or quota.input or 0
        amount = limit * other.share * SIP // (WHOLE * MINUTE)
        said = scope.meter.arrive(now, meters.Demand(input=amount, cap=0))
        if isinstance(said, meters.Refusal):
            self.books.foreign_refused += 1
        else:
            self.books.foreign_charged += amount
            scope.meter.finish(now, said, 0)
