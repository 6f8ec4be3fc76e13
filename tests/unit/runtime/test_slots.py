"""Slots: a stop reaches the guest that runs, never one that has left."""

from __future__ import annotations

import pytest

from runtime.slots import Slot

pytest.importorskip("wasmtime")


class Guest:
    """What a slot needs of a sandbox."""

    def __init__(self) -> None:
        self.stops = 0
        self.kill_cpu_us: int | None = None

    def ask_to_yield(self) -> None:
        self.stops += 1


def test_a_running_guest_is_told_once():
    slot, guest = Slot(0), Guest()
    slot.publish(guest, None, None)
    assert slot.preempt()
    assert slot.preempt()
    assert guest.stops == 1
    assert guest.kill_cpu_us is not None, "an unanswered flag has a kill time"


def test_a_guest_that_has_left_cannot_be_reached():
    slot, guest = Slot(0), Guest()
    generation = slot.publish(guest, None, None)
    slot.clear()
    assert not slot.preempt(generation)
    assert not slot.preempt()
    assert guest.stops == 0


def test_a_stop_meant_for_the_last_guest_misses_the_next():
    slot, first, second = Slot(0), Guest(), Guest()
    old = slot.publish(first, None, None)
    slot.clear()
    slot.publish(second, None, None)
    assert not slot.preempt(old)
    assert (first.stops, second.stops) == (0, 0)


def test_a_guest_without_quantum_never_overruns():
    slot = Slot(0)
    slot.publish(Guest(), None, None)
    assert not slot.overrun()


def test_a_kill_time_is_set_only_where_wanted():
    slot, guest = Slot(0), Guest()
    slot.publish(guest, None, None)
    assert guest.kill_cpu_us is None
    slot.publish(guest, None, 1_000)
    assert guest.kill_cpu_us is not None
