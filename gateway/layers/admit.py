"""Ordered waiting; a permit until the body closes (`admission.md` §4, §9, §10).

Two layers of one mechanism. `admit_caller` takes the caller's own limits once per call, budgets
first, then agent, then tenant; it stands outside downgrade and retry, because what a caller may use
does not depend on how often we try. `admit` takes the provider's pools once per attempt, the
organization's last, because a provider grant must be sent at once. A later refusal gives the
earlier grants back in full; every grant ends in exactly one settlement or cancellation, whatever is
raised.
"""

from __future__ import annotations

from asyncio import Future
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from gateway.admission.core import Admit, Ask, Late, Never, PoolSpec, Shed, Verdict, make_ask
from gateway.admission.places import Tickets, come_back
from gateway.admission.profiles import Accounting, Usage, reserve, settle
from gateway.admission.slopes import Slopes
from gateway.admission.store import Outcome, PoolStore
from gateway.call import BROKEN, Call, End, Kind, Layer, Principal, Reply, Service, VerdictNote
from gateway.errors import BudgetSpent, DeadlinePassed, GatewayError, NeverFits, QueueFull
from gateway.units import MICRO, Micros, Tokens, new_tuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from gateway.admission.profiles import Estimate
    from gateway.call import ToolCall
    from gateway.clock import Clock, Timer

DIGESTED = 4096
"""Bytes of a body's head and tail that name a kept place: resending clients send the same bytes,
and a collision only costs its own principal a place in line."""

OF_TOOLS = "tool:"
"""Beginning of the names of pools that rules of tools make."""
REFUSALS = {Kind.QUOTA: Outcome.QUOTA, Kind.RAMP: Outcome.RAMP}
SERVED, FAILED, RAMP = Outcome.SERVED, Outcome.FAILED, Outcome.RAMP
UNIT = {"money": "micro-dollars", "requests": "requests", "tokens": "tokens"}


class Admission:
    """What both layers need, with the choices that policy leaves to the process.

    Attributes:
        store: Where the pools are.
        clock: For deadlines and lease renewals.
        tickets: Keeps places across refusals; None keeps none.
        at_once: The store's short way, where it has one: granted, or None, and then ask in full.
        on_wait: Called with pool, tier and micros waited, for metrics.
        on_shed: Called with the pool of a call that was refused, for metrics.
        producing: Output tokens expected of the calls in flight, by provider pool.
        slopes: Growth of provider pools, limited where their provider punishes it.
    """

    __slots__ = (
        "_held", "_renewing", "at_once", "clock", "on_shed", "on_wait", "producing", "slopes",
        "store",
        "tickets",
    )  # fmt: skip

    def __init__(
        self,
        store: PoolStore,
        clock: Clock,
        *,
        tickets: Tickets | None = None,
        at_once: Callable[[PoolSpec, Ask, Micros], Admit | None] | None = None,
        on_wait: Callable[[str, int, Micros], None] | None = None,
        on_shed: Callable[[str], None] | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self.tickets = tickets
        self.at_once = at_once
        self.on_wait = on_wait
        self.on_shed = on_shed
        self.producing: dict[str, Tokens] = {}
        self.slopes = Slopes(store)
        self._held: dict[Grants, Micros] = {}
        self._renewing: Timer | None = None

    def hold(self, grants: Grants, specs: Sequence[PoolSpec], now: Micros) -> None:
        """These grants are renewed until `release`: one timer for all, since most never need it.

        Args:
            grants: Held now.
            specs: Their pools; the shortest lease counts.
            now: The instant.
        """
        lease = specs[0].lease if len(specs) == 1 else min([spec.lease for spec in specs])
        due = self._held[grants] = now + lease // 3
        timer = self._renewing
        if timer is None or due < timer.at:
            self._renew_at(due)

    def release(self, grants: Grants) -> None:
        """These grants are renewed no more."""
        self._held.pop(grants, None)

    def _renew_at(self, due: Micros) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        self._renewing = self.clock.after(due - self.clock.now(), self._renew)

    def _renew(self) -> None:
        self._renewing = None
        now = self.clock.now()
        for grants, due in self._held.items():
            if due <= now:
                self._held[grants] = now + grants.renew() // 3
        if self._held:
            self._renew_at(min(self._held.values()))


class Grant(NamedTuple):
    """One permit: its pool, what was reserved, and how it is charged."""

    spec: PoolSpec
    cost: tuple[int, ...]
    accounting: Accounting


class Grants:
    """The permits of one attempt, given back together and exactly once."""

    __slots__ = (
        "_admission", "_call", "_ended", "_held", "_output", "_rid", "_wait_for",
    )  # fmt: skip

    def __init__(
        self,
        admission: Admission,
        call: Call,
        rid: str,
        wait_for: Callable[[str], Micros | None] | None = None,
    ) -> None:
        self._admission = admission
        self._call = call
        self._rid = rid
        self._wait_for = wait_for
        self._held: list[Grant] = []
        self._ended = False
        self._output: Tokens = 0

    def take(
        self,
        specs: tuple[PoolSpec, ...],
        estimate: Estimate,
        accountings: Sequence[Accounting],
        now: Micros,
    ) -> Awaitable[None] | None:
        """All pools grant, in order, or the refusal of the first that does not is raised.

        None where all granted at once, as nearly always: what need not wait costs no coroutine.
        """
        admission, call = self._admission, self._call
        at_once = admission.at_once
        tier = call.tier
        lane = tier.number if tier is not None else 0
        try:
            for at, spec in enumerate(specs):
                accounting = accountings[at]
                cost = reserve(accounting, estimate, spec)
                verdict: Verdict | None = None
                if at_once is not None and (call.tags is None or spec.name not in call.tags):
                    verdict = at_once(spec, self._plain_ask(cost, lane, now), now)
                if verdict is None:
                    ask = self._ask(spec, cost, lane, now)
                    answer = admission.store.acquire(spec, ask)
                    if isinstance(answer, Future):
                        return self._rest(specs, estimate, accountings, at, (cost, answer, now))
                    verdict = answer
                self._granted(spec, verdict, cost, accounting, now)
                if admission.on_wait is not None:
                    admission.on_wait(spec.name, lane, 0)
        except BaseException:
            self.cancel()
            raise
        names = specs[0].name if len(specs) == 1 else ", ".join([spec.name for spec in specs])
        call.note("admit", "granted", specs[-1].because, now, f"{names}: at once")
        admission.hold(self, specs, now)
        return None

    async def _rest(
        self,
        specs: tuple[PoolSpec, ...],
        estimate: Estimate,
        accountings: Sequence[Accounting],
        at: int,
        first: tuple[tuple[int, ...], Future[Verdict], Micros],
    ) -> None:
        """The pools from the one that makes the call wait: each grants, or its refusal is raised.

        Args:
            specs: As for `take`.
            estimate: As for `take`.
            accountings: As for `take`.
            at: Which of them keeps the call waiting.
            first: The cost there, the verdict to come, and when it was asked for.
        """
        admission, call = self._admission, self._call
        cost, pending, now = first
        lane = call.tier.number if call.tier is not None else 0
        verdict: Verdict | Future[Verdict] = pending
        try:
            while True:
                spec = specs[at]
                waited = isinstance(verdict, Future)
                if isinstance(verdict, Future):
                    verdict = await self._waited(spec, verdict, now)
                self._granted(spec, verdict, cost, accountings[at], now)
                if not waited and admission.on_wait is not None:
                    admission.on_wait(spec.name, lane, 0)
                at += 1
                if at == len(specs):
                    break
                now = admission.clock.now()
                cost = reserve(accountings[at], estimate, specs[at])
                ask = self._ask(specs[at], cost, lane, now)
                verdict = admission.store.acquire(specs[at], ask)
        except BaseException:
            self.cancel()
            raise
        admission.hold(self, specs, admission.clock.now())

    def _granted(
        self,
        spec: PoolSpec,
        verdict: Verdict,
        cost: tuple[int, ...],
        accounting: Accounting,
        now: Micros,
    ) -> None:
        """The grant is held. Raises the refusal where it is none."""
        if not isinstance(verdict, Admit):
            raise self._refusal(spec, verdict, now)
        # NamedTuple's own constructor is a Python function: three times as slow.
        self._held.append(new_tuple(Grant, (spec, cost, accounting)))
        if not spec.queue:
            return
        call = self._call
        if call.tags is None or call.meters is None:
            call.tags, call.meters = call.tags or {}, call.meters or {}
        _, call.meters[spec.name], call.tags[spec.name], _ = verdict

    def _plain_ask(self, cost: tuple[int, ...], lane: int, now: Micros) -> Ask:
        """What is asked of a pool the short way, which knows no places."""
        call = self._call
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        rule = principal.rule
        return make_ask(
            rid=self._rid,
            lane=lane,
            tenant=principal.tenant if rule.fair_by == "tenant" else principal.agent,
            weight=rule.weight,
            deadline_in=call.deadline - now if call.deadline > now else 0,
            cost=cost,
        )

    def _ask(self, spec: PoolSpec, cost: tuple[int, ...], lane: int, now: Micros) -> Ask:
        """What is asked of a pool."""
        call = self._call
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        plain = self._plain_ask(cost, lane, now)
        own = self._wait_for(spec.name) if self._wait_for is not None else None
        tag, ticket = self._tag(spec, principal, lane, now)
        return replace(
            plain,
            deadline_in=plain.deadline_in if own is None else min(plain.deadline_in, own),
            tag=tag,
            ticket=ticket,
            place_key=self._place_key(principal) if spec.queue else None,
        )

    async def _waited(self, spec: PoolSpec, pending: Future[Verdict], now: Micros) -> Verdict:
        call, admission = self._call, self._admission
        call.parsed = None  # a parsed copy weighs more than the body; whoever needs it re-reads
        verdict = await pending
        waited = admission.clock.now() - now
        call.queue_us += waited
        if admission.on_wait is not None:
            assert call.tier is not None  # noqa: S101 - identify ran
            admission.on_wait(spec.name, call.tier.number, waited)
        note = VerdictNote("admit", "waited", spec.because, now, f"{waited // 1000} ms")
        call.notes.append(note)
        return verdict

    def _tag(
        self, spec: PoolSpec, principal: Principal, lane: int, now: Micros
    ) -> tuple[int | None, bool]:
        """The tag of an earlier place, and whether the caller's own ticket names it."""
        call = self._call
        if call.tags is not None:
            tag = call.tags.get(spec.name)
            if tag is not None:
                return tag, False
        tickets = self._admission.tickets
        ticket = call.header(b"tidegate-place") if tickets is not None else None
        if tickets is None or ticket is None:
            return None, False
        tag = tickets.redeem(ticket, pool=spec.name, principal=principal.id, lane=lane, now=now)
        return tag, tag is not None

    def _place_key(self, principal: Principal) -> str | None:
        """Key of a place kept for clients that resend the same bytes but never echo a ticket."""
        call = self._call
        body = call.body
        if not call.place_key and body:
            if len(body) > 2 * DIGESTED:
                body = body[:DIGESTED] + body[-DIGESTED:] + str(len(body)).encode()
            key = principal.id.encode()[:64]
            call.place_key = blake2b(body, digest_size=12, key=key).hexdigest()
        return call.place_key or None

    def _refusal(self, spec: PoolSpec, verdict: Verdict, now: Micros) -> GatewayError:
        call = self._call
        if isinstance(verdict, Never):
            call.notes.append(VerdictNote("admit", "never", verdict.because, now, spec.name))
            unit = UNIT.get(verdict.dimension, f"{verdict.dimension} tokens")
            return NeverFits(
                f"This call needs {verdict.cost // MICRO} {unit}, {spec.name} admits at most "
                f"{verdict.ceiling // MICRO} at once (rule {verdict.because}). "
                "It can never fit; make it smaller.",
                because=verdict.because,
            )
        assert isinstance(verdict, Shed | Late)  # noqa: S101 - Admit was handled by the caller
        if self._admission.on_shed is not None:
            self._admission.on_shed(spec.name)
        eta = verdict.eta
        name = "late" if isinstance(verdict, Late) else "shed"
        note = VerdictNote("admit", name, verdict.because, now, f"eta {eta // 1000} ms")
        call.notes.append(note)
        because = verdict.because or spec.because
        if any(dimension.calendar for dimension in spec.dimensions) and not spec.queue:
            return BudgetSpent(
                f"The budget {because} is used up; it starts anew in {_span(eta)}.",
                because=because,
            )
        wait = self._come_back(spec, eta)
        place = self._keep_place(spec, verdict, wait)
        limit = limit_of(spec, because)
        rule = f"rule {because}: {limit}" if limit else f"rule {because}"
        facts = {"limit": limit or None, "scope": spec.name, "resetMs": eta // 1000}
        if isinstance(verdict, Late):
            return DeadlinePassed(
                f"The call waited {round(call.queue_us / MICRO)} s for {spec.name} "
                f"({rule}) and its deadline came; about {_span(max(eta, MICRO))} of work "
                "is still ahead.",
                because=because, retry_after=wait, place=place, details=facts,
            )  # fmt: skip
        what = "its queue is full" if verdict.full else f"the wait would be {_span(eta)}"
        return QueueFull(
            f"{spec.name} ({rule}) cannot serve this call before its deadline: {what}.",
            because=because, retry_after=wait, place=place, details=facts,
        )  # fmt: skip

    def _come_back(self, spec: PoolSpec, eta: Micros) -> Micros | None:
        """When to return to that pool; None (a hard refusal) if that is too far away."""
        patience = max(0, self._call.deadline - self._call.received)
        own = self._wait_for(spec.name) if self._wait_for is not None else None
        return come_back(eta, patience if own is None else min(patience, own))

    def _keep_place(self, spec: PoolSpec, verdict: Shed | Late, wait: Micros | None) -> str | None:
        call, tickets = self._call, self._admission.tickets
        principal, tier = call.principal, call.tier
        if tickets is None or wait is None or not spec.queue or principal is None or tier is None:
            return None
        return tickets.issue(
            pool=spec.name,
            principal=principal.id,
            lane=tier.number,
            tag=verdict.tag,
            expires=self._admission.clock.now() + wait + 120 * MICRO,
        )

    # --- giving back -----------------------------------------------------------------------------

    def renew(self) -> Micros:
        """Every lease starts anew; returns the shortest."""
        for grant in self._held:
            self._admission.store.renew(grant.spec.name, self._rid)
        return min([grant.spec.lease for grant in self._held])

    def produce(self, output: Tokens) -> None:
        """So many tokens are expected from now until the end."""
        if not output:
            return
        self._output = output
        producing = self._admission.producing
        for spec, _, _ in self._held:
            producing[spec.name] = producing.get(spec.name, 0) + output

    def _end(self) -> bool:
        if self._ended:
            return False
        self._ended = True
        if self._output:
            producing = self._admission.producing
            for spec, _, _ in self._held:
                left = producing.get(spec.name, 0) - self._output
                if left > 0:
                    producing[spec.name] = left
                else:
                    producing.pop(spec.name, None)
        self._admission.release(self)
        return True

    def cancel(self) -> None:
        """Nothing was sent: everything comes back, requests included."""
        if self._end():
            for grant in reversed(self._held):
                self._admission.store.cancel(grant.spec.name, self._rid)

    def abandon(self) -> None:
        """No answer came: what was sent stays charged as reserved, what was not comes back."""
        if self._call.sent:
            self.settle(Outcome.FAILED, None, None)
        else:
            self.cancel()

    def settle(self, outcome: Outcome, usage: Usage | None, retry_after: Micros | None) -> None:
        """Sent: the meter holds what it cost; None of usage leaves the reservation standing."""
        if not self._end():
            return
        for spec, cost, accounting in self._held:
            actual = settle(accounting, usage, cost, spec, outcome)
            self._admission.store.settle(
                spec.name, self._rid, outcome=outcome, actual=actual, retry_after=retry_after or 0
            )


def _span(micros: Micros) -> str:
    seconds = -(-micros // MICRO)
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7_200 else f"{seconds // 3_600} h"


def outcome_of(reply: Reply, end: End) -> Outcome:
    """How an attempt ended, as far as the provider's pools care."""
    if reply.kind is None:
        return FAILED if end in BROKEN else SERVED
    return Outcome.FAILED if reply.spares_pool else REFUSALS.get(reply.kind, Outcome.FAILED)


def limit_of(spec: PoolSpec, because: str) -> str:
    """The limit of that rule for people: `3 requests per 60 s`; "" where it is none of a meter."""
    for dimension in spec.dimensions:
        if dimension.because == because:
            amount = f"{dimension.limit // MICRO} {UNIT.get(dimension.name, dimension.name)}"
            return f"{amount} per {dimension.calendar or _span(dimension.window)}"
    if spec.concurrency and because == spec.concurrency_because:
        return f"{spec.concurrency} calls at once"
    return ""


def with_tool(
    principal: Principal, tool: ToolCall
) -> tuple[tuple[PoolSpec, ...], tuple[Accounting, ...], Callable[[str], Micros | None]]:
    """The caller's own pools, then those of the tool's rules; how they charge and let wait."""
    rule, waits = principal.rule, tool.waits
    pools = (*principal.pools, *tool.caller_pools)

    def wait_for(pool: str) -> Micros | None:
        return waits.get(pool) if pool.startswith(OF_TOOLS) else rule.wait_for(pool)

    return pools, tuple([rule.accounting_for(spec.name) for spec in pools]), wait_for


def admit(admission: Admission) -> Layer:
    """The layer of the provider's pools: one set of grants per attempt."""

    def layer(inner: Service) -> Service:
        async def serve(call: Call) -> Reply:
            deployment, estimate = call.deployment, call.estimate
            if deployment is None or estimate is None or not deployment.pools:
                return await inner(call)
            pools, ramps, slopes = deployment.pools, call.snapshot.ramps, admission.slopes
            now = admission.clock.now()
            if ramps:
                pools = slopes.beside(pools, ramps, now)
            rid = f"{call.id}.{call.attempt}"
            wait_for = call.tool.waits.get if call.tool is not None else None
            grants = Grants(admission, call, rid, wait_for)
            waiting = grants.take(pools, estimate, (deployment.accounting,) * len(pools), now)
            if waiting is not None:
                await waiting
                now = admission.clock.now()
            if ramps:
                slopes.sent(pools, ramps, estimate.input, now)
            grants.produce(estimate.output)
            call.reserved = estimate.input + estimate.output
            call.sent = False
            try:
                reply = await inner(call)
            except BaseException:
                grants.abandon()
                raise

            def closed(end: End) -> None:
                outcome = outcome_of(reply, end)
                if outcome is RAMP:
                    slopes.refused(pools, ramps, admission.clock.now())
                grants.settle(outcome, call.usage, reply.retry_after)

            reply.on_close(closed)
            return reply

        return serve

    return layer


def broken_off(grants: Grants, call: Call, estimate: Estimate) -> None:
    """A call without a reply gives everything back; once sent, its input is charged (§10)."""
    if call.sent:
        usage = call.usage or Usage(input=estimate.input, output=0, estimated=True)
        grants.settle(Outcome.FAILED, usage, None)
    else:
        grants.cancel()


def admit_caller(admission: Admission) -> Layer:
    """The layer of the caller's own limits and budgets: one set of grants per call."""

    def layer(inner: Service) -> Service:
        async def serve(call: Call) -> Reply:
            principal, estimate = call.principal, call.estimate
            if principal is None or estimate is None:
                return await inner(call)
            pools, accountings = principal.pools, principal.accountings
            wait_for: Callable[[str], Micros | None] = principal.rule.wait_for
            if call.tool is not None and call.tool.caller_pools:
                pools, accountings, wait_for = with_tool(principal, call.tool)
            if not pools:
                return await inner(call)
            grants = Grants(admission, call, call.id, wait_for)
            waiting = grants.take(pools, estimate, accountings, admission.clock.now())
            if waiting is not None:
                await waiting
            call.reserved = estimate.input + estimate.output
            try:
                reply = await inner(call)
            except BaseException:
                broken_off(grants, call, estimate)
                raise

            def closed(end: End) -> None:
                if reply.kind is not None:
                    # A refused or failed call costs its caller a request and no tokens.
                    grants.settle(Outcome.FAILED, Usage(input=0, output=0), None)
                else:
                    grants.settle(FAILED if end in BROKEN else SERVED, call.usage, None)

            reply.on_close(closed)
            return reply

        return serve

    return layer
