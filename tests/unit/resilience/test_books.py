"""Books that several gateways have a hand in: the sum is right whatever the store forgets."""

from __future__ import annotations

import pytest

from gateway.loop_books import packed, unpacked
from gateway.resilience.books import Share, Spending


def opened(owner: str, *, turn: int = 0) -> Spending:
    book = Spending(name=1)
    book.owner = owner
    book.turn = turn
    return book


class Store:
    """What the fleet's book holds."""

    def __init__(self):
        self.shares: dict[str, Share] = {}

    def exchange(self, book: Spending, lost=None) -> dict[str, Share]:
        """As `LoopBooks` does: our share is set, the lost ones only where none stands."""
        told = book.share
        self.shares[book.owner] = told
        for who, share in (lost or {}).items():
            self.shares.setdefault(who, share)
        return book.heard(1, dict(self.shares), told=told)


def amounts(*books: Spending) -> list[tuple[int, int]]:
    return [(book.tokens, book.money) for book in books]


def test_what_others_use_of_a_book_counts_once():
    store, here, there = Store(), opened("here"), opened("there")
    here.pour(100, 10)
    store.exchange(here)
    there.pour(30, 3)
    store.exchange(there)
    assert amounts(there) == [(130, 13)]
    here.pour(-40, -4)  # an estimate is corrected, and meanwhile more is used elsewhere
    here.pour(5, 1)
    for book in (here, there, here):
        store.exchange(book)
    assert amounts(here, there) == [(95, 10)] * 2


def test_a_stretch_that_began_anew_elsewhere_voids_what_was_used_here():
    store, here, there = Store(), opened("here"), opened("there")
    here.pour(100, 10)
    there.pour(400, 40)
    for book in (here, there, here):
        store.exchange(book)
    there.clear()
    there.pour(7, 1)
    store.exchange(there)
    here.pour(50, 5)  # not knowing yet: it belongs to the former stretch
    store.exchange(here)
    assert amounts(here, there) == [(7, 1)] * 2
    here.pour(2, 0)
    for book in (here, there):
        store.exchange(book)
    assert amounts(here, there) == [(9, 1)] * 2


def test_shares_of_a_former_stretch_count_nothing_whenever_they_arrive():
    store, here, there = Store(), opened("here"), opened("there")
    here.pour(100, 10)
    for book in (here, there):
        store.exchange(book)
    there.clear()
    store.exchange(there)
    store.shares["here"] = Share(0, 100, 10)  # told late
    there.pour(1, 1)
    store.exchange(there)
    assert amounts(there) == [(1, 1)]


def test_a_gateway_that_comes_late_joins_the_stretch_with_what_it_has_used():
    store, here, late = Store(), opened("here", turn=5), opened("late")
    here.pour(100, 10)
    store.exchange(here)
    late.pour(20, 2)
    for book in (late, here, late, here):
        store.exchange(book)
    assert late.turn == 5
    assert amounts(here, late) == [(120, 12)] * 2


def test_a_user_turn_at_a_gateway_that_comes_late_begins_anew_for_all():
    store, here, late = Store(), opened("here", turn=5), opened("late")
    here.pour(100, 10)
    store.exchange(here)
    late.clear()
    late.pour(20, 2)
    for book in (late, late, here):
        store.exchange(book)
    assert amounts(here, late) == [(20, 2)] * 2


def test_a_store_that_lost_everything_is_filled_again_by_whoever_knows():
    store, here, there = Store(), opened("here", turn=3), opened("there")
    here.pour(100, 10)
    there.pour(30, 3)
    for book in (here, there, there, here):
        store.exchange(book)
    store.shares.clear()
    lost = store.exchange(here)
    assert amounts(here) == [(130, 13)], "counted while the store has it not"
    assert lost == {"there": Share(3, 30, 3)}
    assert store.exchange(here, lost) == {}
    late = opened("late")
    store.exchange(late)
    assert amounts(late) == [(130, 13)], "the owner may be gone"
    there.pour(1, 0)
    for book in (there, here):
        store.exchange(book)
    assert amounts(here, there) == [(131, 13)] * 2, "never counted double"


def test_a_share_that_the_store_has_older_is_told_again_by_its_owner_alone():
    store, here, there = Store(), opened("here"), opened("there")
    for book in (here, there, here):
        book.pour(10, 1)
        store.exchange(book)
    before = dict(store.shares)
    here.pour(5, 0)
    for book in (here, there):
        store.exchange(book)
    store.shares = before  # a failover that lost the last writes
    assert here.heard(1, before, told=here.share) == {}
    assert here.told is None
    assert there.heard(1, before, told=there.share) == {}
    assert there.told == there.share


def test_a_reset_that_a_failover_undid_holds_for_those_who_heard_of_it():
    store, here, there = Store(), opened("here"), opened("there")
    here.pour(100, 0)
    for book in (here, there):
        store.exchange(book)
    before = dict(store.shares)
    here.clear()
    for book in (here, there):
        store.exchange(book)
    store.shares = before
    store.exchange(there)
    assert amounts(there) == [(0, 0)]


def test_a_correction_never_makes_a_share_negative():
    book = opened("here")
    book.heard(1, {"there": Share(0, 5, 5)}, told=None)
    book.pour(-10, -10)
    assert amounts(book) == [(5, 5)]
    assert book.share == Share(0, 0, 0)


@pytest.mark.parametrize("share", [Share(0, 0, 0), Share(7, 1 << 40, 12)])
def test_a_share_comes_back_from_the_store(share):
    assert unpacked(packed(share)) == share


@pytest.mark.parametrize("raw", [b"", b"1", b"1 2 3 4", b"a b c"])
def test_what_another_release_wrote_is_no_share(raw):
    assert unpacked(raw) is None
