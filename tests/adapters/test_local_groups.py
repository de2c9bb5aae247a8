"""Local steps of real groups: replicas, nodes, shards, rounds on their way, workers that end early or skip steps."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.local_jobs import (
    adamw,
    inner_step,
    make_models,
    mean_in_rank_order,
    run,
    sgd,
    values,
)
from tests.sharded import TinyModel, make_mesh
from thinwire.observe import EXCHANGE, watch


def train(rank, world, method, every, steps, settings):
    model = make_models(1)[0]
    with torch.no_grad():
        model[0].bias.add_(rank)
    optimizer = adamw(model)
    local = tw.LocalSteps(model, optimizer, method, every=every, deterministic=True, **settings)
    for step in range(steps):
        inner_step(model, optimizer, rank, step)
    found = values(model)
    local.close()
    return found


@pytest.mark.workers
@pytest.mark.parametrize("delay", [0, 1])
def test_real_workers_have_the_bits_of_simulated_ones(pools, delay):
    method = tw.TopK(density=0.1, dense_fallback=False)
    settings = {"fragments": 2, "delay": delay}
    real = pools(3).run(train, method, 4, 9, settings)
    models = make_models()
    optimizers = [adamw(model) for model in models]
    sim = tw.LocalSteps.simulate(
        models, optimizers, method, every=4, deterministic=True, **settings
    )
    run(sim, models, optimizers, 9)
    # Closing finishes a round that is under way.
    for worker in sim.workers:
        worker.finish_now()
    for model, found in zip(models, real, strict=True):
        assert torch.equal(values(model), found)


def train_nodes(rank, world):
    """Two nodes of two: DDP inside, local steps between; the second node has more data."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = make_models(1)[0]
    ddp = DistributedDataParallel(model, process_group=inside)
    optimizer = sgd(model)
    local = tw.LocalSteps(
        ddp, optimizer, tw.Quantized(bits=8), every=3, process_group=between, inside_group=inside,
        bucket_mb=0.01,
    )  # fmt: skip
    for step in range(6 + rank // 2 * 4):
        optimizer.zero_grad()
        torch.manual_seed(100 * step + rank)
        ddp(torch.randn(8, 48)).square().mean().backward()
        optimizer.step()
    local.finish()
    sent = local.stats().wire_bytes
    found = values(model)
    local.close()
    return found, sent


@pytest.mark.workers
def test_nodes_of_replicas_share_the_sending(pools):
    results = pools(4).run(train_nodes)
    assert all(torch.equal(found, results[0][0]) for found, _ in results)
    assert results[0][1] > 0 and results[1][1] > 0
    assert results[0][1] == results[2][1]


def spoil_one_bucket(rank, world):
    """One node's first weight is not finite when a round begins, and of its two replicas one sends that."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = make_models(1)[0]
    optimizer = sgd(model)

    def spoil(*_):
        if rank < 2 and local.steps == 5:
            with torch.no_grad():
                model[0].weight[0, 0] = torch.nan

    optimizer.register_step_post_hook(spoil)
    local = tw.LocalSteps(
        model, optimizer, tw.TopK(density=0.1, dense_fallback=False), every=2,
        process_group=between, inside_group=inside, bucket_mb=0.005,
    )  # fmt: skip
    held = []
    for step in range(6):
        inner_step(model, optimizer, rank // 2, step)
        held.append({name: local.handle.residual(name) for name in local.point.tensors})
    sends = [name for name, residual in held[3].items() if residual.any()]
    return local.lost_rounds, sends, [torch.equal(held[3][name], held[5][name]) for name in sends]


@pytest.mark.workers
def test_a_bad_round_leaves_no_trace_in_what_the_other_replicas_sent(pools):
    results = pools(4).run(spoil_one_bucket)
    assert [result[0] for result in results] == [1] * 4
    assert "0.weight" in results[0][1] and "2.weight" in results[1][1]
    assert all(all(same) for _, _, same in results)


def train_shards(rank, world):
    """Two nodes of two: FSDP2 inside, local steps between."""
    mesh = make_mesh(2, 2)
    torch.manual_seed(0)
    model = TinyModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    groups = {name: mesh[name].get_group() for name in ("replicate", "shard")}
    local = tw.LocalSteps(
        model, optimizer, tw.TopK(density=0.1), every=2, fragments=2,
        process_group=groups["replicate"], inside_group=groups["shard"],
    )  # fmt: skip
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randint(0, 37, (4, 6))).square().mean().backward()
        optimizer.step()
        if step == 2 and rank == 3:
            # Seen by the other shards of its node, and by the other node.
            with torch.no_grad():
                next(iter(model.parameters())).to_local().fill_(torch.nan)
    with torch.no_grad():
        # FSDP keeps what it gathers of the outermost module, until the next backward.
        model(torch.arange(6)[None])
        local.finish()
        seen = model(torch.arange(6)[None])
        model.reshard()
        assert torch.equal(seen, model(torch.arange(6)[None]))
        model.reshard()
    found = [p.detach().full_tensor().reshape(-1) for p in model.parameters()]
    plan = {row.info.name: row.info.full_shape for row in local.plan()}
    lost, cut = local.lost_rounds, [fragment.names for fragment in local.fragments]
    local.close()
    return torch.cat(found), lost, plan["head.weight"], cut


@pytest.mark.workers
def test_shards_inside_a_node(sharded):
    results = sharded.run(train_shards)
    for found, lost, full_shape, cut in results:
        assert torch.equal(found, results[0][0]) and found.isfinite().all()
        # Cut alike on all ranks, though they have shards of different sizes.
        assert lost == 1 and full_shape == (37, 32) and cut == results[0][3]


# -- rounds on their way ------------------------------------------------------------------------------------------------


def watch_a_round(rank, world):
    """(ranges of exchanges, ranges of inner steps); the second rank begins the round when the first has gone on by three."""
    exchanges, steps, travels = [], [], threading.Event()

    @contextmanager
    def note(name):
        began = time.perf_counter()
        if name == EXCHANGE:
            travels.set()
        yield
        if name == EXCHANGE:
            exchanges.append((began, time.perf_counter()))

    model = make_models(1)[0]
    optimizer = sgd(model)
    local = tw.LocalSteps(model, optimizer, tw.Quantized(bits=4), every=8, delay=4)
    with watch(note):
        for step in range(12):
            if (rank, step) in ((0, 11), (1, 7)):
                dist.barrier()
            if (rank, step) == (0, 8):
                travels.wait()
            began = time.perf_counter()
            inner_step(model, optimizer, rank, step)
            steps.append((began, time.perf_counter()))
    rounds = local.rounds
    local.close()
    return exchanges, steps, rounds


@pytest.mark.workers
def test_inner_steps_go_on_while_a_round_travels(pools):
    (exchanges, steps, rounds), _ = pools(2).run(watch_a_round)
    assert rounds == 1
    began, ended = exchanges[0]
    under = [number for number, (first, last) in enumerate(steps) if began < first < last < ended]
    assert under == [8, 9, 10]


# -- steps that are not alike ------------------------------------------------------------------------------------------


def skip_a_step(rank, world, given):
    """One worker's loss overflows in one iteration, and its GradScaler skips the step."""
    model = make_models(1)[0]
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    local = tw.LocalSteps(model, optimizer, every=4, grad_scaler=scaler if given else None)
    for step in range(8):
        loss = model(torch.randn(8, 48)).square().mean()
        if rank == 1 and step == 2:
            loss = loss * torch.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if given:
            # Other collectives between two rounds: a worker that is behind would never come to its round.
            dist.barrier()
    steps = local.steps
    local.finish()
    found = values(model)
    local.close()
    assert scaler.step.__func__ is torch.amp.GradScaler.step
    return steps, found


@pytest.mark.workers
@pytest.mark.parametrize("given", [True, False])
def test_a_step_that_a_scaler_skips_does_not_hold_up_the_others(pools, given):
    (first, ours), (second, theirs) = pools(2).run(skip_a_step, given)
    assert first == 8 and second == (8 if given else 7)
    assert torch.equal(ours, theirs) and ours.isfinite().all()


@pytest.mark.workers
def test_what_is_no_scaler_is_refused(pools):
    said = pools(2).run(give_no_scaler)
    assert all("must be a torch.amp.GradScaler" in one for one in said)


def give_no_scaler(rank, world):
    model = make_models(1)[0]
    with pytest.raises(tw.UsageError) as found:
        tw.LocalSteps(model, sgd(model), every=2, grad_scaler=sgd(model))
    return str(found.value)


def train_unevenly(rank, world, fragments, delay):
    """Twice over data of which the ranks have different amounts."""
    model = nn.Sequential(*make_models(1)[0], nn.BatchNorm1d(8, momentum=0.1 + 0.1 * rank))
    optimizer = sgd(model)
    local = tw.LocalSteps(model, optimizer, every=4, fragments=fragments, delay=delay)
    ends = []
    for _ in range(2):
        for step in range(3 + 4 * rank):
            inner_step(model, optimizer, rank, step)
        local.finish()
        ends.append((values(model), model[3].running_mean.clone(), local.steps))
    local.close()
    return ends


@pytest.mark.workers
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 1), (3, 0)])
def test_workers_with_different_amounts_of_data_come_together(pools, fragments, delay):
    results = pools(3).run(train_unevenly, fragments, delay)
    for epoch in range(2):
        point, means, steps = results[0][epoch]
        for found in (result[epoch] for result in results):
            assert torch.equal(found[0], point) and torch.equal(found[1], means)
            assert found[2] == steps == 11 * (epoch + 1)


def train_to_different_ends(rank, world):
    model = make_models(1)[0]
    optimizer = sgd(model)
    outer = {"lr": 1.0}
    local = tw.LocalSteps(model, optimizer, every=2, outer=outer, deterministic=True)
    for step in range((3, 6)[rank]):
        inner_step(model, optimizer, rank, step)
    local.finish()
    local.close()
    return values(model)


@pytest.mark.workers
def test_who_is_at_its_end_brings_what_it_has_left_and_then_nothing(pools):
    models = make_models(2)
    optimizers = [sgd(model) for model in models]
    point = values(models[0])
    # Rank 0 has one step for the second round and none for the third; nobody has any for the last.
    for begin, counts in ((0, (2, 2)), (2, (1, 2)), (4, (0, 2)), (6, (0, 0))):
        for rank, count in enumerate(counts):
            for step in range(begin, begin + count):
                inner_step(models[rank], optimizers[rank], rank, step)
        point = point - mean_in_rank_order([point - values(model) for model in models])
        for model in models:
            nn.utils.vector_to_parameters(point.clone(), model.parameters())
    for found in pools(2).run(train_to_different_ends):
        assert torch.equal(found, point)
