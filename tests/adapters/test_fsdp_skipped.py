"""Steps of sharded models that are taken back: of several backwards, discarded ones, and backwards that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.lanes import slow
from tests.sharded import (
    are_replicas_equal,
    batch,
    local,
    loss_of,
    make_mesh,
    make_model,
    poison_token,
    train,
    weights,
)

EVERYTHING = tw.TopK(density=1.0, values="fp32", dense_fallback=False)


def bad_micro_batch_job(rank: int, world: int, bad: int, accumulation: str) -> None:
    """Two backwards that are sent add up to one step. One of them is bad in one shard: nothing of either stays."""
    mesh = make_mesh(2, 2)
    model = make_model(mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    handle = tw.attach(model, sparse(), grad_scaler=scaler)
    names = [row.info.name for row in handle.plan() if not row.dense]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        before = {name: handle.residual(name) for name in names}
        for micro in range(2):
            ids = batch(rank, step, micro).clamp(max=29)
            if accumulation == "no sync":
                model.set_requires_gradient_sync(micro == 1)
            if step == 2 and rank == 3 and micro == bad:
                ids[0, 0] = 30
                poison_token(model, 30, ids)
            scaler.scale(loss_of(model, ids)).backward()
        assert all(local(p.grad).isnan().all() == (step == 2) for p in model.parameters())
        held = [torch.equal(handle.residual(name), before[name]) for name in names]
        assert all(held) == (step == 2)
        scaler.step(optimizer)
        scaler.update()
        # Zeros are no gradients that the next step adds to.
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert scaler.get_scale() == 32.0
    assert are_replicas_equal(model, mesh.get_group("replicate"))
    handle.close()


@pytest.mark.parametrize(
    ("bad", "accumulation"),
    [(0, "every backward"), (1, "every backward"), slow(0, "no sync"), slow(1, "no sync")],
)
def test_a_step_of_two_backwards_is_taken_back_as_a_whole(sharded, bad, accumulation):
    sharded.run(bad_micro_batch_job, bad, accumulation)


def discard_job(rank: int, world: int, shape: tuple[int, int], method: Any) -> None:
    """Of two backwards after a step, and of three."""
    model = make_model(make_mesh(*shape))
    handle = tw.attach(model, method, skippable=True)
    optimizer = train(model, 2)
    names = [row.info.name for row in handle.plan()]
    for backwards in (2, 3):
        held = {name: handle.residual(name) for name in names}
        for micro in range(backwards):
            loss_of(model, batch(rank, 5, micro)).backward()
        handle.discard_step()
        assert all(torch.equal(handle.residual(name), held[name]) for name in names)
        optimizer.zero_grad()
        train(model, [6], optimizer=optimizer)
        assert not all(torch.equal(handle.residual(name), held[name]) for name in names)
    handle.close()


@pytest.mark.parametrize(
    ("shape", "method"),
    [
        ((2, 2), sparse()),
        slow((4, 1), sparse()),
        slow((2, 2), tw.PowerSGD(rank=2, dense_fallback=False)),
        slow((2, 2), tw.OkTopK(density=0.05, dense_fallback=False)),
    ],
)
def test_a_discarded_step_of_several_backwards_leaves_no_trace(sharded, shape, method):
    sharded.run(discard_job, shape, method)


def fused_job(rank: int, world: int) -> None:
    """Torch does not count what a fused optimizer writes, and gradients that are made zero stay."""
    model = make_model(make_mesh(2, 2))
    handle = tw.attach(model, sparse(), skippable=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    names = [row.info.name for row in handle.plan() if not row.dense]
    for step in range(3):
        held = {name: handle.residual(name) for name in names}
        loss_of(model, batch(rank, step)).backward()
        if step < 2:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    handle.discard_step()
    assert all(torch.equal(handle.residual(name), held[name]) for name in names)
    handle.close()


def test_what_an_optimizer_took_is_no_part_of_the_step_that_follows(sharded):
    sharded.run(fused_job)


def switched_job(rank: int, world: int) -> None:
    """Another method between two backwards of a step."""
    model = make_model(make_mesh(2, 2))
    handle = tw.attach(model, sparse(), skippable=True)
    optimizer = train(model, 2)
    names = [row.info.name for row in handle.plan() if not row.dense]
    loss_of(model, batch(rank, 2)).backward()
    handle.switch(tw.TopK(density=0.1, dense_fallback=False))
    loss_of(model, batch(rank, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()
    held = {name: handle.residual(name) for name in names}
    loss_of(model, batch(rank, 4)).backward()
    handle.discard_step()
    assert all(torch.equal(handle.residual(name), held[name]) for name in names)
    handle.close()


def test_a_switch_between_two_backwards_is_forgotten_with_their_step(sharded):
    sharded.run(switched_job)


class Stop(Exception):
    pass


def fail_in_backward(model: Any, rank: int) -> None:
    """Between the second block and the first."""

    def stop(gradient: Any) -> None:
        raise Stop

    remover = model.blocks[0].register_forward_hook(
        lambda module, inputs, output: output.register_hook(stop) and None
    )
    with pytest.raises(Stop):
        loss_of(model, batch(rank, 7)).backward()
    remover.remove()
    model.reset_iter_state()
    model.zero_grad()


def failed_backward_job(rank: int, world: int) -> None:
    found = []
    for method in (None, EVERYTHING, sparse()):
        model = make_model(make_mesh(2, 2))
        handle = tw.attach(model, method, skippable=True) if method is not None else None
        optimizer = train(model, 2)
        names = [row.info.name for row in handle.plan()] if handle is not None else []
        held = {name: handle.residual(name) for name in names if handle is not None}
        fail_in_backward(model, rank)
        with torch.no_grad():
            model(batch(rank, 7))
        if handle is not None:
            assert all(torch.equal(handle.residual(name), held[name]) for name in names)
        train(model, [2, 3], optimizer=optimizer)
        found.append(weights(model))
        if handle is not None:
            handle.close()
    # Torch keeps what the failed backward has gathered of units that were not reduced, without thinwire too.
    assert torch.equal(found[0], found[1])


def test_a_backward_that_fails_leaves_no_trace(sharded):
    if not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("reset_iter_state is new in torch 2.13")
    sharded.run(failed_backward_job)
