"""Threshold selections keep their promise on any data, and end on all of it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.contracts.cluster import parameter
from tests.select.data import odd_tensors
from thinwire.bench.data import LAWS, draw, real_gradients
from thinwire.errors import UsageError
from thinwire.kernels.looks import Targets, TorchLook
from thinwire.kernels.topk import row_topk_reference
from thinwire.layout import RowTable
from thinwire.select.finish import TargetRows, finish, finish_in_capacity, targets_of
from thinwire.select.gaussian import GaussianThreshold
from thinwire.select.redsync import RedSyncThreshold
from thinwire.select.sampled import SampledThreshold
from thinwire.select.sidco import SIDCoThreshold
from thinwire.select.threshold_fixed import FixedThreshold

SELECTORS = {
    "gaussian": lambda d, f="promise": GaussianThreshold(d, f),
    "redsync": lambda d, f="promise": RedSyncThreshold(d, f),
    "redsync trimmed": lambda d, f="promise": RedSyncThreshold(d, f, True),
    "sidco exponential": lambda d, f="promise": SIDCoThreshold(d, f, "exponential", 1),
    "sidco gamma": lambda d, f="promise": SIDCoThreshold(d, f, "gamma", 2),
    "sidco pareto": lambda d, f="promise": SIDCoThreshold(d, f, "pareto", 3),
    "sidco adapt": lambda d, f="promise": SIDCoThreshold(d, f, "pareto", 1, True),
    "sampled": lambda d, f="promise": SampledThreshold(d, f),
    "sampled at random": lambda d, f="promise": SampledThreshold(d, f, sample="random"),
    "sampled, no reselection": lambda d, f="promise": SampledThreshold(d, f, reselect=False),
}
REAL = real_gradients()


def pick(selector, x):
    table = RowTable([selector.rows(parameter("w", x.shape).slot(0), None)], x.numel())
    return selector.session().pick(x, table), table


def look_at(x, wanted):
    return TorchLook([x], Targets([(x.numel(), wanted)], x.device))


def check_picks(picks, table, x):
    """Chosen entries are the largest, ascending and different; the rest are zeros at index 0."""
    count = int(picks.counts[0])
    chosen, unused = picks.indices[:count], picks.indices[count:]
    assert picks.indices.shape == picks.values.shape == (table.entries,)
    assert (chosen.diff() > 0).all() and not unused.any() and not picks.values[count:].any()
    assert torch.equal(picks.values[:count], x[chosen])
    assert torch.equal(chosen, row_topk_reference(x, count))
    return count


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", SELECTORS)
def test_realised_density_is_within_the_band(name, law, density):
    for n in (math.ceil(32 / density), 100_003):
        x = draw(law, n)
        picks, table = pick(SELECTORS[name](density), x)
        assert 0.8 <= check_picks(picks, table, x) / (density * n) <= 1.25


@pytest.mark.parametrize("name", SELECTORS)
def test_realised_density_on_real_gradients(name):
    tried = 0
    for x in REAL.values():
        for density in (0.01, 0.001):
            if density * x.numel() >= 32:
                picks, table = pick(SELECTORS[name](density), x)
                assert 0.8 <= check_picks(picks, table, x) / (density * x.numel()) <= 1.25
                tried += 1
    assert tried >= 4


@pytest.mark.parametrize("case", odd_tensors())
@pytest.mark.parametrize("name", SELECTORS)
def test_odd_tensors_end_with_at_least_one_entry(name, case):
    x = odd_tensors()[case]
    for density in (0.001, 0.3, 1.0):
        picks, table = pick(SELECTORS[name](density), x)
        assert 1 <= check_picks(picks, table, x) <= table.entries


@pytest.mark.parametrize("case", odd_tensors())
@pytest.mark.parametrize("name", SELECTORS)
def test_published_finish_ends_inside_its_capacity(name, case):
    x = odd_tensors()[case]
    picks, table = pick(SELECTORS[name](0.01, "published"), x)
    most = 4 * max(1, math.floor(0.01 * x.numel()))
    assert 0 <= check_picks(picks, table, x) <= table.entries <= most


@pytest.mark.parametrize("threshold", [0.0, 1e-3, 0.5, 1.0, 2.5, 1e9, math.inf, math.nan])
def test_both_ways_to_finish_choose_the_same_entries(threshold):
    for x in [*odd_tensors().values(), draw("student3", 4000), torch.ones(300)]:
        n = x.numel()
        for target, keep, fewest in [
            (1, 1, 1),
            (n // 2 or 1, n, n // 3),
            (n // 9 or 1, n // 7 or 1, 0),
        ]:
            slot = parameter("w", x.shape).slot(0)
            rows = TargetRows(slot, (), (), n, 1, keep, "", target, fewest, keep)
            fast, count = finish(x.abs(), torch.tensor(threshold), rows)
            plain, expected = finish_in_capacity(x.abs(), torch.tensor(threshold), rows)
            assert torch.equal(fast, plain) and int(count) == int(expected)


def test_published_estimates_are_the_papers():
    """Figures of the algorithm note, to its precision: survivors / k at 0.1 % without any finish."""
    n, k = 1_000_000, 1000
    gauss, laplace = draw("gauss", n), draw("laplace", n)

    def ratio(selector, x):
        return int((x.abs() > selector.estimate(look_at(x, k)).float()).sum()) / k

    assert abs(ratio(GaussianThreshold(0.001, "published"), gauss) - 1.0) < 0.1
    assert ratio(RedSyncThreshold(0.001, "published", True), draw("student3", n)) > 50
    assert ratio(SIDCoThreshold(0.001, "published", "exponential", 1), gauss) < 0.05
    for stages in (1, 2, 3):
        for law in ("exponential", "pareto", "gamma"):
            fitted = ratio(SIDCoThreshold(0.001, "published", law, stages), laplace)
            assert 0.85 < fitted < 1.15
    assert abs(ratio(SIDCoThreshold(0.001, "published", "pareto", 1), gauss) - 6.9) < 1.5
    assert abs(ratio(SIDCoThreshold(0.001, "published", "pareto", 2), gauss) - 1.22) < 0.2


def test_zeros_do_not_decide_the_fit_of_a_gamma_law():
    """Half of a ReLU's gradient is exactly zero. The published fit takes log(|g| / length + 2.2e-16)."""
    x = draw("laplace", 50_000)
    x[::2] = 0
    a = x.abs().double()
    unit = a / a.norm()
    s = (unit.mean() + 2.2e-16).log() - (unit + 2.2e-16).log().mean()
    shape = (3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)
    (threshold,) = SIDCoThreshold(0.01, "published", "gamma", 1).estimate(look_at(x, 500))
    beyond = torch.special.gammaincc(shape, threshold.double() / (a.mean() / shape))
    assert float(beyond) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("value", [-0.25, 0.1, 1 / 3, 7e-6, 3.3e5])
def test_the_pareto_law_of_equal_magnitudes_is_all_at_their_mean(value, stages):
    """Their variance is 0, whatever rounding leaves of it in one order of adding up or another."""
    x = torch.full((77777,), value)
    (threshold,) = SIDCoThreshold(0.01, "published", "pareto", stages).estimate(look_at(x, 777))
    assert threshold.float() == x[0].abs()


def test_sidco_adapts_its_stages_and_remembers_them():
    selector = SIDCoThreshold(0.001, distribution="pareto", stages=1, adapt=True)
    session = selector.session()
    slot = parameter("w", (100_000,)).slot(0)
    table = RowTable([selector.rows(slot, None)], slot.numel)
    lists = set()
    for seed in range(20):
        session.pick(draw("gauss", slot.numel, seed), table)
        lists.add(len(targets_of(table, torch.device("cpu"))._listed))
    assert max(lists) <= 3, "what is made for a number of stages goes with it"
    state = session.state_dict(["w", "never seen"])
    assert state["w"]["stages"] > 1 and state["never seen"]["stages"] == 1
    restored = selector.session()
    restored.load_state_dict(state)
    assert restored.state_dict(["w"]) == {"w": state["w"]}


@pytest.mark.parametrize(
    "n, stride", [(17_999, 9), (1_000, 1), (36_864, 17), (147_456, 73), (1 << 20, 97)]
)
def test_sample_geometry(n, stride):
    selector = SampledThreshold(0.001)
    assert selector.stride(n, 0.001) in (stride, 1) and selector.stride(n, 0.001) % 8 == 1


def test_samples_differ_from_step_to_step_and_repeat_for_a_step():
    selector = SampledThreshold(0.001, reselect=False, iterations=0, finish="published")
    x = draw("gauss", 300_000)
    slot = parameter("w", x.shape).slot(0)
    table = RowTable([selector.rows(slot, None)], slot.numel)

    def chosen(step):
        session = selector.session()
        session.begin(["w"], [step])
        return session.threshold(x.abs(), table.rows[0])

    assert chosen(3) == chosen(3)
    assert len({float(chosen(step)) for step in range(8)}) > 4


def test_fixed_threshold_sends_what_reaches_it_within_its_bound():
    x = torch.tensor([0.5, -2.0, 0.1, 3.0, -0.2, 1.0, 0.0, 0.9])
    picks, table = pick(FixedThreshold(0.5, threshold=0.9), x)
    assert table.entries == 4 and check_picks(picks, table, x) == 4
    picks, table = pick(FixedThreshold(0.25, threshold=0.9), x)
    assert check_picks(picks, table, x) == 2
    picks, table = pick(FixedThreshold(0.5, threshold=10.0), x)
    assert check_picks(picks, table, x) == 1


@pytest.mark.parametrize(
    "build, field",
    [
        (lambda: GaussianThreshold(0.0), "density"),
        (lambda: GaussianThreshold(0.1, "exact"), "finish"),
        (lambda: SIDCoThreshold(0.1, distribution="normal"), "distribution"),
        (lambda: SIDCoThreshold(0.1, stages=0), "stages"),
        (lambda: SampledThreshold(0.1, upper=0.5), "upper"),
        (lambda: SampledThreshold(0.1, sample="even"), "sample"),
        (lambda: SampledThreshold(0.1, iterations=-1), "iterations"),
        (lambda: FixedThreshold(0.1, threshold=0.0), "threshold"),
    ],
)
def test_bad_settings_are_named(build, field):
    with pytest.raises(UsageError, match=field):
        build()
