"""The exact search against brute force, and the model of a step against a plain simulation."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.plan.prices import Line, LinkPrices, MeasuredPrices, Travel, fit_line
from thinwire.plan.search import Level, find_best, find_fastest
from thinwire.plan.step_model import Conditions, Cost, find_dearness, predict_step

small = st.integers(0, 20).map(float)
costs = st.tuples(small, small, small, small, st.integers(0, 5).map(float), small).map(
    lambda it: Cost(it[0], it[1] + it[3], it[2], it[3], it[4], it[5])
)
levels = st.builds(Level, costs, st.integers(0, 3).map(float))


@st.composite
def lines(draw: st.DrawFn) -> tuple[Conditions, list[list[Level]]]:
    buckets = draw(st.integers(1, 5))
    gaps = draw(st.lists(st.integers(0, 15).map(float), min_size=buckets, max_size=buckets))
    conditions = Conditions(
        tuple(itertools.accumulate(gaps)),
        draw(small),
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 4.0, 9.0])),
        (*draw(st.lists(st.booleans(), min_size=buckets - 1, max_size=buckets - 1)), False),
    )
    count = draw(st.integers(1, 3))
    options = draw(
        st.lists(
            st.lists(levels, min_size=count, max_size=count), min_size=buckets, max_size=buckets
        )
    )
    kinds = [
        [replace(level, cost=replace(level.cost, kind=kind)) for kind, level in enumerate(bucket)]
        for bucket in options
    ]
    return conditions, kinds


def every_choice(conditions: Conditions, options: list[list[Level]]) -> list[tuple[float, float]]:
    """(time of the step, energy kept) of all combinations."""
    return [
        (
            predict_step(conditions, [level.cost for level in choice]).step_s,
            sum(level.kept for level in choice),
        )
        for choice in itertools.product(*options)
    ]


@settings(max_examples=300, deadline=None)
@given(lines(), st.floats(1.0, 1.5))
def test_the_search_is_as_good_as_trying_everything(line, slack: float) -> None:
    conditions, options = line
    tried = every_choice(conditions, options)
    fastest = min(step for step, _ in tried)
    found = find_fastest(conditions, options)
    assert found.step_s == pytest.approx(fastest)
    assert found.kept == max(kept for step, kept in tried if step <= fastest + 1e-9)
    deadline = slack * fastest
    found = find_best(conditions, options, deadline)
    assert found.step_s <= deadline + 1e-6
    assert found.kept == max(kept for step, kept in tried if step <= deadline + 1e-9)
    chosen = [options[i][number].cost for i, number in enumerate(found.choice)]
    assert predict_step(conditions, chosen).step_s == pytest.approx(found.step_s)


def test_a_deadline_that_nothing_meets_gives_the_fastest() -> None:
    conditions = Conditions((0.0, 1.0), 0.0)
    options = [[Level(Cost(0, 5, 0), 1.0), Level(Cost(0, 3, 0), 0.5)]] * 2
    assert find_best(conditions, options, 1.0) == find_fastest(conditions, options)
    assert find_fastest(conditions, options).choice == (1, 1)


def test_dense_stays_where_the_link_has_time() -> None:
    """A bucket that is ready early travels under backward; only the last one is exposed."""
    conditions = Conditions((0.0, 10.0), 0.0)
    dense, sparse = Level(Cost(0, 8, 0), 1.0), Level(Cost(0.1, 1, 0.1), 0.4)
    assert find_best(conditions, [[dense, sparse]] * 2, 11.5).choice == (0, 1)


def test_small_buckets_wait_for_each_other_and_pay_one_latency() -> None:
    few = Cost(0, 3, 0, latency_s=2, sent_bytes=10)
    conditions = Conditions((0.0, 4.0, 8.0), 0.0, coalesce_bytes=20)
    prediction = predict_step(conditions, [few, few, few])
    first, second, third = prediction.spans
    assert (first.sent, first.arrived) == (second.sent, second.arrived) == (4.0, 4.0 + 2 + 1 + 1)
    # Nobody waits for more behind the last one.
    assert (third.sent, third.arrived) == (8.0, 11.0)
    alone = predict_step(Conditions((0.0, 4.0, 8.0), 0.0), [few, few, few])
    assert [span.sent for span in alone.spans] == [0.0, 4.0, 8.0]


def test_buckets_that_are_encoded_as_one_leave_together() -> None:
    cost = Cost(1, 3, 0, latency_s=2)
    conditions = Conditions((0.0, 4.0, 4.0), 0.0, with_next=(False, True, False))
    first, second, third = predict_step(conditions, [cost, cost, cost]).spans
    assert (first.sent, first.arrived) == (1.0, 4.0)
    # The third one's encoding is waited for, and both pay one latency.
    assert (second.sent, second.arrived) == (third.sent, third.arrived) == (7.0, 7.0 + 2 + 1 + 1)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7, 3.0])
def test_a_link_is_as_dear_as_a_measured_step_says(factor: float) -> None:
    conditions = Conditions((0.0, 4.0, 8.0), 2.0)

    def costs(times: float) -> list[Cost]:
        return [Cost(0.1, 4.0 * times, 0.2, 1.0 * times, 10.0)] * 3

    measured = predict_step(conditions, costs(factor)).step_s
    assert find_dearness(conditions, costs(1.0), measured) == pytest.approx(factor, rel=0.02)
    # Whatever else makes a step ten times as long, it is not the link.
    assert find_dearness(conditions, costs(1.0), 10 * measured) == pytest.approx(4.0, rel=0.01)


def test_a_model_of_forty_buckets_is_decided_quickly() -> None:
    draw = random.Random(0)
    ready = tuple(itertools.accumulate(draw.uniform(0.5e-3, 4e-3) for _ in range(40)))
    conditions = Conditions(ready, 30e-3, coalesce_bytes=512 << 10)
    options = []
    for _ in ready:
        size = draw.uniform(1e6, 9e6)
        bytes_per_element = [6, 3, 1.6, 0.8, 0.4, 0.24, 0.12, 0.06, 0.02]
        options.append(
            [
                Level(
                    Cost(
                        0 if rank < 2 else 1e-4 + size * 2e-11,
                        2e-4 + size * share * 0.8e-9,
                        0 if rank < 2 else 5e-5,
                        2e-4,
                        size * share,
                    ),
                    size * (1 - 0.1 * rank * draw.uniform(0.8, 1.2)),
                )
                for rank, share in enumerate(bytes_per_element)
            ]
        )
    began = time.process_time()
    fastest = find_fastest(conditions, options)
    found = find_best(conditions, options, max(1.1 * conditions.silent_s, 1.02 * fastest.step_s))
    assert found.kept >= fastest.kept
    assert time.process_time() - began < 20


def test_a_line_is_found_again() -> None:
    points = [(x, 2e-4 + 1e-9 * x) for x in (6.4e4, 1e6, 8e6)]
    line = fit_line(points)
    assert line.latency_s == pytest.approx(2e-4)
    assert line.per_byte_s == pytest.approx(1e-9)
    assert fit_line([(1e5, 1e-4), (1e6, 1.2e-3), (8e6, 1e-2)]).latency_s >= 0


def test_a_round_pays_one_latency_and_all_bytes() -> None:
    prices = MeasuredPrices({"all_reduce": Line(1.0, 0.1), "all_gather": Line(2.0, 0.2)})
    together = ((Travel("all_reduce", 10), Travel("all_gather", 10)),)
    assert prices.seconds(together) == pytest.approx(2 + 1 + 2)
    apart = ((Travel("all_reduce", 10),), (Travel("broadcast", 10),))
    assert prices.seconds(apart) == pytest.approx(2 + 4)


def test_a_described_link_has_no_free_lunch() -> None:
    few, many = LinkPrices(1e10, 25e-6, 4), LinkPrices(1e10, 25e-6, 64)
    assert few.seconds(((Travel("all_reduce", 1.25e9),),)) == pytest.approx(1, rel=0.01)
    assert many.latency("all_gather") > few.latency("all_gather")
    assert many.latency("all_reduce") == pytest.approx(12 * 25e-6)
