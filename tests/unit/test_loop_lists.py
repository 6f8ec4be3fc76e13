"""Lists of what agents did, over a store that is a dictionary."""

from __future__ import annotations

import pytest

from gateway.loop_lists import LATE, in_order, packed, unpacked
from gateway.resilience.alternation import Step
from gateway.resilience.repeats import Event, Print

BIG = (1 << 64) - 1


@pytest.mark.parametrize(
    "event",
    [
        Step(5_000_000, BIG, 0),
        Event(5_000_000, Print(exact=BIG, masked=1, changes=True)),
        Event(5_000_000, Print(exact=1, masked=BIG, changes=False), 0),
        Event(5_000_000, Print(exact=1, masked=2, changes=False), BIG),
    ],
)
def test_an_event_comes_back_by_the_readers_clock(event):
    found = unpacked(packed(event, 7), 9)
    assert found is not None
    assert found == event._replace(at=event.at - 2)


@pytest.mark.parametrize("item", [b"", b"another release"])
def test_what_another_release_wrote_is_left_out(item):
    assert unpacked(item, 0) is None


def steps(*instants):
    return [Step(at, who, who) for who, at in enumerate(instants)]


def instants(*told):
    return [step.at for step in in_order(steps(*told))]


def test_batches_of_gateways_are_put_in_the_order_in_which_things_happened():
    assert instants(0, 20_000, 40_000, 10_000, 30_000, 50_000) == [
        0, 10_000, 20_000, 30_000, 40_000, 50_000,
    ]  # fmt: skip


def test_of_what_happened_at_once_what_was_told_first_stands_first():
    assert in_order(steps(5, 5, 5)) == steps(5, 5, 5)


def test_clocks_that_differ_by_much_do_not_undo_the_order_of_arrival():
    apart = LATE + 1
    assert instants(2 * apart, 0, 4 * apart, apart) == [2 * apart, 0, 4 * apart, apart]
