"""Call.cost = input counted + output predicted, before anything scarce is held.

Counts with the tokenizer of the rung now tried, corrects by the learned bias, predicts the output
by model and agent, prices the whole. `Estimating` is also what downgrade calls for another rung,
because tokenizers and prices differ, and what settle teaches.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import ceil
from typing import TYPE_CHECKING

from gateway.admission.profiles import make_estimate
from gateway.call import Call, Dialect, Estimate, Layer, Reply, Service, Usage
from gateway.errors import NoSuchRoute
from gateway.snapshot import Deployment
from gateway.tokens import Counted
from gateway.wire.chained import Makers, name_of
from gateway.wire.codec import CODECS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from typing import Any

    from gateway.admission.estimate import Learned
    from gateway.chains import Chains, Known
    from gateway.snapshot import Provider, Snapshot
    from gateway.tokens import Counter

EMBEDDINGS = Dialect.EMBEDDINGS

NOTHING = Estimate(input=0, output=0)
"""What a pass-through call is expected to cost: a request, no tokens."""


class Estimating:
    """Counts, predicts, prices and learns.

    Attributes:
        on_estimated: Called with the reason whenever a count is not exact, for metrics.
        makers: Which provider made which stored response.
        chains: The same of a fleet; None: this process is alone.
    """

    __slots__ = ("_counter", "_decode", "_learned", "chains", "makers", "on_estimated")

    def __init__(
        self,
        counter: Counter,
        learned: Learned,
        *,
        decode: Callable[[Call], Mapping[str, Any]],
        on_estimated: Callable[[str], None] | None = None,
    ) -> None:
        self._counter = counter
        self._learned = learned
        self._decode = decode
        self.on_estimated = on_estimated
        self.makers = Makers()
        self.chains: Chains | None = None

    async def __call__(self, call: Call, deployment: Deployment) -> None:
        """The call carries this deployment and its estimate."""
        pending = self.begin(call, deployment)
        if pending is not None:
            await pending

    def begin(self, call: Call, deployment: Deployment) -> Awaitable[None] | None:
        """The same at once, or what is left of it to be awaited where much text must be counted."""
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        parsed = call.parsed
        if parsed is None:  # dropped before a wait: a downgrade decodes again
            parsed = self._decode(call)
        counted = self._counter.count(
            CODECS[call.dialect].parts(parsed),
            encoding=deployment.encoding,
            tenant=principal.tenant,
            family=call.family,
        )
        if not isinstance(counted, Counted):
            return self._later(call, deployment, counted)
        self._carry(call, deployment, counted)
        return None

    async def _later(
        self, call: Call, deployment: Deployment, counting: Awaitable[Counted]
    ) -> None:
        self._carry(call, deployment, await counting)

    def _carry(self, call: Call, deployment: Deployment, counted: Counted) -> None:
        """The call carries its estimate, made of that count and what was learned."""
        if not counted.exact and self.on_estimated is not None:
            self.on_estimated(counted.because)
        fields, principal = call.fields, call.principal
        assert fields is not None  # noqa: S101 - only parsed routes come here
        assert principal is not None  # noqa: S101 - identify ran
        learned, model, agent = self._learned, deployment.id, principal.rule.id
        bias = learned.bias.factor(model, tools=fields.has_tools, images=fields.has_images)
        tokens = ceil(counted.tokens * bias)
        cap, output, high = fields.cap, 0, None
        if call.dialect is EMBEDDINGS:
            cap = 0
        else:
            most = deployment.max_output or None
            output = learned.outputs.predict(model, agent, cap=cap, most=most)
            if cap is None and output:
                high = learned.outputs.high(model, agent)
        cached = 0
        if call.session:
            cached = min(tokens, learned.cache.predict(call.session, tokens))
        call.deployment = deployment
        call.estimate = make_estimate(
            input=tokens,
            output=output,
            cap=cap,
            cached=cached,
            money=deployment.price.expected(tokens, cached, output),
            exact=counted.exact,
            bias=bias,
            high=high,
        )

    def made(self, call: Call, response: str) -> None:
        """The call's provider made that response."""
        deployment = call.deployment
        assert deployment is not None  # noqa: S101 - it was answered
        name = named(call, response)
        forgotten = self.makers.note(name, deployment.provider.name)
        if self.chains is not None and several(call):
            self.chains.made(name, deployment.provider.name)
            if forgotten:
                self.chains.made(forgotten, "")

    def ask(self, call: Call) -> Awaitable[None] | None:
        """The fleet is asked who made the response that is meant; None: no need, or nobody to ask.

        What is left is to be awaited; then `makers` know, if anybody does.
        """
        chains, response = self.chains, meant(call)
        if chains is None or not response or not several(call):
            return None
        name = named(call, response)
        if self.makers.of(name):
            return None
        known = chains.ask(name, call.received)
        return self._ask(chains, name, known) if known.waiter is not None else None

    async def _ask(self, chains: Chains, name: int, known: Known) -> None:
        maker = await chains.maker(name, known)
        if maker:
            self.makers.heard(name, maker)

    def learn(self, call: Call, usage: Usage) -> None:
        """Teach the estimators what this call really cost; only fully reported usage comes here."""
        fields, principal, deployment = call.fields, call.principal, call.deployment
        estimate = call.estimate
        if fields is None or principal is None or deployment is None or estimate is None:
            return
        learned = self._learned
        total = (usage.input or 0) + (usage.cache_read or 0) + (usage.cache_write or 0)
        learned.bias.learn(
            deployment.id,
            counted=estimate.input / estimate.bias,
            reported=total,
            tools=fields.has_tools,
            images=fields.has_images,
        )
        if call.dialect is not EMBEDDINGS:
            learned.outputs.learn(deployment.id, principal.rule.id, usage.output or 0)
        if call.session:
            learned.cache.learn(call.session, read=usage.cache_read or 0, of=total)


def passthrough_of(snapshot: Snapshot, call: Call, makers: Makers) -> Deployment | None:
    """The way of a path that is relayed unread, with its provider's pools; None if none has it."""
    provider = relaying(snapshot, call, makers)
    if provider is None:
        return None
    return Deployment(
        id=f"{provider.name}/passthrough",
        provider=provider,
        pools=provider.passthrough_pools,
        accounting=provider.accounting,
        because=provider.because,
    )


RESPONSES = "/v1/responses/"


def meant(call: Call) -> str:
    """The id of the stored response that a call goes on from, or is about; "" where none is."""
    if call.fields is not None:
        return call.fields.previous_response_id or ""
    if not call.path.startswith(RESPONSES):
        return ""
    return call.path.removeprefix(RESPONSES).partition("/")[0]


def named(call: Call, response: str) -> int:
    """What the response is called in every process."""
    assert call.principal is not None  # noqa: S101 - identify ran
    return name_of(call.principal.tenant, response)


def several(call: Call) -> bool:
    """Whether more than one provider may have made the call's response."""
    family = call.family.value
    providers = call.snapshot.providers.values()
    return sum(family in provider.dialects for provider in providers) > 1


def relaying(snapshot: Snapshot, call: Call, makers: Makers) -> Provider | None:
    """The provider that a pass-through path belongs to: of a response its maker, else the first."""
    response = meant(call)
    if response:
        maker = makers.of(named(call, response))
        if maker in snapshot.providers:
            return snapshot.providers[maker]
    for provider in snapshot.providers.values():
        if any(fnmatchcase(call.path, glob) for glob in provider.passthrough):
            return provider
    for provider in snapshot.providers.values():
        if call.family.value in provider.dialects and call.path.startswith(RESPONSES):
            return provider
    return None


def estimate(estimating: Estimating) -> Layer:
    """The layer."""

    def layer(inner: Service) -> Service:
        def serve(call: Call, *, asked: bool = False) -> Awaitable[Reply]:
            if estimating.chains is not None and not asked:
                asking = estimating.ask(call)
                if asking is not None:
                    return after(call, asking)
            if call.fields is None:
                deployment = passthrough_of(call.snapshot, call, estimating.makers)
                if deployment is None:
                    raise NoSuchRoute(f"No provider of the policy serves {call.path[:200]}.")
                call.deployment, call.estimate = deployment, NOTHING
                return inner(call)
            pending = estimating.begin(call, first_of(call, estimating.makers))
            if pending is not None:
                return later(call, pending)
            tell(call)
            return inner(call)

        async def after(call: Call, asking: Awaitable[None]) -> Reply:
            await asking
            return await serve(call, asked=True)

        async def later(call: Call, pending: Awaitable[None]) -> Reply:
            await pending
            tell(call)
            return await inner(call)

        return serve

    return layer


def tell(call: Call) -> None:
    """The estimate stands in the chain of verdicts."""
    model, made = call.model, call.estimate
    assert model is not None  # noqa: S101 - identify found it
    assert made is not None  # noqa: S101 - just made
    detail = f"input {made.input} output {made.output} cap {made.cap}"
    call.note("estimate", "counted", model.because, call.received, detail)


def first_of(call: Call, makers: Makers) -> Deployment:
    """The model's first rung of its own that speaks the caller's dialect.

    A call that goes on from a stored response goes to the rung whose provider made it.
    """
    assert call.model is not None  # noqa: S101 - identify found it
    previous = call.fields.previous_response_id if call.fields is not None else None
    maker = makers.of(named(call, previous)) if previous else ""
    for rung in call.model.deployments if maker else ():
        if rung.provider.name == maker and call.family.value in rung.provider.dialects:
            return rung
    found = call.model.own(call.family)
    if found is not None:
        return found
    asked = call.model.name
    text = f"The model {asked[:100]!r} is not served in the {call.family.value} dialect."
    raise NoSuchRoute(text, because=call.model.because, code="model_not_found", param="model")
