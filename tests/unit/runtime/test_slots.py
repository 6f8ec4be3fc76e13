"""Slots: a stop reaches the guest that runs, never one that has left."""

from __future__ import annotations

import threading

import pytest

from runtime.clock import cpu_us, thread_cpu_clock
from runtime.slots import Slot

pytest.importorskip("wasmtime")


class Guest:
    """What a slot needs of a sandbox."""

    def __init__(self) -> None:
        self.stops = 0
        self.kill_cpu_us: int | None = None
        self.cpu_us, self.cpu_limit_us = 0, 10_000_000

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


def on_this_thread() -> Slot:
    slot = Slot(0)
    slot.clock = thread_cpu_clock(threading.get_ident())
    return slot


def test_a_guest_without_quantum_has_all_its_compute():
    slot, guest = on_this_thread(), Guest()
    slot.publish(guest, None, None)
    assert not slot.overrun()
    guest.cpu_us = guest.cpu_limit_us
    slot.publish(guest, None, None)
    assert slot.overrun(), "all it may compute was used before, on whatever machine"


def test_the_last_quantum_is_what_is_left_to_compute():
    slot, guest = on_this_thread(), Guest()
    guest.cpu_us = guest.cpu_limit_us - 1_000_000
    slot.publish(guest, 5.0, None)
    assert slot.deadline is not None
    assert slot.deadline <= cpu_us() / 1e6 + 1.0


def test_a_kill_time_is_set_only_where_wanted():
    slot, guest = Slot(0), Guest()
    slot.publish(guest, None, None)
    assert guest.kill_cpu_us is None
    slot.publish(guest, None, 1_000)
    assert guest.kill_cpu_us is not None
