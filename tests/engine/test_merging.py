"""Buckets that are encoded together: the same bits in fewer launches, and nobody waits for the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import SHAPES, Cluster
from tests.kernels.cpu_compiler import PLAIN, needs_compiler, switch
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.engine.bucket_plan import BucketPlan, deliver_nothing
from thinwire.engine.merging import BucketMerger, ReadyBucket, join, span
from thinwire.errors import ExchangeError
from thinwire.layout import Bucket, BucketLayout, describe_parameters, lay_out

WORLD = 3
CPU = torch.device("cpu")
METHODS = [
    tw.Dense(),
    tw.ADTopK(density=0.1, dense_fallback=False),
    tw.TopK(density=0.1, dense_fallback=False, memory=tw.memory.Residual(storage="int8")),
    tw.OkTopK(density=0.1, dense_fallback=False),
    tw.ACPSGD(rank=2, dense_fallback=False),
]


def bucket_of(*names: str, sizes: Mapping[str, int]) -> ReadyBucket:
    found = describe_parameters([(name, nn.Parameter(torch.zeros(sizes[name]))) for name in names])
    layout = lay_out([info for _, info in found.values()], torch.float32, CPU)
    return ReadyBucket(Bucket(layout, torch.zeros(layout.numel)), Future())


def make_buckets(*sizes: int) -> list[ReadyBucket]:
    """One for each parameter."""
    named = {f"p{index}": size for index, size in enumerate(sizes)}
    return [bucket_of(name, sizes=named) for name in named]


def cut(merger: BucketMerger, buckets: Sequence[ReadyBucket]) -> list[list[list[int]]]:
    """The units of a backward, by their buckets' sizes, as they go on after each bucket and at its end."""
    cuts = [*map(merger.add, buckets), merger.end()]
    return [[[one.bucket.flat.numel() for one in unit] for unit in units] for units in cuts]


def make_merger(enough: int, buckets: Sequence[ReadyBucket]) -> BucketMerger:
    """For a model whose parameters come with these buckets."""
    parameters = sum(len(one.bucket.layout.slots) for one in buckets)
    return BucketMerger(enough, parameters, sum(one.bucket.flat.nbytes for one in buckets))


def test_nobody_waits_for_the_last_bucket():
    buckets = make_buckets(4, 6, 3, 2, 5)
    merger = make_merger(80, buckets)
    assert cut(merger, buckets) == [[], [[4, 6]], [], [], [[3, 2], [5]], []]
    # Now it knows that the fifth is the last.
    assert cut(merger, buckets) == [[], [[4, 6]], [], [[3, 2]], [[5]], []]


@pytest.mark.parametrize("enough", [0, 80])
def test_in_a_quiet_backward_everything_waits_for_its_end(enough: int):
    buckets = make_buckets(4, 6, 3, 2, 5)
    merger, other = (make_merger(enough, buckets) for _ in range(2))
    merger.quiet_backwards = 1
    usual = [cut(other, buckets) for _ in range(2)]
    assert cut(merger, buckets) == [[], [], [], [], [], list(chain(*usual[0]))]
    # The same units, and the next one is as ever.
    assert cut(merger, buckets) == usual[1]


def test_a_quiet_backward_that_fails_is_made_up_for():
    buckets = make_buckets(4, 6, 3)
    merger = make_merger(0, buckets)
    merger.quiet_backwards = 1
    merger.add(buckets[0])
    assert merger.forget() == [[buckets[0]]]
    assert merger.quiet_backwards == 1
    merger.add(buckets[0])
    # A hook waits for its own bucket: what comes later need not be kept.
    assert merger.take() == [[buckets[0]]]
    assert merger.add(buckets[1]) == [[buckets[1]]]
    assert merger.end() == [] and merger.quiet_backwards == 0


def test_units_are_smaller_where_a_backward_begins_and_ends():
    buckets = make_buckets(*[10] * 20)
    merger = make_merger(160, buckets)
    for _ in range(2):
        units = chain(*cut(merger, buckets))
        assert [len(unit) for unit in units] == [2, 2, 4, 4, 3, 2, 2, 1]


def test_an_embedding_at_the_end_leaves_the_units_before_it_small():
    """As many bytes as all the rest, and hardly any of the backward: what comes before it is sent at the very end too."""
    buckets = make_buckets(*[10] * 40, 400)
    units = [len(unit) for unit in chain(*cut(make_merger(160, buckets), buckets))]
    assert units[-3:] == [4, 2, 1]


def test_a_small_model_has_units_half_as_large():
    buckets = make_buckets(*[10] * 9)
    units = chain(*cut(make_merger(160, buckets), buckets))
    assert [len(unit) for unit in units] == [2, 2, 2, 2, 1]


def test_units_are_the_same_after_a_backward_of_other_buckets():
    sizes = {"a": 4, "b": 6, "c": 3, "d": 2, "e": 1, "f": 500}
    buckets = [bucket_of(name, sizes=sizes) for name in sizes]
    merger = make_merger(700, buckets)
    first = bucket_of(*sizes, sizes=sizes)
    assert cut(merger, [first]) == [[[516]], []]
    second, third = cut(merger, buckets), cut(merger, buckets)
    assert list(chain(*second)) == list(chain(*third)) == [[4, 6, 3, 2, 1], [500]]
    assert third[4] == [[4, 6, 3, 2, 1]], "what waits goes on when the last one is next"


def test_a_backward_with_fewer_buckets_ends_with_what_waits():
    buckets = make_buckets(1, 2, 3)
    merger = BucketMerger(enough=1000, parameters=4, nbytes=28)
    assert cut(merger, buckets) == [[], [], [], [[1, 2, 3]]]
    assert cut(merger, buckets[1:]) == [[], [], [[2, 3]]]


def test_joined_buckets_lie_where_they_are():
    flats = [torch.full((size,), float(size)) for size in (50, 7, 20)]
    between = torch.ones(100)
    cluster = Cluster(1, tw.Dense(), shapes={"a": (5, 10), "b": (7,), "c": (20,)})
    layouts = [cluster.layouts_of([name])[0] for name in "abc"]
    whole, buffers = span(flats)
    layout = join(layouts, whole, buffers)
    for slot, flat in zip(layout.slots, flats, strict=True):
        assert slot.span(whole).data_ptr() == flat.data_ptr()
        assert torch.equal(slot.span(whole), flat)
    deliver_nothing(layout)(whole, torch.tensor(True))
    assert not any(flat.any() for flat in flats)
    assert between.all()


def run(method: tw.Method, merge_bytes: int, bad_step: int | None = None, order=SHAPES):
    """Updates and residuals of all ranks; every parameter is a bucket of its own. Fresh buffers in every second step."""
    cluster = Cluster(WORLD, method)
    for reducer in cluster.reducers:
        reducer.merge_bytes = merge_bytes
    results, kept = [], {}
    for count in range(5):
        gradients = cluster.random(count)
        if count == bad_step:
            gradients[1]["linear"][3, 5] = torch.inf
        flats: list[list[Tensor]] = [[] for _ in range(WORLD)]
        for name in order:
            for rank, layout in enumerate(cluster.layouts_of([name])):
                fresh = gradients[rank][name].reshape(-1).clone()
                flat = fresh if count % 2 else kept.setdefault((rank, name), fresh).copy_(fresh)
                flats[rank].append(flat)
                cluster.reducers[rank].reduce(Bucket(layout, flat))
        for reducer in cluster.reducers:
            reducer.end_backward()
        cluster.ranks.run()
        held = [cluster.residuals(rank) for rank in range(WORLD)]
        results.append(([torch.cat(one) for one in flats], held))
    return results, [len(reducer.plans) for reducer in cluster.reducers]


def compare(one, other, bad_step: int | None = None) -> None:
    for count, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for (ours, held), (others, other_held) in [(mine, theirs)]:
            for a, b in zip(ours, others, strict=True):
                # A bad bucket takes those with it that are encoded as one with it.
                same = b.isnan().any() if count == bad_step else torch.equal(a, b)
                assert same
            for a, b in zip(held, other_held, strict=True):
                assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_the_same_bits_merged_or_not(method):
    apart, plans = run(method, 0)
    together, fewer = run(method, 2000)
    assert max(fewer) < min(plans)
    compare(apart, together)


@needs_compiler
@pytest.mark.parametrize("method", METHODS[1:3], ids=lambda m: type(m).__name__)
def test_kernels_take_buckets_that_lie_apart(method):
    expected, _ = run(method, 0, bad_step=3)
    with switch("cpu", PLAIN):
        found, _ = run(method, 1 << 30, bad_step=3)
    compare(expected, found, bad_step=3)


def test_a_bucket_of_a_backward_that_failed_does_not_join_the_next_one():
    cluster = Cluster(1, METHODS[1], shapes={"a": (5, 10), "b": (40, 10)})
    (reducer,) = cluster.reducers
    reducer.merge_bytes = 1 << 30
    layouts = {name: cluster.layouts_of([name])[0] for name in "ab"}
    left_behind = reducer.reduce(Bucket(layouts["a"], torch.ones(50)))
    futures = [reducer.reduce(Bucket(layouts[n], torch.ones(layouts[n].numel))) for n in "ab"]
    reducer.end_backward()
    cluster.ranks.run()
    with pytest.raises(ExchangeError, match="before its last bucket"):
        left_behind.wait()
    assert all(future.done() for future in futures)


def test_buckets_of_two_dtypes_are_not_joined():
    cluster = Cluster(1, tw.Dense(), shapes={"a": (5, 10), "b": (4, 10)})
    (reducer,) = cluster.reducers
    reducer.merge_bytes = 1 << 30
    first, second = cluster.layouts_of(["a"])[0], cluster.layouts_of(["b"])[0]
    flats = [torch.ones(50), torch.ones(40, dtype=torch.bfloat16)]
    narrow = BucketLayout(second.slots, 40, torch.bfloat16, CPU)
    futures = [
        reducer.reduce(Bucket(layout, flat))
        for layout, flat in zip((first, narrow), flats, strict=True)
    ]
    reducer.end_backward()
    cluster.ranks.run()
    assert [future.value().dtype for future in futures] == [torch.float32, torch.bfloat16]


def plans_job(rank: int, world: int) -> list[bool]:
    """Whether each step after the first still has all plans of the one before."""
    model = make_cnn()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tw.attach(ddp, METHODS[1])
    handle.reducer.merge_bytes = 4000
    plans: list[set[BucketPlan]] = []
    train(
        ddp,
        optimizer,
        batches(rank, 4),
        lambda step: plans.append(set(handle.reducer.plans.values())),
    )
    assert len(plans[0]) == 1 < len(plans[1])
    handle.close()
    return [before == after for before, after in pairwise(plans)]


def test_ddp_has_its_plans_from_the_second_step_on(pools):
    assert pools(2).run(plans_job) == [[False, True, True]] * 2


def ddp_job(rank: int, world: int, merge_bytes: int) -> list:
    model = make_cnn()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tw.attach(ddp, METHODS[1], deterministic=True)
    handle.reducer.merge_bytes = merge_bytes
    seen = []
    train(ddp, optimizer, batches(rank, 5), lambda step: seen.append(fingerprint(model)))
    (images, labels), *_ = batches(rank, 1)
    loss = nn.functional.cross_entropy(ddp(images), labels)
    if rank == 0 and merge_bytes:
        assert len(handle.reducer.plans) > 1, "the last bucket is encoded by itself"
    loss.backward()
    handle.close()
    return seen


def test_ddp_with_merged_buckets_has_the_bits_of_ddp_without(pools):
    group = pools(2)
    assert group.run(ddp_job, 1 << 30) == group.run(ddp_job, 0)
