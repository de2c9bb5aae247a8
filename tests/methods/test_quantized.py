"""Quantised sums on virtual ranks: against a plain re-computation, and how many bytes they take."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import Cluster, parameter, same_bits
from tests.methods.quantized_reference import Reference
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.compress.dense import SMALL_BESIDE
from thinwire.errors import UsageError
from thinwire.exchange.requests import Place
from thinwire.layout import Group, describe_module, lay_out
from thinwire.plan.policy import make_plan

BITS = [16, 8, 4, 2, 1, "fp8"]
SHAPES = {"conv": (8, 4, 3, 3), "bias": (8,), "linear": (33, 40), "head": (10, 64), "dot": (1, 3)}
QUANTIZED = ("conv", "linear", "head", "dot")
REBUCKETED = [["head", "dot"], ["linear"], ["bias", "conv"]]


def quantized(bits=8, **options) -> tw.Quantized:
    return tw.Quantized(bits=bits, **{"block": 32, "dense_fallback": False, **options})


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("bits", [16, 8, 4, 2, 1])
def test_every_bit_is_that_of_a_plain_recomputation(bits, world):
    cluster = Cluster(world, quantized(bits), shapes=SHAPES)
    references = {name: Reference(name, world, bits, 32) for name in QUANTIZED}
    for seed in range(4):
        if seed == 2:
            cluster.buckets = REBUCKETED
        gradients = cluster.random(seed)
        updates = cluster.step(gradients)
        for name, reference in references.items():
            expected = reference.step([one[name] for one in gradients])
            assert all(same_bits(update[name], expected) for update in updates)
            for rank in range(world):
                held = cluster.residuals(rank)[name].reshape(-1)
                assert same_bits(held, reference.residuals[rank])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_nothing_is_lost(bits, world, rounding):
    """Bit for bit on what a rank does not own, to the last place of what was added up elsewhere."""
    cluster = Cluster(world, quantized(bits, rounding=rounding), shapes=SHAPES)
    for seed in range(3):
        before = [cluster.residuals(rank) for rank in range(world)]
        gradients = cluster.random(seed)
        updates = cluster.step(gradients)
        accepted = [cluster.accepted(rank) for rank in range(world)]
        after = [cluster.residuals(rank) for rank in range(world)]
        for name in QUANTIZED:
            c = [before[rank][name] + gradients[rank][name] for rank in range(world)]
            inexact = torch.zeros(c[0].shape, dtype=torch.int64)
            for rank in range(world):
                sent = accepted[rank][name]
                error = (sent + after[rank][name] - c[rank]).abs()
                bound = 2.0**-22 * torch.maximum(c[rank].abs(), sent.abs())
                assert (error <= bound).all()
                inexact += (error > 0).long()
            if rounding == "nearest" and bits != 1:
                # One owner for each element.
                assert (inexact <= 1).all()
            total = world * updates[0][name].double() + sum(r[name].double() for r in after)
            everything = sum(one.double() for one in c)
            assert (total - everything).abs().sum() <= 1e-6 * everything.abs().sum()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", BITS)
def test_resumed_run_in_another_bucketing_continues_bit_for_bit(bits, rounding):
    method = quantized(bits, rounding=rounding)
    ours, theirs = (Cluster(3, method, shapes=SHAPES, deterministic=True) for _ in range(2))
    for step in range(3):
        ours.step(ours.random(step))
    for rank in range(3):
        ours.reducers[rank].settle()
        theirs.reducers[rank].load_state_dict(ours.reducers[rank].state_dict())
    theirs.buckets = REBUCKETED
    for step in range(3, 6):
        left, right = ours.step(ours.random(step)), theirs.step(theirs.random(step))
        assert all(same_bits(left[0][name], right[0][name]) for name in SHAPES)


@pytest.mark.parametrize(
    "build, field",
    [
        (lambda: tw.Quantized(bits=3), "bits"),
        (lambda: tw.Quantized(bits=True), "bits"),
        (lambda: tw.Quantized(block=100), "block"),
        (lambda: tw.Quantized(rounding="up"), "rounding"),
        (lambda: tw.Quantized(memory=tw.memory.MomentumCorrection(0.9)), "memory"),
        (lambda: tw.Quantized(per_host=0), "per_host"),
    ],
)
def test_bad_settings_are_named(build, field):
    with pytest.raises(UsageError, match=field):
        build()


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    if name == "bert-large":
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
        with torch.device("meta"):
            model: nn.Module = transformers.BertForQuestionAnswering(config)
    else:
        from thinwire.bench.models import IMAGES
        from thinwire.recipes.models.resnet import resnet152

        with torch.device("meta"):
            model = resnet152(IMAGES, False)
    return {key: info.shape for key, (_, info) in describe_module(model).items()}


BUCKET_BYTES = 25 * 2**20
GOALS = {8: 0.27, 4: 0.14, 2: 0.075, 1: 0.045}


def buckets_of(shapes: dict[str, tuple[int, ...]]) -> list[list[str]]:
    """As DDP cuts them: last parameters first, 25 MB each."""
    buckets: list[list[str]] = [[]]
    nbytes = 0
    for name in reversed(shapes):
        buckets[-1].append(name)
        nbytes += 4 * torch.Size(shapes[name]).numel()
        if nbytes >= BUCKET_BYTES:
            buckets.append([])
            nbytes = 0
    return [bucket for bucket in buckets if bucket]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("model", ["bert-large", "resnet152"])
def test_bytes_are_what_the_bits_promise_in_ddp_buckets(model, world):
    """From the messages' layout alone: the ledger counts just these, as the test below holds on a smaller model."""
    shapes = shapes_of(model)
    for bits, goal in GOALS.items():
        sent = dense = 0.0
        for names in buckets_of(shapes):
            one = sent_bytes({name: shapes[name] for name in names}, tw.Quantized(bits=bits), world)
            sent += one
            dense += 2 * (world - 1) / world * 4 * sum(torch.Size(shapes[n]).numel() for n in names)
        assert sent <= goal * dense, (bits, sent / dense)


def sent_bytes(shapes: dict[str, tuple[int, ...]], method: tw.Quantized, world: int) -> float:
    """What a rank sends for a bucket of these parameters."""
    plan = make_plan([parameter(n, s) for n, s in shapes.items()], method, (), world)
    beside = sum(one.info.numel for one in plan.values() if one.dense)
    infos = [one.info for one in plan.values() if not one.dense]
    if not infos:
        return 2 * (world - 1) / world * 4 * beside
    layout = lay_out(infos, torch.float32, torch.device("cpu"))
    group = Group.of(layout, layout.slots, torch.float32)
    quantized_sum = method.compressor().sum(group, Place(0, world))
    # Small tensors are gathered with the sums where they are few, else summed by themselves.
    few = SMALL_BESIDE * 4 * beside <= quantized_sum.sums.nbytes
    dense = (world - 1) * (4 if few else 8 / world) * beside
    return dense + (world - 1) * (quantized_sum.offer.nbytes + quantized_sum.sums.nbytes)


def test_small_tensors_travel_with_the_sums():
    cluster = Cluster(2, tw.Quantized(), shapes={"a": (300, 401), "bias": (300,)})
    cluster.step(cluster.random(0))
    kinds = [kind for _, kind in cluster.ranks.drivers[0].ledger.rows()]
    assert sorted(kinds) == ["all_gather", "all_to_all"]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("bits", GOALS)
def test_ledger_counts_what_the_layout_says(bits, world):
    shapes = {"a": (300, 401), "b": (64, 1000), "bias": (300,)}
    method = tw.Quantized(bits=bits)
    cluster = Cluster(world, method, shapes=shapes)
    cluster.step(cluster.random(0))
    counted = cluster.ranks.drivers[0].ledger.sent_bytes()
    assert counted == pytest.approx(sent_bytes(shapes, method, world), abs=16)
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert counted <= (GOALS[bits] + 0.01) * 2 * (world - 1) / world * 4 * numel


HOSTS = [(4, 2), (6, 3), (6, 2), (3, 3)]


@pytest.mark.parametrize("world, per_host", HOSTS)
@pytest.mark.parametrize("bits", [8, 2, 1])
def test_hosts_sum_inside_and_send_codes_between(bits, world, per_host):
    """Memory moves to the ranks that hold a host's sums, but nothing is lost over all ranks."""
    cluster = Cluster(world, quantized(bits, per_host=per_host), shapes=SHAPES)
    for seed in range(3):
        if seed == 2:
            cluster.buckets = REBUCKETED
        before = [cluster.residuals(rank) for rank in range(world)]
        gradients = cluster.random(seed)
        updates = cluster.step(gradients)
        after = [cluster.residuals(rank) for rank in range(world)]
        for name in QUANTIZED:
            assert all(same_bits(update[name], updates[0][name]) for update in updates)
            c = sum(before[r][name].double() + gradients[r][name].double() for r in range(world))
            total = world * updates[0][name].double() + sum(one[name].double() for one in after)
            assert (total - c).abs().sum() <= 1e-6 * c.abs().sum()


@pytest.mark.parametrize("restorable", [False, True])
def test_a_bad_step_of_hosts_returns_to_every_rank_what_was_its_own(restorable):
    cluster = Cluster(4, quantized(4, per_host=2), shapes=SHAPES, restorable=restorable)
    cluster.step(cluster.random(0))
    before = [cluster.residuals(rank) for rank in range(4)]
    gradients = cluster.random(1)
    gradients[3]["conv"][0] = torch.nan
    assert all(update["head"].isnan().all() for update in cluster.step(gradients))
    for rank in range(4):
        held = before[rank]["head"]
        expected = held if restorable else held + gradients[rank]["head"]
        assert same_bits(cluster.residuals(rank)["head"], expected)


def test_between_hosts_travels_what_one_worker_per_host_would_send():
    shapes = {"linear": (256, 512)}
    cluster = Cluster(4, tw.Quantized(bits=4, per_host=2), shapes=shapes)
    cluster.step(cluster.random(0))
    rows = cluster.ranks.drivers[0].ledger.rows()
    between = sum(row.sent_bytes for key, row in rows.items() if "quantized" in key)
    bits = tw.Quantized(bits=4).bits_per_element
    # Two hosts, whose two ranks share the bytes.
    assert between == pytest.approx(256 * 512 * bits / 8 / 2, rel=0.01)


def test_stochastic_rounding_without_memory_is_right_on_average():
    method = quantized(4, rounding="stochastic", memory=tw.memory.NoMemory())
    cluster = Cluster(2, method, shapes={"linear": (33, 40)})
    gradients = cluster.random(0)
    total = torch.zeros(33, 40)
    for _ in range(400):
        total += cluster.step(gradients)[0]["linear"]
    mean = (gradients[0]["linear"] + gradients[1]["linear"]) / 2
    # A step of 4 bits is about a third; of 400 draws, and of 1320 elements the worst.
    assert (total / 400 - mean).abs().max() < 0.1
    assert (total / 400 - mean).mean().abs() < 0.002


def test_stochastic_draws_differ_between_ranks_steps_and_slots():
    method = quantized(1, rounding="stochastic", memory=tw.memory.NoMemory())
    cluster = Cluster(1, method, shapes={"a": (32, 32), "b": (32, 32)})
    same = [{"a": torch.full((32, 32), 0.5), "b": torch.full((32, 32), 0.5)}]
    same[0]["a"][0, 0] = same[0]["b"][0, 0] = -8.0
    first, second = cluster.step(same)[0], cluster.step(same)[0]
    assert not torch.equal(first["a"], second["a"]) and not torch.equal(first["a"], first["b"])


def test_plan_shows_the_bits_of_every_element():
    cluster = Cluster(2, tw.Quantized(bits=4), shapes={"linear": (64, 64), "small": (4, 4)})
    plan = cluster.reducers[0].assignments.by_name
    assert plan["linear"].plan.action == "Quantized: 4.125 bits per element in blocks of 128"
    assert plan["small"].plan.dense


@pytest.mark.parametrize("storage, bound", [("bf16", 4e-3), ("int8", 1e-2)])
def test_narrow_memories_lose_little(storage, bound):
    cluster = Cluster(3, quantized(4, memory=tw.memory.Residual(storage=storage)), shapes=SHAPES)
    for seed in range(4):
        before = [cluster.residuals(rank) for rank in range(3)]
        gradients = cluster.random(seed)
        updates = cluster.step(gradients)[0]
        after = [cluster.residuals(rank) for rank in range(3)]
        for name in QUANTIZED:
            c = sum(before[r][name].double() + gradients[r][name].double() for r in range(3))
            total = 3 * updates[name].double() + sum(after[r][name].double() for r in range(3))
            assert (total - c).abs().sum() <= bound * c.abs().sum()


MIXED = [
    tw.rule("0.*", method=tw.Quantized(bits=1, dense_fallback=False)),
    tw.rule("3.*", method=tw.Quantized(bits="fp8", rounding="stochastic", dense_fallback=False)),
]


def replicas_job(rank: int, world: int) -> list[bytes]:
    model = make_cnn()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    handle = tw.attach(ddp, tw.Quantized(bits=4), policy=MIXED)
    prints: list[bytes] = []
    train(ddp, optimizer, batches(rank, 20), lambda _: prints.append(fingerprint(model)))
    handle.close()
    return prints


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_replicas_are_bit_identical_after_each_step(pools, world):
    ranks = pools(world).run(replicas_job)
    assert len(set(ranks[0])) == 20, "the parameters must move"
    assert all(prints == ranks[0] for prints in ranks)
