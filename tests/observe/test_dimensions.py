from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import thinwire as tw
from tests.gradients import slot_of
from thinwire.layout import BucketLayout, Group
from thinwire.memory.account import Account
from thinwire.observe.dimensions import DimensionStats, dimension_stats
from thinwire.tools.plots import plot_dimensions


def test_rows_without_an_entry_are_counted_under_each_selection():
    """All large entries lie in row 0; what is sent are two of them and one of row 2."""
    slot = slot_of("w", (4, 50))
    group = Group.of(
        BucketLayout((slot,), 200, torch.float32, torch.device("cpu")), [slot], torch.float32
    )
    c = torch.rand(200)
    c[:50] += 10.0
    account = Account(c.clone())
    positions = torch.tensor([0, 1, 100])
    account.write_off(positions, c[positions])
    found = dimension_stats(7, group, account, {"w": tw.TopK(density=0.02)})["w"]
    assert found == DimensionStats(
        step=7, rows=4, empty_as_sent=2, empty_all_dimension=0, empty_global=3
    )


def dimensions_job(rank: int, world: int) -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    ddp = nn.parallel.DistributedDataParallel(model)
    counts = []
    for method in (tw.ADTopK(density=0.02), tw.TopK(density=0.02)):
        handle = tw.attach(ddp, method)
        assert handle.stats().dimensions is None
        ddp(torch.randn(2, 64)).square().sum().backward()
        handle.stats()
        stats = handle.stats(dimensions=True).dimensions["2.weight"]
        assert (stats.step, stats.rows, stats.empty_all_dimension) == (1, 32, 0)
        counts.append(stats.empty_as_sent)
        handle.close()
        ddp.zero_grad()
    return counts


def test_all_dimension_top_k_leaves_no_row_out_and_global_top_k_does(pools):
    for all_dimension, globally in pools(2).run(dimensions_job):
        assert all_dimension == 0
        assert globally > 0


def test_the_plot_is_drawn_from_a_history(tmp_path: Path):
    history = [
        {"w": DimensionStats(step, 10, 1, 0, 5), "v": DimensionStats(step, 4, 0, 0, 1)}
        for step in range(3)
    ]
    plot_dimensions(history, tmp_path / "dimensions.png")
    assert (tmp_path / "dimensions.png").stat().st_size > 1000
