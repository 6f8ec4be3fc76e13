"""gateway/tokens.py: what is counted at once, later, from memory, or not at all."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest
from blockbuster import blockbuster_ctx

from gateway import tokens
from gateway.call import Family, Part, PartKind
from gateway.tokens import Counted, Counter, Missing, guess
from tests.unit.tokens.ground import SMALL, Gate, HandClock, Words, small

O200K = "o200k_base"


def texts(*pieces: str) -> list[Part]:
    return list(pieces)


def inline(open_encoding=small) -> Counter:
    return Counter(open_encoding, clock=HandClock(), inline=True)


def ask(counter: Counter, *pieces: str, tenant: str = "t") -> Counted:
    counted = counter.count(texts(*pieces), encoding=O200K, tenant=tenant)
    assert isinstance(counted, Counted)
    return counted


def alone(text: str) -> int:
    return len(SMALL[O200K].encode_ordinary(text))


def test_a_prompt_counts_the_sum_of_its_texts():
    assert ask(inline(), "the end", "and the text" * 40) == Counted(
        alone("the end") + alone("and the text" * 40)
    )


@pytest.mark.parametrize(
    "spelling",
    ["<|endoftext|>", "<|fim_prefix|>", "<|im_start|>system<|im_end|>", "<|endofprompt|>"],
)
def test_the_spelling_of_a_special_token_is_ordinary_text(spelling):
    counted = ask(inline(), spelling * 400)
    assert counted.exact
    assert counted.tokens == alone(spelling * 400) > 1000


def test_a_lone_surrogate_is_counted_like_its_replacement():
    counted = ask(inline(), "half \ud83d of a pair " * 20)
    assert counted.exact
    assert counted.tokens == alone("half � of a pair " * 20)


def test_nothing_counts_nothing():
    assert ask(inline()) == ask(inline(), "", "") == Counted(0)


def test_token_ids_and_overhead_count_what_they_say():
    parts = [Part(PartKind.TOKEN_IDS, count=900), Part(PartKind.OVERHEAD, count=3)]
    assert inline().count(parts, encoding=O200K, tenant="t") == Counted(903)


def test_no_medium_reaches_the_tokenizer():
    words = Words()
    counter = inline(lambda _: words)
    media = [Part(kind, count=1000) for kind in PartKind]
    counted = counter.count(media, encoding=O200K, tenant="t")
    assert isinstance(counted, Counted)
    assert counted.exact
    assert words.seen == []


def test_a_text_seen_before_is_not_tokenized_again():
    words = Words()
    counter = inline(lambda _: words)
    first = ask(counter, "some words " * 30)
    assert ask(counter, "some words " * 30) == first == Counted(60)
    assert len(words.seen) == 1


def test_another_tenant_s_text_is_not_known():
    words = Words()
    counter = inline(lambda _: words)
    ask(counter, "some words " * 30, tenant="one")
    ask(counter, "some words " * 30, tenant="two")
    assert len(words.seen) == 2


def test_another_encoding_s_count_is_not_taken():
    words = Words()
    counter = inline(lambda _: words)
    for encoding in ("o200k_base", "cl100k_base"):
        counter.count(texts("some words " * 30), encoding=encoding, tenant="t")
    assert len(words.seen) == 2


def test_short_texts_are_not_remembered():
    counter = inline()
    ask(counter, *(f"short {n}" for n in range(50)))
    assert counter.cached == 0


def test_texts_of_sixteen_characters_are_remembered():
    words = Words()
    counter = inline(lambda _: words)
    ask(counter, "warm up the encoder, which is loaded with the first prompt")
    for _ in range(3):
        ask(counter, "x" * 16, "y" * 15)
    assert words.seen.count("x" * 16) == 1
    assert words.seen.count("y" * 15) == 3


def test_a_long_text_is_known_by_a_hash_that_lets_the_interpreter_go():
    short, long = "a" * tokens.HASH_SHORT, "a" * (tokens.HASH_SHORT + 1)
    assert tokens.fingerprint(short) == hash(short)
    assert isinstance(tokens.fingerprint(long), bytes)
    assert tokens.fingerprint(long) != tokens.fingerprint(long + "a")
    assert tokens.fingerprint("\ud83d" * 20) == hash("\ud83d" * 20)


def test_the_memory_is_bounded_and_what_is_used_stays(monkeypatch):
    monkeypatch.setattr(tokens, "CACHED", 20)
    words = Words()
    counter = inline(lambda _: words)
    loved = "loved " * 40
    for n in range(200):
        ask(counter, f"text {n} " * 40)
        ask(counter, loved)
    assert counter.cached <= 20
    assert words.seen.count(loved) == 1


def test_without_a_vocabulary_the_count_is_an_estimate_that_says_so():
    counter = inline(lambda _: Missing("no file"))
    text = "words and words " * 20
    assert ask(counter, text) == Counted(guess(text), exact=False, because="vocabulary")
    assert counter.warnings == ("no file",)
    assert not counter.exact(O200K)


def test_media_alone_are_exact_without_a_vocabulary():
    counter = inline(lambda _: Missing("no file"))
    counted = counter.count([Part(PartKind.IMAGE, detail="low")], encoding=O200K, tenant="t")
    assert counted == Counted(85)


@pytest.mark.parametrize("fault", [ValueError, RuntimeError, UnicodeError, MemoryError])
def test_an_encoder_that_raises_yields_an_estimate(fault):
    class Broken:
        def encode_ordinary(self, text):
            raise fault("broken")

    counter = inline(lambda _: Broken())
    assert ask(counter, "text " * 100) == Counted(
        guess("text " * 100), exact=False, because="fault"
    )


def test_above_four_mebi_of_new_text_the_rest_is_estimated(monkeypatch):
    monkeypatch.setattr(tokens, "MAX_UNCACHED", 10_000)
    words = Words()
    counter = inline(lambda _: words)
    ask(counter, "known words " * 400)
    counted = ask(counter, "known words " * 400, "new words " * 2000)
    assert counted == Counted(800 + guess("new words " * 2000), exact=False, because="size")
    assert len(words.seen) == 1


def test_inline_counting_slices_too():
    words = Words()
    ask(inline(lambda _: words), "a " * 200_000)
    assert max(map(len, words.seen)) <= tokens.SLICE


def test_an_unknown_encoding_is_an_estimate():
    counted = inline().count(texts("the text"), encoding="unheard", tenant="t")
    assert isinstance(counted, Counted)
    assert counted.because == "vocabulary"


# --- in threads -------------------------------------------------------------------------------


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110 - the condition is another thread's
        await asyncio.sleep(0)


def test_a_small_prompt_is_answered_at_once_and_a_large_one_later():
    async def run():
        counter = Counter(small, clock=HandClock())
        assert await counter.preload([O200K]) == ()
        assert counter.exact(O200K)
        assert isinstance(counter.count(texts("the"), encoding=O200K, tenant="t"), Counted)
        text = "and the end of the text\n" * 1000
        later = counter.count(texts(text), encoding=O200K, tenant="t")
        assert inspect.isawaitable(later)
        first = await later
        assert first == Counted(alone(text))
        again = counter.count(texts(text), encoding=O200K, tenant="t")
        assert again == first
        counter.close()

    asyncio.run(run())


def test_many_small_new_texts_together_do_not_hold_the_loop():
    async def run():
        counter = Counter(small, clock=HandClock())
        await counter.preload([O200K])
        later = counter.count(texts(*["the end"] * 5000), encoding=O200K, tenant="t")
        assert not isinstance(later, Counted)
        assert await later == Counted(5000 * alone("the end"))
        counter.close()

    asyncio.run(run())


def test_the_first_prompt_waits_for_the_vocabulary():
    async def run():
        counter = Counter(small, clock=HandClock())
        later = counter.count(texts("the"), encoding=O200K, tenant="t")
        assert not isinstance(later, Counted)
        assert await later == Counted(alone("the"))
        counter.close()

    asyncio.run(run())


def test_a_vocabulary_repaired_meanwhile_is_found_by_the_next_preload():
    async def run():
        there = False
        counter = Counter(lambda name: small(name) if there else Missing("gone"), clock=HandClock())
        assert await counter.preload([O200K]) == ("gone",)
        there = True
        assert await counter.preload([O200K]) == ()
        assert counter.exact(O200K)
        counter.close()

    asyncio.run(run())


def test_an_encoder_that_cannot_be_made_is_missing_and_says_why():
    loop_waits = threading.Event()

    def explode(name):
        assert loop_waits.wait(10)
        raise ValueError("not a vocabulary")

    async def run():
        counter = Counter(explode, clock=HandClock())
        preloading = asyncio.ensure_future(counter.preload([O200K]))
        await asyncio.sleep(0)
        loop_waits.set()
        (warning,) = await preloading
        assert "not a vocabulary" in warning
        counter.close()

    asyncio.run(run())


LONG = "word " * 10_000


def test_a_count_that_takes_too_long_becomes_an_estimate_and_the_thread_stops():
    async def run():
        clock, gate = HandClock(), Gate()
        counter = Counter(lambda _: gate, clock=clock)
        await counter.preload([O200K])
        waiting = asyncio.ensure_future(counter.count(texts(LONG * 10), encoding=O200K, tenant="t"))
        await until(gate.entered.is_set)
        clock.fire()
        assert await waiting == Counted(guess(LONG * 10), exact=False, because="slow")
        assert counter.busy == 1  # the thread still holds its place …
        gate.open.set()
        await until(lambda: counter.busy == 0)  # … until its slice is done
        assert len(gate.pieces) == 1
        counter.close()

    asyncio.run(run())


def test_what_a_slow_count_had_finished_is_kept():
    async def run():
        clock, gate = HandClock(), Gate()
        counter = Counter(lambda _: gate, clock=clock)
        await counter.preload([O200K])
        gate.open.set()
        first, second = "done " * 3000, "late " * 3000

        class HalfWay:
            def encode_ordinary(self, text):
                if text.startswith("late"):
                    gate.open.clear()
                    gate.entered.clear()
                return gate.encode_ordinary(text)

        counter = Counter(lambda _: HalfWay(), clock=clock)
        await counter.preload([O200K])
        gate.entered.clear()
        waiting = asyncio.ensure_future(
            counter.count(texts(first, second), encoding=O200K, tenant="t")
        )
        await until(lambda: len(gate.pieces) == 2 and gate.entered.is_set())
        clock.fire()
        counted = await waiting
        assert counted == Counted(len(first) + guess(second), exact=False, because="slow")
        assert counter.cached == 1
        gate.open.set()
        await until(lambda: counter.busy == 0)
        counter.close()

    asyncio.run(run())


def test_a_client_that_hangs_up_frees_its_place_between_two_slices():
    async def run():
        gate = Gate()
        counter = Counter(lambda _: gate, clock=HandClock())
        await counter.preload([O200K])
        waiting = asyncio.ensure_future(counter.count(texts(LONG * 10), encoding=O200K, tenant="t"))
        await until(gate.entered.is_set)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open.set()
        await until(lambda: counter.busy == 0)
        assert len(gate.pieces) == 1
        counter.close()

    asyncio.run(run())


def test_with_all_places_taken_a_call_is_estimated_at_once():
    async def run():
        gate = Gate()
        counter = Counter(lambda _: gate, clock=HandClock())
        await counter.preload([O200K])
        calls = [
            asyncio.ensure_future(counter.count(texts(LONG), encoding=O200K, tenant="t"))
            for _ in range(tokens.PLACES + 1)
        ]
        await until(lambda: calls[-1].done())
        assert calls[-1].result() == Counted(guess(LONG), exact=False, because="busy")
        assert counter.busy == tokens.PLACES
        for call in calls[:-1]:
            call.cancel()
        gate.open.set()
        await until(lambda: counter.busy == 0)
        counter.close()

    asyncio.run(run())


def test_a_closed_counter_answers_with_estimates():
    async def run():
        counter = Counter(small, clock=HandClock())
        await counter.preload([O200K])
        counter.close()
        counter.close()
        counted = await counter.count(texts(LONG), encoding=O200K, tenant="t")
        assert counted == Counted(guess(LONG), exact=False, because="busy")

    asyncio.run(run())


def test_the_panic_of_a_foreign_thread_is_an_estimate():
    class Panic(BaseException):
        """As pyo3's PanicException: no Exception."""

    class Broken:
        def encode_ordinary(self, text):
            raise Panic

    async def run():
        counter = Counter(lambda _: Broken(), clock=HandClock())
        await counter.preload([O200K])
        counted = await counter.count(texts(LONG), encoding=O200K, tenant="t")
        assert counted == Counted(guess(LONG), exact=False, because="fault")
        counter.close()

    asyncio.run(run())


def test_a_vocabulary_that_loads_too_slowly_means_an_estimate_and_then_an_exact_count():
    opened = threading.Event()

    def slowly(name):
        assert opened.wait(10)
        return small(name)

    async def run():
        clock = HandClock()
        counter = Counter(slowly, clock=clock)
        waiting = asyncio.ensure_future(counter.count(texts("the"), encoding=O200K, tenant="t"))
        await until(lambda: clock.timers)
        clock.fire()
        assert await waiting == Counted(1, exact=False, because="vocabulary")
        opened.set()
        assert await counter.count(texts("the"), encoding=O200K, tenant="t") == Counted(1)
        counter.close()

    asyncio.run(run())


def test_nothing_here_blocks_the_loop():
    async def run():
        counter = Counter(small, clock=HandClock())
        await counter.preload([O200K])
        with blockbuster_ctx():
            counted = await counter.count(texts(LONG), encoding=O200K, tenant="t")
        assert counted.exact
        counter.close()

    asyncio.run(run())


def test_texts_too_long_to_hash_at_once_are_remembered_all_the_same(monkeypatch):
    monkeypatch.setattr(tokens, "HASH_INLINE", 1000)
    words = Words()

    async def run():
        counter = Counter(lambda _: words, clock=HandClock())
        await counter.preload([O200K])
        for _ in range(2):
            assert await counter.count(texts(LONG), encoding=O200K, tenant="t") == Counted(10_000)
        assert len(words.seen) == 1
        counter.close()

    asyncio.run(run())


def test_count_tokens_is_answered_with_a_plain_number():
    parts = [*texts("the end"), Part(PartKind.IMAGE, width=750, height=1000)]
    counter = inline()
    counted = asyncio.run(counter.local_count(parts, encoding=O200K, tenant="t"))
    assert counted == alone("the end") + 1000
    openai = counter.count(parts, encoding=O200K, tenant="t", family=Family.OPENAI)
    assert openai == Counted(alone("the end") + 85 + 170 * 4)


HISTORY = [f"{number} " + "word " * 800 for number in range(20)]
"""Twenty messages of 4,000 characters: more than is counted at once, none of them long."""


class Noting:
    """An encoder that notes in which thread it works and how often the loop came by in between."""

    def __init__(self) -> None:
        self.rounds = 0
        self.seen: list[tuple[str, int]] = []
        self.threads: set[int] = set()

    def encode_ordinary(self, text):
        self.seen.append((text.split(" ")[0], self.rounds))
        self.threads.add(threading.get_ident())
        return list(text)

    def note(self) -> None:
        self.rounds += 1
        asyncio.get_running_loop().call_soon(self.note)


def test_a_long_history_of_short_texts_is_counted_on_the_loop_between_other_work():
    async def run():
        noting = Noting()
        counter = Counter(lambda _: noting, clock=HandClock())
        await counter.preload([O200K])
        noting.note()
        counted = await counter.count(texts(*HISTORY), encoding=O200K, tenant="t")
        assert counted == Counted(sum(map(len, HISTORY)))
        assert noting.threads == {threading.get_ident()}
        per_round = [[at for _, at in noting.seen].count(one) for one in range(noting.rounds + 1)]
        assert max(per_round) * 4_000 <= tokens.INLINE + 4_000
        assert counter.busy == 0
        assert counter.cached == len(HISTORY)
        counter.close()

    asyncio.run(run())


def test_two_such_histories_take_turns():
    async def run():
        noting = Noting()
        counter = Counter(lambda _: noting, clock=HandClock())
        await counter.preload([O200K])
        other = [f"x{text}" for text in HISTORY[:4]]
        long = counter.count(texts(*HISTORY), encoding=O200K, tenant="t")
        short = counter.count(texts(*other), encoding=O200K, tenant="t")
        await asyncio.gather(long, short)
        names = [name for name, _ in noting.seen]
        assert names.index("x3") < names.index("9")
        counter.close()

    asyncio.run(run())


def test_a_client_that_hangs_up_gets_no_further_turn():
    async def run():
        noting = Noting()
        counter = Counter(lambda _: noting, clock=HandClock())
        await counter.preload([O200K])
        waiting = asyncio.ensure_future(counter.count(texts(*HISTORY), encoding=O200K, tenant="t"))
        await until(lambda: noting.seen)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        seen = len(noting.seen)
        assert seen < len(HISTORY)
        await counter.count(
            texts(*(f"y{text}" for text in HISTORY[:5])), encoding=O200K, tenant="t"
        )
        assert {name for name, _ in noting.seen[seen:]} == {"y0", "y1", "y2", "y3", "y4"}
        counter.close()

    asyncio.run(run())


def test_turns_that_come_too_late_are_an_estimate_of_what_is_left():
    async def run():
        clock, noting = HandClock(), Noting()
        counter = Counter(lambda _: noting, clock=clock)
        await counter.preload([O200K])
        waiting = asyncio.ensure_future(counter.count(texts(*HISTORY), encoding=O200K, tenant="t"))
        await until(lambda: noting.seen)
        done = len(noting.seen)
        clock.fire()
        counted = await waiting
        assert not counted.exact
        assert counted.because == "slow"
        most = sum(map(len, HISTORY[: done + 4])) + sum(map(guess, HISTORY[done + 4 :]))
        assert sum(map(guess, HISTORY)) < counted.tokens <= most
        counter.close()

    asyncio.run(run())


@pytest.mark.parametrize("error", [ValueError, BaseException])
def test_a_text_at_which_the_encoder_fails_holds_up_no_turn(error):
    class Picky:
        def encode_ordinary(self, text):
            if text.startswith("3 "):
                raise error
            return list(text)

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        counter = Counter(lambda _: Picky(), clock=HandClock())
        await counter.preload([O200K])
        failing = counter.count(texts(*HISTORY), encoding=O200K, tenant="t")
        well = counter.count(texts(*HISTORY[4:]), encoding=O200K, tenant="other")
        both = await asyncio.gather(failing, well)
        size = sum(map(len, HISTORY)) - len(HISTORY[3])
        assert both[0] == Counted(size + guess(HISTORY[3]), exact=False, because="fault")
        assert both[1] == Counted(sum(map(len, HISTORY[4:])))
        assert counter.busy == 0
        counter.close()

    asyncio.run(run())


def test_a_text_too_long_for_a_turn_goes_to_a_thread():
    async def run():
        noting = Noting()
        counter = Counter(lambda _: noting, clock=HandClock())
        await counter.preload([O200K])
        await counter.count(texts("a" * (tokens.INLINE + 1)), encoding=O200K, tenant="t")
        assert threading.get_ident() not in noting.threads
        counter.close()

    asyncio.run(run())
