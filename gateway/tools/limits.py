"""Which pools a tool call takes: policy's limits, made for its agent, tenant and tool. Pure.

A limit with `per` is many pools of one shape, each named by those whose count it is. The caller's
own (per agent or tenant) are taken once per call, all others once per attempt, because a repeated
attempt costs the server again and the caller nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.admission.core import PoolSpec
    from gateway.call import Principal
    from gateway.toolrules import ToolLimit
    from gateway.units import Micros

MOST_MADE = 10_000
"""Instantiated pools remembered; beyond it they are made anew."""


@dataclass(slots=True)
class Taking:
    """What one call takes.

    Attributes:
        of_caller: Once per call.
        of_tool: Once per attempt.
        waits: Longest wait by pool, where policy says one.
    """

    of_caller: list[PoolSpec] = field(default_factory=list)
    of_tool: list[PoolSpec] = field(default_factory=list)
    waits: dict[str, Micros] = field(default_factory=dict)


class Limits:
    """Makes pools of limits, each once."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[int, str], PoolSpec] = OrderedDict()

    def take(self, limits: Iterable[ToolLimit], principal: Principal, tool: str) -> Taking:
        """What a call of this principal to this tool takes.

        Args:
            limits: Those that hold for the call, in the order of the file.
            principal: Who calls.
            tool: "server/tool".
        """
        taking = Taking()
        for limit in limits:
            spec = self._spec(limit, principal, tool)
            (taking.of_caller if limit.of_caller else taking.of_tool).append(spec)
            if limit.wait is not None:
                taking.waits[spec.name] = limit.wait
        return taking

    def _spec(self, limit: ToolLimit, principal: Principal, tool: str) -> PoolSpec:
        if not limit.per:
            return limit.spec
        whose = {"agent": principal.agent, "tenant": principal.tenant, "tool": tool}
        name = "".join(f":{part}={whose[part]}" for part in limit.per)
        # By identity: a new policy's limit is another object, and brings its own revision.
        key = (id(limit.spec), name)
        made = self._made.get(key)
        if made is None or made.revision != limit.spec.revision:
            made = self._made[key] = replace(limit.spec, name=f"{limit.spec.name}{name}")
            if len(self._made) > MOST_MADE:
                self._made.popitem(last=False)
        return made
