"""DGC on real ranks: replicas, resumed runs, wrapped optimizers, and what is refused."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.errors import UsageError
from thinwire.memory.clip import Clip
from thinwire.memory.momentum import MomentumCorrection
from thinwire.methods.base import DenseMomentum
from thinwire.methods.dgc import DGC


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
