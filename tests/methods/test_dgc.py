"""DGC against its paper: what it sends, how it samples and clips."""

from __future__ import annotations

import math

import pytest
import torch

from tests.contracts.cluster import Cluster
from thinwire.errors import UsageError
from thinwire.memory.clip import Clip
from thinwire.memory.momentum import MomentumCorrection
from thinwire.methods.dgc import DGC
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
