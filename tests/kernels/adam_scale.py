"""What tests of kernels in Adam's scale share: memories, second moments, and steps that go wrong, with and without kernels."""

from __future__ import annotations

import torch

from tests.contracts.cluster import Cluster
from tests.kernels.comparing import SHAPES, begin_step, compare_steps
from thinwire.memory.adam import AdamMomentum, AdamSettings
from thinwire.memory.refresh import Refresh

# One exchange came before, so that of two the first is a refresh.
ADAM = AdamSettings(0.9, 0.95, 1e-8, 10, -1)
STORES = ("residual", "momentum", "second_moment")
MEMORIES = {
    "frozen": {},
    "limited": {"limit": 0.7},
    "refreshed": {"refresh": Refresh(every=2, bits=32)},
    "refreshed, limited": {"refresh": Refresh(every=2), "limit": 0.7, "floor": 0.01},
}


def in_scale(method, memory, storage):
    return method.in_scale(AdamMomentum(**MEMORIES[memory], storage=storage, adam=ADAM))


def seed_second_moments(cluster):
    """Sizes that differ by orders of magnitude inside every tensor, and some that are 0."""
    generator = torch.Generator().manual_seed(7)
    for name, info in cluster.infos.items():
        moment = torch.randn(info.shape, generator=generator).mul(3).exp()
        moment.flatten()[::97] = 0.0
        for reducer in cluster.reducers:
            reducer.assignments.write_memory(name, "second_moment", moment.to(cluster.device))


def compare_in_scale(
    kernels, method, route, *, steps=3, world=2, prepare=seed_second_moments, told=True, **options
):
    """Every bit of three stores. What was accepted is not `told` where memory is packed or overflows."""
    compare_steps(
        kernels,
        method,
        route,
        steps=steps,
        world=world,
        prepare=prepare,
        stores=STORES,
        accepted=told and not options.get("restorable"),
        rebucketed=told,
        **options,
    )


def spoiled(count, gradients):
    """A slot without a gradient, and a bad step, in a refresh and in another one."""
    for one in gradients:
        one["long"].zero_()
    if count in (1, 2):
        gradients[0]["row"][1, 5] = torch.inf
        gradients[-1]["odd"].fill_(torch.nan)


def compare_overflows(kernels, method, route, scaled_at=7):
    """First c, in more places than are sent, then the momentum in the units of another loss scale, then nothing any more."""
    now = [1.0]

    def change(count, gradients):
        now[0] = 1e20 if count >= scaled_at else 1.0
        for one in gradients if 1 <= count < scaled_at else []:
            one["row"].fill_(3e38)
            one["odd"].mul_(1e-42)

    scale = {"scale": lambda: torch.tensor(now[0]), "change": change}
    compare_in_scale(kernels, method, route, steps=9, told=False, **scale)


def compare_loss_scales(kernels, method, route, world):
    now = [1.0]

    def change(count, gradients):
        now[0] = (2.0, 2.0, 0.3, 8.0)[count]

    scale = {"scale": lambda: torch.tensor(now[0]), "change": change}
    compare_in_scale(kernels, method, route, steps=4, world=world, **scale)


def compare_infinite_in_plain_units(kernels, method, route):
    """Gradients of one rank, in a refresh and in another step, under a loss scale below 1."""

    def change(count, gradients):
        if count in (1, 2):
            gradients[0]["long"].view(-1)[77] = 1e38

    scale = {"scale": lambda: torch.tensor(0.1), "change": change}
    compare_in_scale(kernels, method, route, steps=4, **scale)


def check_broken_exchange(kernels, method, kind):
    """What an exchange under an account of that `kind` had taken returns. In a refresh nothing was sent: the mean comes first."""
    found = []
    for on in (True, False):
        kernels(on)
        cluster = Cluster(2, method, shapes=SHAPES)
        seed_second_moments(cluster)
        begin_step(cluster)
        accounts = cluster.reducers[0].record.accounts
        assert any(isinstance(account, kind) for account in accounts) == on
        cluster.reducers[0].settle(discard=True)
        found.append([cluster.reducers[0].assignments.held("long", store) for store in STORES])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert found[0][0].any()
