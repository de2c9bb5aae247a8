"""DGC against its paper and against torch's SGD."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.errors import UsageError
from thinwire.memory.clip import Clip
from thinwire.memory.momentum import MomentumCorrection
from thinwire.methods.base import DenseMomentum
from thinwire.methods.dgc import DGC
from thinwire.optim import DGCSGD
from thinwire.optim.dgc_sgd import decay_direction
from thinwire.optim.takeover import take_over
from thinwire.select.sampled import SampledThreshold, lower_to_reach

SHAPES = {"weight": (60, 80), "bias": (8,)}


def bound(nesterov=False, masking=True, **settings):
    memory = MomentumCorrection(0.9, nesterov, masking)
    return DGC(memory=memory, dense_fallback=False, values="fp32", **settings)


class PaperDGC:
    """Algorithm 4 of the paper and its clipping, for several nodes, in plain tensors of one layer.

    Selection is the exact top-k that the paper's sampling approximates.
    """

    def __init__(self, nodes, shape, k, momentum, nesterov, clip):
        self.u = [torch.zeros(shape) for _ in range(nodes)]
        self.v = [torch.zeros(shape) for _ in range(nodes)]
        self.k, self.m, self.nesterov, self.clip, self.nodes = k, momentum, nesterov, clip, nodes

    def step(self, gradients):
        total = torch.zeros_like(self.u[0])
        for node, g in enumerate(gradients):
            limit = self.clip / math.sqrt(self.nodes)
            g = g * min(1.0, limit / (float(g.norm()) + 1e-6))
            if self.nesterov:
                momentum = self.m * (self.u[node] / self.m * self.m + g)
                self.u[node] = momentum
                self.v[node] = self.v[node] + momentum + g
            else:
                self.u[node] = self.m * self.u[node] + g
                self.v[node] = self.v[node] + self.u[node]
            threshold = self.v[node].abs().view(-1).topk(self.k).values[-1]
            mask = self.v[node].abs() >= threshold
            total += self.v[node] * mask
            self.v[node] = self.v[node] * ~mask
            self.u[node] = self.u[node] * ~mask
        return total / self.nodes


@pytest.mark.parametrize("nesterov", [False, True])
def test_three_nodes_follow_the_paper(nesterov):
    method = bound(nesterov, density=0.01, clip=Clip(norm=30.0, by_workers=True))
    cluster = Cluster(3, method, shapes=SHAPES)
    paper = PaperDGC(3, (60, 80), 48, 0.9, nesterov, clip=30.0)
    for step in range(8):
        gradients = cluster.random(step)
        update = cluster.step(gradients)[0]["weight"]
        torch.testing.assert_close(update, paper.step([g["weight"] for g in gradients]))


@pytest.mark.parametrize("sample_ratio, fewest", [(None, 480), (0.01, 0.8 * 480)])
def test_the_largest_of_v_are_sent(sample_ratio, fewest):
    method = bound(density=0.01, sample_ratio=sample_ratio)
    cluster = Cluster(2, method, shapes={"weight": (600, 80)})
    gradients = cluster.random(0)
    cluster.step(gradients)
    for rank in range(2):
        accepted = cluster.accepted(rank)["weight"]
        sent = int((accepted != 0).sum())
        assert fewest <= sent <= 480
        largest = gradients[rank]["weight"].abs().view(-1).topk(sent).values
        assert torch.equal(accepted[accepted != 0].abs().sort(descending=True).values, largest)


def test_settings_of_the_sampling_need_a_sample():
    assert bound(sample_ratio=0.01, finish="published", reselect=False).selector().iterations == 10
    for settings in ({"finish": "published"}, {"upper": 2.0}, {"iterations": 0}):
        with pytest.raises(UsageError, match=rf"{next(iter(settings))} is .* sample_ratio"):
            DGC(**settings)
    with pytest.raises(UsageError, match="sample_ratio is 0"):
        DGC(sample_ratio=0)


@pytest.mark.parametrize("iterations", [0, 1, 10])
@pytest.mark.parametrize("start", [0.0, 0.5, 3.0, 9.0, 1e4, math.inf])
def test_one_selection_finds_the_threshold_that_counting_finds(start, iterations):
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        magnitude = torch.randn(5000, generator=generator, dtype=dtype).abs()
        for x in (magnitude, (magnitude * 4).round() / 4, torch.full_like(magnitude, 0.4)):
            search = SampledThreshold(0.01, iterations=iterations).session()
            threshold = torch.tensor(start, dtype=dtype)
            counted = search.adapt(x, threshold, 51)
            assert torch.equal(counted, lower_to_reach(x, threshold, 0.8, 41, iterations))


@pytest.mark.parametrize(
    "clip, limit",
    [
        (Clip(value=0.5), lambda g: g.clamp(-0.5, 0.5)),
        (Clip(norm=2.0), lambda g: g * min(1.0, 2.0 / (float(g.norm()) + 1e-6))),
        (
            Clip(norm=2.0, by_workers=True),
            lambda g: g * min(1.0, 1.0 / (float(g.norm()) + 1e-6)),
        ),
    ],
    ids=["value", "norm", "norm by workers"],
)
def test_clipping_is_local_and_before_accumulation(clip, limit):
    cluster = Cluster(4, bound(density=1.0, clip=clip), shapes=SHAPES)
    gradients = cluster.random(0)
    updates = cluster.step(gradients)[0]
    for name in SHAPES:
        torch.testing.assert_close(updates[name], sum(limit(g[name]) for g in gradients) / 4)


def test_clipping_follows_the_loss_scale():
    plain = Cluster(2, bound(density=1.0, clip=Clip(norm=2.0)), shapes=SHAPES)
    scaled = Cluster(
        2, bound(density=1.0, clip=Clip(norm=2.0)), shapes=SHAPES, scale=lambda: torch.tensor(64.0)
    )
    ours = plain.step(plain.random(0))[0]
    theirs = scaled.step(scaled.random(0, factor=64.0))[0]
    torch.testing.assert_close(theirs["weight"] / 64, ours["weight"])


def test_clip_refuses_nonsense():
    for settings in (
        {},
        {"value": 1.0, "norm": 1.0},
        {"norm": -1.0},
        {"value": 1.0, "by_workers": True},
    ):
        with pytest.raises(UsageError, match=r"norm|value"):
            Clip(**settings)


# -- with an optimizer ---------------------------------------------------------------------------------------------


class Single:
    """One worker without DDP: gradients pass through a one-rank reducer between backward and step."""

    def __init__(self, method, optimizer, model):
        self.model = model
        named = dict(model.named_parameters())
        self.takeover = take_over(method, optimizer, named)
        self.cluster = Cluster(
            1,
            self.takeover.bind(method),
            shapes={name: p.shape for name, p in named.items()},
        )
        self.reducer = self.cluster.reducers[0]
        self.closing = []
        self.takeover.commit([self])

    def on_close(self, action):
        self.closing.append(action)

    def exchange(self):
        named = dict(self.model.named_parameters())
        updates = self.cluster.step([{n: p.grad for n, p in named.items()}])[0]
        for name, parameter in named.items():
            parameter.grad.copy_(updates[name])


def run_pair(method, settings, optimizer=torch.optim.SGD, steps=8, warm=0):
    """The same training with torch's SGD and with a method that took momentum over; both models."""
    plain, ours = make_cnn(), make_cnn()
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.05, **settings)
    our_opt = optimizer(ours.parameters(), lr=0.05, **settings)
    single = None
    for step, (images, labels) in enumerate(batches(0, steps)):
        for model, opt in ((plain, plain_opt), (ours, our_opt)):
            opt.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
        if step >= warm:
            single = single or Single(method, our_opt, ours)
            single.exchange()
        plain_opt.step()
        our_opt.step()
    return plain, ours, our_opt, single, plain_opt


SGD_SETTINGS = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    {"momentum": 0.0, "weight_decay": 0.01},
]
UNMASKED = DGC(
    density=1.0,
    values="fp32",
    dense_fallback=False,
    memory=MomentumCorrection(masking=False),
)


def close(left, right):
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, DGCSGD])
def test_one_worker_at_density_one_is_sgd(settings, optimizer):
    plain, ours, *_ = run_pair(UNMASKED, settings, optimizer)
    close(plain, ours)


@pytest.mark.parametrize("settings", SGD_SETTINGS[1::2], ids=str)
def test_the_dense_path_is_sgd(settings):
    all_dense = DGC(density=tw_dense_schedule())
    plain, ours, *_ = run_pair(all_dense, settings)
    close(plain, ours)


def tw_dense_schedule():
    from thinwire.methods.schedule import Schedule

    return Schedule((0,), (1.0,))


def test_without_decay_every_step_has_the_bits_of_sgd():
    for settings in SGD_SETTINGS[:2]:
        plain, ours, *_ = run_pair(UNMASKED, settings)
        assert fingerprint(plain) == fingerprint(ours)


@pytest.mark.parametrize("settings", SGD_SETTINGS[2:4], ids=str)
def test_momentum_of_earlier_steps_is_taken_along(settings):
    plain, ours, *_ = run_pair(UNMASKED, settings, warm=4)
    close(plain, ours)


DECAYED = {"momentum": 0.9, "weight_decay": 0.01}


def test_settings_come_back_when_the_handle_closes():
    _, ours, optimizer, single, _ = run_pair(UNMASKED, DECAYED)
    group = optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"]) == (0.0, 0.0)
    for action in single.closing:
        action()
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.01)
    assert "taken_over" not in group
    assert not any(optimizer.state[p] for p in ours.parameters())


def test_a_saved_optimizer_is_a_plain_one():
    _, ours, optimizer, *_ = run_pair(UNMASKED, DECAYED)
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 0.01, False)
    assert set(group) == set(
        torch.optim.SGD(ours.parameters(), lr=0.1).state_dict()["param_groups"][0]
    )
    assert all(set(state) == {"momentum_buffer"} for state in saved["state"].values())
    assert optimizer.param_groups[0]["momentum"] == 0.0, "saving changes nothing"
    fresh = torch.optim.SGD(ours.parameters(), lr=0.05)
    fresh.load_state_dict(saved)
    assert take_over(UNMASKED, fresh, dict(ours.named_parameters())).momentum == 0.9


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
def test_a_plain_script_goes_on_from_a_saved_optimizer(settings):
    """Where everything is dense, exactly as if there had been no takeover."""
    plain, ours, optimizer, _, plain_opt = run_pair(DGC(density=tw_dense_schedule()), settings)
    went_on = torch.optim.SGD(ours.parameters(), lr=0.9)
    went_on.load_state_dict(optimizer.state_dict())
    never_left = torch.optim.SGD(plain.parameters(), lr=0.9)
    never_left.load_state_dict(plain_opt.state_dict())
    train(plain, never_left, batches(0, 4, seed=5))
    train(ours, went_on, batches(0, 4, seed=5))
    close(plain, ours)


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
def test_a_dense_checkpoint_loads_after_attach(settings):
    plain = make_cnn()
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.05, **settings)
    train(plain, plain_opt, batches(0, 4))
    ours = make_cnn()
    our_opt = torch.optim.SGD(ours.parameters(), lr=0.9, **{**settings, "weight_decay": 0.5})
    single = Single(UNMASKED, our_opt, ours)
    ours.load_state_dict(plain.state_dict())
    our_opt.load_state_dict(plain_opt.state_dict())
    for images, labels in batches(0, 4, seed=1):
        for model, opt in ((plain, plain_opt), (ours, our_opt)):
            opt.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
        single.exchange()
        plain_opt.step()
        our_opt.step()
    close(plain, ours)


def test_a_checkpoint_with_another_momentum_is_refused_before_anything_changes():
    _, ours, optimizer, *_ = run_pair(UNMASKED, DECAYED)
    for other in ({"momentum": 0.8}, {"momentum": 0.9, "nesterov": True}):
        saved = torch.optim.SGD(ours.parameters(), lr=0.7, **other).state_dict()
        with pytest.raises(UsageError, match=r"in the saved optimizer, but .* was taken over"):
            optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_gradients_are_left_as_they_were_exchanged():
    _, ours, optimizer, *_ = run_pair(UNMASKED, {"momentum": 0.9, "weight_decay": 0.5}, steps=1)
    before = [p.grad.clone() for p in ours.parameters()]
    held = [p.grad for p in ours.parameters()]
    optimizer.step()
    for p, grad, kept in zip(ours.parameters(), before, held, strict=True):
        assert p.grad is kept and torch.equal(p.grad, grad)


def refused(method, optimizer, model, match):
    with pytest.raises(UsageError, match=match):
        take_over(method, optimizer, dict(model.named_parameters()))


def test_what_cannot_be_taken_over_is_refused():
    model = nn.Linear(4, 4)
    other = nn.Linear(2, 2)
    both = [*model.parameters(), *other.parameters()]
    refused(DGC(), None, model, "optimizer=opt")
    refused(DGC(), torch.optim.Adam(model.parameters()), model, "optimizer is Adam")
    refused(DGC(), torch.optim.SGD(both, lr=0.1, momentum=0.9), model, "not the attached model's")
    damped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    refused(DGC(), damped, model, "dampening")
    upwards = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    refused(DGC(), upwards, model, "maximize")
    groups = [
        {"params": [model.weight], "momentum": 0.9},
        {"params": [model.bias], "momentum": 0.5},
    ]
    refused(DGC(), torch.optim.SGD(groups, lr=0.1), model, "different")
    assert take_over(tw.TopK(), None, {}) is None
    unattached = DGCSGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="attach"):
        unattached.step()


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
@pytest.mark.parametrize("positional", [False, True])
def test_a_closure_computes_the_gradients_inside_step(settings, positional):
    """Weight decay is then added behind it."""
    plain, ours = make_cnn(), make_cnn()
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.05, **settings)
    our_opt = torch.optim.SGD(ours.parameters(), lr=0.05, **settings)
    single = Single(UNMASKED, our_opt, ours)
    for images, labels in batches(0, 6):

        def backward(model, opt, images=images, labels=labels):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            return loss

        def closure():
            loss = backward(ours, our_opt)
            single.exchange()
            return loss

        wanted = plain_opt.step(lambda: backward(plain, plain_opt))
        loss = our_opt.step(closure) if positional else our_opt.step(closure=closure)
        torch.testing.assert_close(loss, wanted)
    close(plain, ours)


def test_cycled_momentum_is_noticed():
    _, _, optimizer, *_ = run_pair(UNMASKED, {"momentum": 0.9}, steps=1)
    optimizer.param_groups[0]["momentum"] = 0.8
    with pytest.raises(UsageError, match="must stay 0"):
        optimizer.step()


def test_decay_direction_is_momentum_of_decay():
    w, state = torch.ones(3), {}
    settings = {"momentum": 0.5, "weight_decay": 0.1, "nesterov": True}
    first = decay_direction(w, state, settings)
    torch.testing.assert_close(first, torch.full((3,), 0.15))
    assert decay_direction(w, state, {**settings, "weight_decay": 0.0}) is None


# -- on real ranks -------------------------------------------------------------------------------------------------


def dgc_job(rank, world, settings, nesterov):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("thinwire.optim").addHandler(handler)
    logging.getLogger("thinwire.optim").setLevel(logging.INFO)
    ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(
        ddp.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3, nesterov=nesterov
    )
    handle = tw.attach(ddp, DGC(density=0.05, **settings), optimizer=optimizer)
    assert "took momentum 0.9" in messages[0]
    train(ddp, optimizer, batches(rank, 10))
    handle.switch(tw.TopK(density=0.05))
    train(ddp, optimizer, batches(rank, 3, seed=4))
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert all(state["momentum_buffer"].abs().sum() > 0 for state in optimizer.state.values())
    handle.switch(DGC(density=0.05, **settings))
    train(ddp, optimizer, batches(rank, 3, seed=5))
    assert optimizer.param_groups[0]["momentum"] == 0
    handle.switch(tw.Dense())
    train(ddp, optimizer, batches(rank, 4, seed=1))
    assert all(isinstance(row.method, DenseMomentum) for row in handle.plan())
    assert handle.residual("3.weight").abs().sum() == 0
    handle.switch(DGC(density=0.05))
    train(ddp, optimizer, batches(rank, 4, seed=2))
    handle.close()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    train(ddp, optimizer, batches(rank, 2, seed=3))
    return fingerprint(ddp)


@pytest.mark.parametrize("nesterov, sample_ratio", [(False, None), (True, 0.01)])
def test_replicas_stay_bit_identical_through_switches(pools, nesterov, sample_ratio):
    settings = {"clip": Clip(norm=1.0, by_workers=True), "sample_ratio": sample_ratio}
    prints = pools(3).run(dgc_job, settings, nesterov)
    assert len(set(prints)) == 1


def turned_off_job(rank, world):
    """Everything is sent in every step, so that it must train as SGD does, before and after."""
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("thinwire.handle").addHandler(handler)
    memory = MomentumCorrection(masking=False)
    ddp, optimizer, handle = attached(tw.TopK(density=1.0, memory=memory, values="fp32"))
    plain = DistributedDataParallel(make_cnn())
    sgd = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    train(ddp, optimizer, batches(rank, 3))
    handle.switch(tw.Dense())
    train(ddp, optimizer, batches(rank, 1, seed=1))
    handle.close()
    train(ddp, optimizer, batches(rank, 3, seed=2))
    for steps, seed in ((3, 0), (1, 1), (3, 2)):
        train(plain, sgd, batches(rank, steps, seed=seed))
    for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    return warnings, fingerprint(ddp)


def test_turned_off_as_the_pages_say_the_optimizer_goes_on_with_its_momentum(pools):
    (warnings, one), (_, other) = pools(2).run(turned_off_job)
    assert warnings == []
    assert one == other


def attached(method):
    ddp = DistributedDataParallel(make_cnn(), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    handle = tw.attach(ddp, method, optimizer=optimizer, deterministic=True)
    return ddp, optimizer, handle


def resume_job(rank, world, order, path):
    """The optimizer's state and the handle's, in either order, or out of a distributed checkpoint: the same bits."""
    method = DGC(density=0.05)
    ddp, optimizer, handle = attached(method)
    train(ddp, optimizer, batches(rank, 3))
    optimizer.zero_grad()
    checkpoint = {"optimizer": PlainState(ddp, optimizer), "handle": handle}
    dcp.save(checkpoint, checkpoint_id=path)
    before = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict(), handle.state_dict()))
    buffers = [s["momentum_buffer"] for s in before[1]["state"].values()]
    assert len(buffers) == len(list(ddp.parameters()))
    common = torch.cat([buffer.flatten() for buffer in buffers])
    dist.all_reduce(common, dist.ReduceOp.MAX)
    assert torch.equal(common, torch.cat([buffer.flatten() for buffer in buffers]))
    train(ddp, optimizer, batches(rank, 3, seed=1))
    handle.close()

    again, optimizer, handle = attached(method)
    again.module.load_state_dict(before[0])
    if order == "dcp":
        optimizer.zero_grad()
        checkpoint = {"optimizer": PlainState(again, optimizer), "handle": handle}
        dcp.load(checkpoint, checkpoint_id=path)
    for what in order if order != "dcp" else ():
        (optimizer if what == "optimizer" else handle).load_state_dict(
            before[1 if what == "optimizer" else 2]
        )
    train(again, optimizer, batches(rank, 3, seed=1))
    handle.close()
    return fingerprint(ddp), fingerprint(again)


class PlainState:
    """What scripts hand to a distributed checkpoint."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.optimizer, state)


@pytest.mark.parametrize(
    "order", [("optimizer", "handle"), ("handle", "optimizer"), "dcp"], ids=str
)
def test_resume_is_bit_exact_in_any_order_of_loading(pools, order, tmp_path):
    results = pools(2).run(resume_job, order, str(tmp_path))
    assert len({print for pair in results for print in pair}) == 1


def wrapped_job(rank, world):
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    wrapped = tw.DistributedOptimizer(optimizer, model=model, method=DGC(density=0.05))
    train(model, wrapped, batches(rank, 6))
    assert optimizer.param_groups[0]["momentum"] == 0
    wrapped.handle.close()
    return fingerprint(model)


def test_wrapped_optimizer_is_taken_over_too(pools):
    assert len(set(pools(3).run(wrapped_job))) == 1


def refused_job(rank, world):
    ddp = DistributedDataParallel(make_cnn())
    with pytest.raises(UsageError, match="optimizer=opt"):
        tw.attach(ddp, DGC())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    with pytest.raises(UsageError, match="same for all"):
        tw.attach(ddp, DGC(), optimizer=optimizer, policy=[tw.rule("0.*", feedback=False)])
    assert optimizer.param_groups[0]["momentum"] == 0.9
    handle = tw.attach(ddp, tw.TopK(density=0.05))
    with pytest.raises(UsageError, match="attach"):
        handle.switch(DGC())
    handle.close()


def test_attach_refuses_before_it_touches_anything(pools):
    pools(3).run(refused_job)
