"""ThresholdTopK, Monitor and Updater; the twelve defects of the published version, each where it could come back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from tests.gradients import slot_of
from thinwire.kernels.above import select_above, select_above_reference
from thinwire.layout import RowTable
from thinwire.select.threshold_reused import EXACT, REUSE, Drift, Monitor, ThresholdTopK, Updater
from thinwire.wire.codec import Header

SHAPE = (50, 40)
NUMEL = 2000


def headers(picks, world: int = 1) -> Header:
    """What `world` ranks with the same picks would read."""
    return Header(
        non_finite=torch.zeros(world, dtype=torch.bool),
        counts=picks.counts.expand(world, -1),
        had_gradient=torch.ones(world, len(picks.counts), dtype=torch.bool),
        notes=picks.notes.expand(world, *picks.notes.shape),
    )


def turn(session, step, c, name="w"):
    """One turn of one tensor: (mode, picks)."""
    (mode,) = session.begin([name], [step])
    chosen = session.turn((mode,))
    table = RowTable([chosen.rows(0, slot_of(name, SHAPE))], NUMEL)
    picks = chosen.pick(c, table)
    header = headers(picks)
    chosen.observe(table, header.notes, header.counts)
    return mode, picks


class TestMonitorAndUpdater:
    def test_every_grade_of_drift_is_reachable(self):
        judge = Monitor().evaluate
        assert [judge(d) for d in (0.0, 0.4, 0.6, 1.0, 1.5, 2.0, 2.1, math.inf, math.nan)] == [
            Drift.STEADY,
            Drift.STEADY,
            Drift.SMALL,
            Drift.AT_TOLERANCE,
            Drift.LARGE,
            Drift.LARGE,
            Drift.JUMP,
            Drift.JUMP,
            Drift.JUMP,
        ]

    def test_drift_is_measured_against_the_tolerance_at_the_old_threshold(self):
        monitor = Monitor(tolerance=0.1)
        measure = lambda old, new: float(monitor.measure(torch.tensor(old), torch.tensor(new)))  # noqa: E731
        assert measure(1.0, 1.05) == pytest.approx(0.5)
        assert measure(2.0, 1.5) == pytest.approx(2.5)
        assert measure(0.0, 0.0) == 0.0
        assert measure(0.0, 1.0) == math.inf

    def test_tau_grows_when_stable_shrinks_when_not_and_never_falls_below_the_floor(self):
        updater = Updater(tau=5, floor=5)
        assert updater.next(9, Drift.STEADY) == (11, True)
        assert updater.next(9, Drift.SMALL) == (10, True)
        assert updater.next(9, Drift.AT_TOLERANCE) == (9, None)
        assert updater.next(9, Drift.LARGE) == (8, False)
        assert updater.next(9, Drift.JUMP) == (7, False)
        assert updater.next(6, Drift.JUMP) == (5, False)

    @pytest.mark.parametrize("field", ["tolerance", "warmup"])
    def test_bad_monitor_settings_are_named(self, field):
        with pytest.raises(tw.UsageError, match=field):
            Monitor(**{field: 0})


class TestSelectAbove:
    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.integers(-3, 3), min_size=1, max_size=40),
        st.floats(0, 4),
        st.integers(1, 40),
    )
    def test_equals_the_reference_with_ties(self, numbers, threshold, capacity):
        row = torch.tensor(numbers, dtype=torch.float32)
        capacity = min(capacity, len(numbers))
        got = select_above(row, torch.tensor(threshold), capacity)
        wanted = select_above_reference(row, torch.tensor(threshold), capacity)
        assert torch.equal(got[0], wanted[0])
        assert got[1] == wanted[1]

    def test_never_empty_and_never_over_capacity(self):
        row = torch.randn(1000)
        assert select_above(row, torch.tensor(99.0), 8)[1] == 1
        indices, count = select_above(row, torch.tensor(0.0), 8)
        assert count == 8
        assert set(indices.tolist()) == set(row.abs().topk(8).indices.tolist())


class TestSession:
    def test_warm_up_is_exact_then_every_tau_turns(self):
        session = ThresholdTopK(0.01).session()
        c = torch.randn(NUMEL)
        modes = [turn(session, t, c)[0] for t in range(60)]
        assert modes[:15] == [EXACT] * 15
        # A constant gradient is steady: tau goes 5, 7, 9, 11, ...
        exact_turns = [t for t, mode in enumerate(modes) if mode == EXACT and t >= 15]
        assert exact_turns == [20, 27, 36, 47]

    def test_both_signs_are_sent_between_refreshes(self):
        session = ThresholdTopK(0.01).session()
        c = -torch.rand(NUMEL) - 1.0
        for t in range(17):
            mode, picks = turn(session, t, c)
        assert mode == REUSE
        assert picks.counts.item() == 20
        assert bool((picks.values[:20] < 0).all())

    def test_every_layer_refreshes_for_even_and_odd_tau(self):
        for tau in (5, 6):
            session = ThresholdTopK(0.01, updater=Updater(tau=tau)).session()
            generator = torch.Generator().manual_seed(tau)
            refreshed = {f"layer{i}": 0 for i in range(5)}
            for t in range(15, 45):
                for name in refreshed:
                    mode, _ = turn(session, t, torch.randn(NUMEL, generator=generator), name)
                    refreshed[name] += mode == EXACT
            assert all(count >= 3 for count in refreshed.values())

    def test_a_shift_of_the_distribution_is_capped_and_answered_by_a_refresh(self):
        session = ThresholdTopK(0.01).session()
        c = torch.randn(NUMEL)
        for t in range(17):
            turn(session, t, c)
        mode, picks = turn(session, 17, 100 * c)
        assert mode == REUSE
        assert picks.counts.item() == picks.values.numel() == math.ceil(1.25 * 20)
        assert turn(session, 18, 100 * c)[0] == EXACT

    def test_a_collapse_still_sends_one_entry_and_is_answered_by_a_refresh(self):
        session = ThresholdTopK(0.01).session()
        c = torch.randn(NUMEL)
        for t in range(17):
            turn(session, t, c)
        mode, picks = turn(session, 17, 1e-3 * c)
        assert (mode, picks.counts.item()) == (REUSE, 1)
        assert turn(session, 18, 1e-3 * c)[0] == EXACT

    def test_ranks_with_different_gradients_decide_alike(self):
        sessions = [ThresholdTopK(0.01).session() for _ in range(3)]
        generator = torch.Generator().manual_seed(0)
        for t in range(80):
            modes = {session.begin(["w"], [t]) for session in sessions}
            assert len(modes) == 1
            (mode,) = modes
            turns = [session.turn(mode) for session in sessions]
            table = RowTable([turns[0].rows(0, slot_of("w", SHAPE))], NUMEL)
            scales = (1.0, 1.0 + 0.02 * t, 3.0 * math.exp(-t / 20))
            picks = [
                one.pick(scale * torch.randn(NUMEL, generator=generator), table)
                for one, scale in zip(turns, scales, strict=True)
            ]
            notes = torch.stack([p.notes for p in picks])
            counts = torch.stack([p.counts for p in picks])
            for one in turns:
                one.observe(table, notes, counts)

    def test_the_density_is_the_one_that_was_asked_for(self):
        for density in (0.01, 0.05):
            session = ThresholdTopK(density).session()
            _, picks = turn(session, 0, torch.randn(NUMEL))
            assert picks.counts.item() == density * NUMEL

    def test_zero_gradients_terminate(self):
        session = ThresholdTopK(0.01).session()
        for t in range(40):
            _, picks = turn(session, t, torch.zeros(NUMEL))
            assert picks.counts.item() >= 1

    def test_saving_in_mid_period_gives_the_same_future(self):
        generator = torch.Generator().manual_seed(0)
        data = [torch.randn(NUMEL, generator=generator) for _ in range(40)]
        session = ThresholdTopK(0.01).session()
        for t in range(22):
            turn(session, t, data[t])
        resumed = ThresholdTopK(0.01).session()
        resumed.load_state_dict(session.state_dict(["w"]))
        for t in range(22, 40):
            mode, picks = turn(session, t, data[t])
            other_mode, other = turn(resumed, t, data[t])
            assert mode == other_mode
            assert torch.equal(picks.indices, other.indices)

    def test_300_stationary_turns_are_mostly_reused_and_keep_the_energy(self):
        """At most 20 % exact selections, at least 95 % of the exact selection's energy."""
        session = ThresholdTopK(0.01).session()
        generator = torch.Generator().manual_seed(0)
        residual = torch.zeros(NUMEL)
        exact_turns, kept, best = 0, 0.0, 0.0
        for t in range(300):
            c = residual + torch.randn(NUMEL, generator=generator)
            mode, picks = turn(session, t, c)
            exact_turns += mode == EXACT
            kept += float(picks.values.square().sum())
            best += float(c.abs().topk(20).values.square().sum())
            residual = c.index_add(0, picks.indices, -picks.values)
        assert exact_turns <= 60
        assert kept >= 0.95 * best


def test_a_loaded_threshold_has_all_its_bits():
    """Gradients in float64 have thresholds in float64."""
    for seed in range(8):
        c = torch.randn(NUMEL, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        setting = ThresholdTopK(0.1, Monitor(warmup=1), Updater(tau=9))
        ours, theirs = setting.session(), setting.session()
        turn(ours, 0, c)
        theirs.load_state_dict(ours.state_dict(["w"]))
        (mode, left), (_, right) = turn(ours, 1, c), turn(theirs, 1, c)
        assert mode == REUSE
        assert torch.equal(left.counts, right.counts)
        assert torch.equal(left.indices, right.indices)
