"""One file per rank: what is restored, by how many ranks, and what is missing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.integrations.common import METHOD, are_identical, flat, make_model
from tests.sharded import make_mesh
from tests.sharded import make_model as make_sharded
from tests.sharded import train as train_sharded
from thinwire.integrations import load_rank, save_rank


def start() -> tuple[nn.Module, tw.Handle]:
    ddp = DistributedDataParallel(make_model())
    return ddp, tw.attach(ddp, METHOD, deterministic=True)


def train(ddp: nn.Module, rank: int, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        ddp(inputs).square().mean().backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None


def save_job(rank: int, world: int, folder: Path) -> None:
    ddp, handle = start()
    train(ddp, rank, range(3))
    assert save_rank(handle, folder).name == f"thinwire_{rank}.pt"
    torch.save(ddp.module.state_dict(), folder / f"model_{rank}.pt")
    train(ddp, rank, range(3, 6))
    torch.save(flat(ddp), folder / f"end_{rank}.pt")


def resume_job(rank: int, world: int, folder: Path) -> tuple[bool, bool]:
    """(with what was held back it ends as the other did, without it it does)"""
    ends = []
    for restored in (True, False):
        ddp, handle = start()
        ddp.module.load_state_dict(torch.load(folder / f"model_{rank}.pt"))
        if restored:
            assert load_rank(handle, folder)
            assert handle.stats().steps == 3
        train(ddp, rank, range(3, 6))
        ends.append(torch.equal(flat(ddp), torch.load(folder / f"end_{rank}.pt")))
    return ends[0], ends[1]


def other_world_job(rank: int, world: int, folder: Path, on_world_change: str | None) -> float:
    """The sum of what is held back of one layer."""
    ddp, handle = start()
    assert load_rank(handle, folder, on_world_change=on_world_change)
    held = handle.residual("0.weight")
    assert are_identical(held)
    train(ddp, rank, range(1))
    return float(held.sum())


def missing_job(rank: int, world: int, folder: Path) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire.integrations").addHandler(handler)
    _, handle = start()
    assert not load_rank(handle, folder)
    return messages


def refused_job(rank: int, world: int, folder: Path) -> str:
    with pytest.raises((tw.UsageError, tw.ExchangeError)) as caught:
        load_rank(start()[1], folder)
    return str(caught.value)


@pytest.fixture
def saved(pools, tmp_path: Path) -> Path:
    """By two ranks."""
    pools(2).run(save_job, tmp_path)
    return tmp_path


def test_every_rank_gets_its_own_back(pools, saved):
    assert pools(2).run(resume_job, saved) == [(True, False)] * 2
    assert not list(saved.glob(".*")), "a file that was being written is left over"


def test_more_ranks_get_the_mean_or_nothing(pools, saved):
    states = [torch.load(saved / f"thinwire_{rank}.pt", weights_only=True) for rank in range(2)]
    held = [s["ranks"][f"rank{r}"]["memory"]["residual"]["0.weight"] for r, s in enumerate(states)]
    mean = float(((held[0].double() + held[1]) / 2).float().sum())
    assert pools(3).run(other_world_job, saved, "mean") == [mean] * 3
    assert pools(3).run(other_world_job, saved, "reset") == [0.0] * 3


def test_a_changed_world_has_to_be_decided(pools, saved):
    for text in pools(3).run(refused_job, saved):
        assert "on_world_change is None, it must be 'mean' or 'reset'" in text


def test_a_folder_without_files_warns(pools, tmp_path):
    for (message,) in pools(2).run(missing_job, tmp_path):
        assert "nothing is restored" in message


@pytest.mark.parametrize("damage", ["missing", "torn", "older"])
def test_ranks_that_find_different_things_all_stop(pools, saved, damage):
    """One that went on alone would spoil the others."""
    file = saved / "thinwire_1.pt"
    if damage == "missing":
        file.unlink()
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        state = torch.load(file, weights_only=True)
        state["ranks"]["rank1"]["step"] = 2
        torch.save(state, file)
    for text in pools(2).run(refused_job, saved):
        assert "the saved state differs between ranks: rank 0 has step 3 of 2 ranks" in text


def test_files_of_more_ranks_from_an_earlier_time_do_no_harm(pools, saved):
    (saved / "thinwire_2.pt").write_bytes(b"old")
    pools(3).run(other_world_job, saved, "mean")


def save_shards_job(rank: int, world: int, folder: Path) -> None:
    model = make_sharded(make_mesh(2, 2))
    handle = tw.attach(model, sparse())
    train_sharded(model, 3)
    save_rank(handle, folder)
    handle.close()


def load_shards_job(
    rank: int, world: int, folder: Path, shape: tuple[int, int], on_world_change: str | None
) -> str:
    """What it says, or whether every shard has the mean of its own files, or nothing."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    handle = tw.attach(make_sharded(mesh), sparse())
    name = "blocks.0.up.weight"
    try:
        assert load_rank(handle, folder, on_world_change=on_world_change)
        assert handle.stats().steps == 3
        held = handle.residual(name)
        if on_world_change == "reset":
            return f"nothing: {not held.any()}"
        files = [folder / f"thinwire_{number}.pt" for number in (rank, rank + 2)]
        saved = [torch.load(file, weights_only=True)["ranks"] for file in files]
        first, second = (saved[r][f"rank{r}"]["memory"]["residual"][name] for r in range(2))
        return f"mean: {torch.equal(held, ((first.double() + second) / 2).float())}"
    except (tw.UsageError, tw.ExchangeError) as error:
        return str(error)
    finally:
        handle.close()


@pytest.fixture
def saved_shards(sharded, tmp_path: Path) -> Path:
    """By two replicas of two shards."""
    sharded.run(save_shards_job, tmp_path)
    return tmp_path


def test_another_number_of_replicas_takes_the_mean_of_the_same_shard(pools, saved_shards):
    assert pools(2).run(load_shards_job, saved_shards, (1, 2), "mean") == ["mean: True"] * 2


def test_other_shards_begin_with_nothing_or_are_told_what_reads_them(sharded, saved_shards):
    assert sharded.run(load_shards_job, saved_shards, (1, 4), "reset") == ["nothing: True"] * 4
    for text in sharded.run(load_shards_job, saved_shards, (4, 1), "mean"):
        assert "state belongs to shard 0 of 2, this is shard 0 of 1; only a distributed" in text


def test_all_shards_stop_where_the_files_of_one_differ(sharded, saved_shards):
    file = saved_shards / "thinwire_3.pt"
    state = torch.load(file, weights_only=True)
    state["ranks"]["rank1"]["step"] = 2
    torch.save(state, file)
    for text in sharded.run(load_shards_job, saved_shards, (2, 2), None):
        assert "the saved state differs between ranks" in text
