"""The heap: order, ties, and what is not yet due."""

from gateway.simulate.engine import Engine


def test_events_run_in_order_and_equal_instants_as_they_were_set():
    engine, seen = Engine(), []
    for when, name in [(5, "b"), (3, "a"), (5, "c"), (4, "x"), (5, "d")]:
        engine.at(when, seen.append, name)
    engine.run(10)
    assert seen == ["a", "x", "b", "c", "d"]
    assert (engine.now, engine.events, len(engine)) == (5, 5, 0)


def test_what_lies_behind_the_end_stays():
    engine, seen = Engine(), []
    engine.at(5, seen.append, "in")
    engine.at(6, seen.append, "out")
    engine.run(5)
    assert (seen, len(engine)) == (["in"], 1)


def test_an_event_of_the_past_runs_now_and_never_moves_time_back():
    engine, seen = Engine(), []
    engine.at(5, lambda _: engine.at(1, lambda _: seen.append(engine.now)))
    engine.run(9)
    assert seen == [5]
