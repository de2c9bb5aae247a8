"""The same steps with and without kernels, compared bit by bit."""

from __future__ import annotations

import torch

from tests.contracts.cluster import Cluster
from thinwire.layout import Bucket

SHAPES = {"odd": (5, 7), "row": (3, 128), "long": (9, 1031), "conv": (6, 3, 3, 3), "bias": (17,)}


def routes_of(cluster):
    plans = cluster.reducers[0].plans.values()
    return [route for plan in plans for way in plan.ways.values() for route in way.routes]


def compare_steps(
    kernels, method, route, *, steps, world, shapes=SHAPES, prepare=None, change=None, discard=(),
    accepted=True, rebucketed=False, stores=("residual",), **options,
):  # fmt: skip
    """Every bit of updates, `stores` and contributions must agree, and only kernels take the route.

    `prepare` is called with a new cluster, `change` with the gradients of every step. With `rebucketed` the last step has other
    buckets. Where memory is packed or can be restored nobody knows what was `accepted`.
    """
    results = []
    for on in (True, False):
        kernels(on)
        cluster = Cluster(world, method, shapes=shapes, **options)
        if prepare is not None:
            prepare(cluster)
        found = []
        for count in range(steps):
            gradients = cluster.random(count, 1.0 + count)
            if change is not None:
                change(count, gradients)
            if rebucketed and count == steps - 1:
                names = list(shapes)
                cluster.buckets = [names[1::2], names[::2]]
            found += cluster.step(gradients)
            if accepted:
                found += [cluster.accepted(rank) for rank in range(world)]
            found += [cluster.held(rank, store) for rank in range(world) for store in stores]
            if count in discard:
                for reducer in cluster.reducers:
                    reducer.settle(discard=True)
                found += [cluster.held(rank, store) for rank in range(world) for store in stores]
        results.append(found)
        assert any(isinstance(one, route) for one in routes_of(cluster)) == on
    for ours, theirs in zip(*results, strict=True):
        for name in theirs:
            left, right = ours[name].nan_to_num(7e7), theirs[name].nan_to_num(7e7)
            assert torch.equal(left, right), name


def check_broken_exchange(method, kind):
    """An exchange that got no further than its first message, under an account of that `kind`, leaves memory with all there was."""
    cluster = Cluster(2, method, shapes=SHAPES)
    gradients = begin_step(cluster)
    accounts = cluster.reducers[0].record.accounts
    assert any(isinstance(account, kind) for account in accounts)
    cluster.reducers[0].settle(discard=True)
    held = cluster.reducers[0].assignments.held("long", "residual")
    assert torch.equal(held, gradients["long"])


def begin_step(cluster):
    """Rank 0 begins a step with its gradients, which are returned, and nobody answers."""
    gradients = cluster.random(0)[0]
    layout = cluster.layouts_of(list(SHAPES))[0]
    flat = torch.zeros(layout.numel)
    for slot in layout.slots:
        slot.view(flat).copy_(gradients[slot.name])
    cluster.reducers[0].reduce(Bucket(layout, flat))
    return gradients
