"""The one door under every adapter: buckets or named tensors in, updates in the same memory, shards, verdicts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import Cluster, parameter, same_bits, sparse
from thinwire.engine.bucket_plan import deliver_nothing
from thinwire.engine.drivers import InlineDriver, ThreadDriver
from thinwire.engine.groups import private_group
from thinwire.engine.network import Network
from thinwire.engine.reducer import Reducer
from thinwire.engine.virtual import VirtualCluster
from thinwire.errors import ExchangeError, UsageError
from thinwire.layout import Bucket, Shard, lay_out
from thinwire.observe.ledger import Ledger
from thinwire.select.topk import TradTopK

CPU = torch.device("cpu")
SHAPES = {"linear": (30, 40), "bias": (8,)}
INFOS = {name: parameter(name, shape) for name, shape in SHAPES.items()}


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def real_reducer(kind: type, world: int, **options) -> Reducer:
    driver = kind(Network(private_group(dist.group.WORLD), Ledger(world)))
    return Reducer(INFOS, sparse(), driver, device=CPU, **options)


# -- named tensors, at once or later -------------------------------------------------------------------------------


def named_job(rank: int, world: int) -> list[Tensor]:
    """The same three steps with buckets in the background, with named tensors, and at once."""
    background = real_reducer(ThreadDriver, world)
    named = real_reducer(ThreadDriver, world, coalesce_bytes=1 << 30)
    at_once = real_reducer(InlineDriver, world)
    results = []
    for step in range(3):
        gradients = draw(10 * step + rank)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
        bucket = Bucket(lay_out(INFOS.values(), torch.float32, CPU), flat)
        assert background.reduce(bucket).wait() is flat
        tensors = {name: gradient.t().clone().t() for name, gradient in gradients.items()}
        future = named.reduce_named(tensors)
        assert not future.done()
        named.flush()
        future.wait()
        immediate = {name: gradient.clone() for name, gradient in gradients.items()}
        assert at_once.reduce_named(immediate).done()
        expected = {slot.name: slot.view(flat) for slot in bucket.layout.slots}
        for name, update in expected.items():
            assert torch.equal(tensors[name], update)
            assert torch.equal(immediate[name], update)
        results.append(flat)
        for reducer in (background, named, at_once):
            reducer.end_backward()
    for reducer in (background, named, at_once):
        reducer.close()
    return results


def test_named_tensors_and_drivers_at_once_give_what_buckets_give(pools):
    first, *others = pools(3).run(named_job)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# -- encoding begins when a bucket is ready ------------------------------------------------------------------------


@dataclass(frozen=True)
class Announcing(TradTopK):
    """Says that it has begun to select."""

    begun: ClassVar[threading.Event] = threading.Event()

    def pick(self, c, table):
        picks = super().pick(c, table)
        if any(rows.slot.name == "2.weight" for rows in table.rows):
            self.begun.set()
        return picks


def held_hook_job(rank: int, world: int) -> None:
    """The first layer's gradient, which the last bucket waits for, comes only after the last layer is encoded."""
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    handle = tw.attach(ddp, tw.Compose(select=Announcing(0.1), dense_fallback=False))

    # DDP has all parameters in one bucket until it has seen in what order gradients come.
    for _ in range(2):
        ddp(torch.randn(4, 40)).sum().backward()
    assert len(handle.reducer.plans) > 1
    Announcing.begun.clear()

    def hold(gradient: Tensor) -> None:
        assert Announcing.begun.wait(20), "nothing is encoded before the last hook"
        Announcing.begun.clear()

    model[0].weight.register_hook(hold)
    for _ in range(3):
        ddp(torch.randn(4, 40)).sum().backward()
        ddp.zero_grad()
    handle.close()


def test_a_bucket_is_encoded_before_the_last_hook(pools):
    pools(2).run(held_hook_job, timeout=60.0)


# -- the end of a backward -----------------------------------------------------------------------------------------


def test_a_failed_backward_is_abandoned():
    """What it sent returns, what waits is dropped, and the next one is as if it had never been."""
    cluster = Cluster(2, sparse(), shapes=SHAPES)
    for reducer in cluster.reducers:
        reducer.coalesce_bytes = 1 << 30
    waiting = [r.reduce_named({"linear": draw(5)["linear"]}) for r in cluster.reducers]
    for reducer in cluster.reducers:
        reducer.abandon()
    for future in waiting:
        with pytest.raises(ExchangeError, match="before its last bucket"):
            future.wait()
    assert torch.equal(cluster.residuals(0)["linear"], draw(5)["linear"])


# -- verdicts ------------------------------------------------------------------------------------------------------


def steps_with(verdict: bool | None) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Two steps, the first of which may be overruled; residuals after it, and the reducers' own verdict."""
    cluster = Cluster(2, sparse(), shapes=SHAPES)
    cluster.step(cluster.random(0))
    own = cluster.reducers[0].verdict()
    if verdict is not None:
        for reducer in cluster.reducers:
            reducer.overrule(torch.tensor(verdict))
    return [cluster.residuals(rank) for rank in range(2)], own


def test_a_step_can_be_overruled_from_outside():
    plain, own = steps_with(None)
    assert not bool(own)
    left_alone, _ = steps_with(False)
    overruled, _ = steps_with(True)
    gradients = Cluster(2, sparse(), shapes=SHAPES).random(0)
    for rank in range(2):
        assert same_bits(left_alone[rank]["linear"], plain[rank]["linear"])
        assert torch.equal(overruled[rank]["linear"], gradients[rank]["linear"])


@pytest.mark.parametrize("nothing", [False, True])
def test_what_a_bad_step_delivers_is_the_callers_choice(nothing):
    ranks = VirtualCluster(2)
    options = {"when_bad": deliver_nothing} if nothing else {}
    reducers = [Reducer(INFOS, sparse(), d, device=CPU, **options) for d in ranks.drivers]
    gradients = [draw(rank) for rank in range(2)]
    gradients[1]["linear"][3, 4] = torch.inf
    futures = [r.reduce_named(g) for r, g in zip(reducers, gradients, strict=True)]
    ranks.run()
    for reducer, future, delivered in zip(reducers, futures, gradients, strict=True):
        reducer.end_backward()
        assert bool(reducer.verdict())
        future.wait()
        for update in delivered.values():
            assert bool((update == 0).all() if nothing else update.isnan().all())


# -- shards --------------------------------------------------------------------------------------------------------


def sharded(part: int) -> dict[str, tw.Reducer]:
    """Half of a matrix by rows, three padding elements behind it, half of a short one, and nothing of a third."""
    row_shard = Shard((30, 40), 0, 15 * part, padding=3, size=15)
    small = Shard((16, 80), 1, 40 * part, padding=0, size=40)
    empty = Shard((1, 4), 0, part, padding=2, size=0)
    return {
        "linear": replace(parameter("linear", (15, 40)), shard=row_shard),
        "small": replace(parameter("small", (16, 40)), shard=small),
        "empty": replace(parameter("empty", (0, 4)), shard=empty),
    }


def run_shards(part: int) -> tuple[list[Tensor], Reducer]:
    infos = sharded(part)
    ranks = VirtualCluster(2)
    reducers = [Reducer(infos, tw.ADTopK(density=0.1), d, device=CPU) for d in ranks.drivers]
    layout = lay_out(infos.values(), torch.float32, CPU)
    assert layout.numel == 15 * 40 + 3 + 16 * 40 + 2
    flats = [torch.randn(layout.numel, generator=torch.Generator().manual_seed(r)) for r in (1, 2)]
    before = [flat.clone() for flat in flats]
    for reducer, flat in zip(reducers, flats, strict=True):
        reducer.reduce(Bucket(layout, flat))
        reducer.end_backward()
    ranks.run()
    for slot in layout.slots:
        total = 2 * slot.view(flats[0]) + sum(
            reducer.assignments.held(slot.name, "residual") for reducer in reducers if slot.numel
        )
        expected = sum(slot.view(flat) for flat in before)
        if slot.numel:
            torch.testing.assert_close(total, expected)
    # Padding belongs to nobody.
    for flat, old in zip(flats, before, strict=True):
        assert torch.equal(flat[600:603], old[600:603])
        assert torch.equal(flat[-2:], old[-2:])
    return flats, reducers[0]


def test_shards_are_reduced_in_place_and_planned_by_their_full_shape():
    _, reducer = run_shards(0)
    plan = reducer.assignments.by_name
    # Its shard alone is below the size at which tensors go dense.
    assert plan["small"].plan.info.numel == 640 and not plan["small"].plan.dense
    assert "shard" in plan["linear"].plan.reason
    # As on the ranks that have something of it.
    assert plan["empty"].plan.reason == "fewer than 1024 elements"


def test_state_of_another_shard_is_refused():
    """Even if it has the same shape."""
    _, first = run_shards(0)
    _, second = run_shards(1)
    saved = first.state_dict()
    assert saved["shards"]["linear"] == "30x40 dim 0 from 0"
    first.load_state_dict(saved)
    with pytest.raises(UsageError, match=r"of the shard 30x40 dim 0 from 0.*from 15"):
        second.load_state_dict(saved)


def test_rules_speak_of_full_shapes():
    rule = tw.rule(shape=(30, 40))
    assert rule.matches(sharded(1)["linear"])
    assert not tw.rule(max_numel=1000).matches(sharded(1)["linear"])


# -- parameters without elements -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [tw.Dense(), sparse(), tw.PowerSGD()], ids=str)
def test_a_bucket_of_parameters_without_elements_is_done_at_once(method):
    cluster = Cluster(2, method, shapes={"weight": (64, 64), "nothing": (0, 4)})
    cluster.buckets = [["nothing"], ["weight"]]
    for seed in range(2):
        left, right = cluster.step(cluster.random(seed))
        assert left["weight"].any() and same_bits(left["weight"], right["weight"])
