"""Every method of the library on virtual ranks: nothing is lost, replicas agree, odd cases end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import thinwire as tw
from tests.contracts.cluster import Cluster, same_bits
from tests.methods.conservation import COMPRESSED, MEMORIES, METHODS, SHAPES, worst_loss
from thinwire.errors import UsageError
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.all_gather import AllGather
from thinwire.exchange.chunks import ChunkAllReduce
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.hierarchy import Hierarchical
from thinwire.exchange.shared_indices import SharedIndices
from thinwire.memory.momentum import MomentumCorrection
from thinwire.memory.residual import Residual
from thinwire.methods.base import Compose, DenseMomentum
from thinwire.methods.chunktopk import ChunkTopK
from thinwire.methods.dgc import DGC
from thinwire.methods.gaussiank import GaussianK
from thinwire.methods.randomk import RandomK
from thinwire.methods.redsync import RedSync
from thinwire.methods.sidco import SIDCo
from thinwire.methods.threshold import Threshold
from thinwire.methods.topk import TopK
from thinwire.select.random import RandomChoice
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES


def grid():
    """Method x values in full; memories and index codes take turns, so that all pairs of any two occur."""
    kinds = list(MEMORIES)[:3]
    for row, (name, method) in enumerate(METHODS.items()):
        for column, values in enumerate(VALUE_CODES):
            kind = kinds[(row + column) % len(kinds)]
            indices = list(INDEX_CODES)[(row + column // 2 + column) % len(INDEX_CODES)]
            chosen = replace(
                method, memory=MEMORIES[kind], values=values, indices=indices, dense_fallback=False
            )
            yield pytest.param(chosen, id=f"{name}-{kind}-{values}-{indices}")


@pytest.mark.parametrize("method", list(grid()))
def test_nothing_is_lost(method):
    try:
        assert worst_loss(method) <= 1e-6
    except UsageError as refused:
        # Codes without a zero for open places, and block codes that cannot be added on the way.
        assert "values" in str(refused)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("values", ["fp32", "bf16"])
def test_accepted_plus_residual_is_c_bit_for_bit(name, values):
    method = replace(METHODS[name], memory=Residual(), values=values, dense_fallback=False)
    cluster = Cluster(3, method, shapes=SHAPES)
    for step in range(2):
        before = [cluster.residuals(rank) for rank in range(3)]
        gradients = cluster.random(step)
        cluster.step(gradients)
        accepted = [cluster.accepted(rank) for rank in range(3)]
        for rank in range(3):
            after = cluster.residuals(rank)
            for slot in COMPRESSED:
                c = before[rank][slot] + gradients[rank][slot]
                difference = (accepted[rank][slot] + after[slot] - c).abs()
                if values == "bf16" and isinstance(method.exchange, SharedIndices):
                    # The owner of a sum also keeps its rounding, which costs the last bit of float32.
                    largest = torch.maximum(c.abs(), accepted[rank][slot].abs())
                    assert (difference <= 2 * torch.finfo(torch.float32).eps * largest).all()
                else:
                    assert not difference.any()


@pytest.mark.parametrize("name", [*METHODS])
def test_resumed_run_in_another_bucketing_continues_bit_for_bit(name):
    memory = METHODS[name].memory
    memory = MomentumCorrection(0.9, True) if isinstance(memory, MomentumCorrection) else memory
    method = replace(METHODS[name], memory=memory, dense_fallback=False)
    ours = Cluster(3, method, shapes=SHAPES, deterministic=True)
    for step in range(3):
        ours.step(ours.random(step))
    theirs = Cluster(3, method, shapes=SHAPES, deterministic=True)
    for rank in range(3):
        ours.reducers[rank].settle()
        theirs.reducers[rank].load_state_dict(ours.reducers[rank].state_dict())
    theirs.buckets = [["head"], ["linear", "bias"], ["conv"]]
    for step in range(3, 6):
        left, right = ours.step(ours.random(step)), theirs.step(theirs.random(step))
        assert all(same_bits(left[0][n], right[0][n]) for n in SHAPES)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_zero_gradients_and_bad_steps_are_survived(name, world):
    method = replace(METHODS[name], memory=Residual(), dense_fallback=False)
    cluster = Cluster(world, method, shapes=SHAPES)
    nothing = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(world)]
    assert not any(update.any() for update in cluster.step(nothing)[0].values())
    gradients = cluster.random(0)
    gradients[world - 1]["linear"][3, 3] = torch.nan
    finite = gradients[0]["head"].clone()
    assert cluster.step(gradients)[0]["head"].isnan().all()
    assert same_bits(cluster.residuals(0)["head"], finite)
    assert cluster.residuals(world - 1)["linear"].isfinite().all()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "method",
    [
        RandomK(density=1.0, values="fp32", dense_fallback=False),
        ChunkTopK(density=1.0, values="fp32", chunk=7, dense_fallback=False),
    ],
    ids=["randomk", "chunktopk"],
)
def test_density_one_is_the_plain_mean(method, world):
    cluster = Cluster(world, method, shapes=SHAPES)
    for step in range(2):
        gradients = cluster.random(step)
        updates = cluster.step(gradients)[0]
        for name in SHAPES:
            mean = sum(g[name] for g in gradients) / world
            torch.testing.assert_close(updates[name], mean, rtol=1e-6, atol=1e-6)
    assert not any(r.any() for r in cluster.residuals(0).values())


def test_chunks_at_density_one_with_momentum_are_momentum_sgd():
    memory = MomentumCorrection(0.9, True, masking=False)
    method = ChunkTopK(density=1.0, values="fp32", memory=memory, dense_fallback=False)
    ours = Cluster(3, method, shapes=SHAPES)
    dense = Cluster(3, DenseMomentum(momentum=0.9, nesterov=True), shapes=SHAPES)
    for step in range(4):
        left, right = ours.step(ours.random(step))[0], dense.step(dense.random(step))[0]
        for name in SHAPES:
            torch.testing.assert_close(left[name], right[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exchange", [SharedIndices(), ChunkAllReduce()], ids=["values", "chunks"])
def test_exchanges_without_indices_refuse_other_selections(exchange):
    with pytest.raises(UsageError, match=type(exchange).__name__):
        TopK(exchange=exchange).compressor()


@pytest.mark.parametrize("name", [n for n in METHODS if "randomk" not in n])
@pytest.mark.parametrize("exchange", [Exclusive(), CyclicLeader()], ids=["exclusive", "cyclic"])
def test_selections_work_in_parts_and_through_agreed_places(name, exchange):
    """These exchanges hand out parts of a tensor, or take one rank's choice for all."""
    method = replace(METHODS[name], memory=Residual(), exchange=exchange, dense_fallback=False)
    cluster = Cluster(3, method, shapes=SHAPES)
    for step in range(2):
        before = [cluster.residuals(rank) for rank in range(3)]
        gradients = cluster.random(step)
        updates = cluster.step(gradients)
        after = [cluster.residuals(rank) for rank in range(3)]
        for slot in COMPRESSED:
            c = sum(before[r][slot].double() + gradients[r][slot].double() for r in range(3))
            total = 3 * updates[0][slot].double() + sum(after[r][slot].double() for r in range(3))
            assert updates[0][slot].any()
            assert (total - c).abs().sum() <= 1e-6 * c.abs().sum()


def test_masking_is_refused_where_memory_moves_between_ranks():
    masked = DGC(memory=MomentumCorrection(0.9, False), exchange=Hierarchical(per_host=2))
    with pytest.raises(UsageError, match="masking"):
        masked.compressor()
    assert replace(masked, memory=MomentumCorrection(0.9, False, masking=False)).compressor()


def test_random_places_compose_with_any_exchange():
    for exchange in (SharedIndices(), AllGather()):
        method = Compose(select=RandomChoice(0.1), exchange=exchange, dense_fallback=False)
        assert Cluster(2, method, shapes=SHAPES)


def test_values_only_exchange_sends_no_more_than_the_values():
    """bf16 at density 5 %: two phases of (world-1)/world x 2 bytes per entry, and flags."""
    method = RandomK(density=0.05, dense_fallback=False)
    cluster = Cluster(4, method, shapes={"linear": (80, 100)})
    cluster.step(cluster.random(0))
    values = 2 * 3 * 2 * 400 // 4
    assert values <= cluster.ranks.drivers[0].ledger.sent_bytes() <= values + 64


def test_threshold_methods_count_what_they_send():
    for name in ("gaussiank", "redsync", "sidco", "dgc", "chunktopk"):
        method = replace(METHODS[name], memory=Residual(), dense_fallback=False)
        cluster = Cluster(2, method, shapes={"linear": (100, 200)})
        cluster.step(cluster.random(0))
        stats = cluster.reducers[0].tally.stats(1, 0)
        assert 0.8 <= stats.density / method.density <= 1.25


@pytest.mark.parametrize(
    "build, field",
    [
        (lambda: tw.TopK(memory=MomentumCorrection(2.0)), "momentum"),
        (lambda: DGC(clip=5.0), "clip"),
        (lambda: RandomK(seed="x"), "seed"),
        (lambda: DGC(sample="even"), "sample"),
        (lambda: GaussianK(finish="exact"), "finish"),
        (lambda: SIDCo(distribution="normal"), "distribution"),
        (lambda: RedSync(trimmed=1), "trimmed"),
        (lambda: ChunkTopK(chunk=0), "chunk"),
        (lambda: Threshold(threshold=-1.0), "threshold"),
    ],
)
def test_bad_settings_are_named(build, field):
    with pytest.raises(UsageError, match=field):
        build()
