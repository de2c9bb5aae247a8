"""What DDP models, settings and hooks `attach` refuses, each with one sentence."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import thinwire as tw
from tests.adapters.test_ddp import Net, wrap
from tests.contracts.cluster import sparse
from thinwire.auto.steering import CLOSED


def refused(model: Any, method: Any = None, **options: Any) -> str:
    with pytest.raises(tw.UsageError) as caught:
        tw.attach(model, method or sparse(), **options)
    message = str(caught.value)
    assert "\n" not in message and not message.endswith(".")
    return message


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))


def refusals_job(rank: int, world: int) -> None:
    assert "must be a torch.nn.parallel.DistributedDataParallel" in refused(Net())
    attached = wrap(rank, Net())
    handle = tw.attach(attached, sparse())
    assert "attach was called twice" in refused(attached)
    handle.close()
    hooked = wrap(rank, Net())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    assert "already has a communication hook" in refused(hooked)
    sparse_layout = refused(wrap(rank, nn.Sequential(nn.Embedding(64, 8, sparse=True))))
    assert "'0' has sparse=True" in sparse_layout and "sparse=False" in sparse_layout
    assert "'w' has dtype torch.complex64" in refused(wrap(rank, Complex()))
    assert "method is 'adtopk'" in refused(wrap(rank, Net()), "adtopk")
    assert "method is the class ADTopK; it must be" in refused(wrap(rank, Net()), tw.ADTopK)
    adam = torch.optim.AdamW(Net().parameters())
    swapped = refused(wrap(rank, Net()), adam)
    assert (
        swapped.startswith("method is an optimizer, AdamW; it must be") and "optimizer=" in swapped
    )
    assert "model is of class AdamW; it must be" in refused(adam)
    assert "optimizer is 'adamw'; it must be" in refused(wrap(rank, Net()), optimizer="adamw")
    schedule = torch.optim.lr_scheduler.StepLR(adam, 1)
    assert "optimizer is a StepLR; it must be" in refused(wrap(rank, Net()), optimizer=schedule)
    assert "deterministic is 1" in refused(wrap(rank, Net()), deterministic=1)
    assert "grad_scaler is 1" in refused(wrap(rank, Net()), grad_scaler=1)
    assert "policy is" in refused(wrap(rank, Net()), policy=tw.rule("*"))
    assert "policy is 'dense'" in refused(wrap(rank, Net()), policy=["dense"])
    assert "axis is 7; parameter 'conv.weight'" in refused(wrap(rank, Net()), sparse(axis=7))
    skipping = wrap(rank, Net(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    assert "skip_all_reduce_unused_params" in refused(skipping)
    python_reducer = wrap(rank, Net())
    python_reducer._use_python_reducer = True
    assert "Python reducer" in refused(python_reducer)
    alone = dist.new_group([rank], use_local_synchronization=True)
    if world > 1:
        assert "process_group has the ranks" in refused(wrap(rank, Net()), process_group=alone)
    fresh = tw.attach(wrap(rank, Net()), sparse())
    with pytest.raises(tw.UsageError, match=r"name is 'module.conv.weight'; the handle knows"):
        fresh.residual("module.conv.weight")
    fresh.close()


def test_what_cannot_work_is_refused_at_attach_with_one_sentence(pools):
    pools(2).run(refusals_job)


def warned(model: Any, method: Any = None, **options: Any) -> list[str]:
    """What attach warns of."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    handle = tw.attach(model, *([method] if method is not None else []), **options)
    logging.getLogger("thinwire").removeHandler(handler)
    handle.close()
    assert handle.advise().sentences == (CLOSED,)
    return records


def vain_job(rank: int, world: int) -> None:
    def linear() -> Any:
        return wrap(rank, nn.Linear(64, 64))

    once = 1 if rank == 0 else 0
    everything = warned(linear(), tw.TopK(density=1))
    told = ["TopK compresses none of the 2 parameters"] * once
    assert [text.split(" (")[0] for text in everything] == told
    blind = warned(linear())
    assert [text.split(",")[0] for text in blind] == ["tw.Auto() stays dense"] * once
    model = linear()
    assert warned(model, optimizer=torch.optim.AdamW(model.parameters())) == []
    (other,) = warned(linear(), optimizer=torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    assert other.startswith("the AdamW in optimizer= has none of the model's parameters")
    assert warned(linear(), tw.TopK(density=0.01)) == []
    # All of it is sent, so that nothing misleads Adam.
    model = linear()
    adam = torch.optim.AdamW(model.parameters())
    whole = warned(model, tw.TopK(density=1, dense_fallback=False), optimizer=adam)
    assert whole == []


def test_what_cannot_help_is_said_once(pools):
    pools(2).run(vain_job)


def lonely_job(rank: int, world: int) -> None:
    (told,) = warned(wrap(rank, nn.Linear(64, 64)), tw.TopK(density=0.01))
    assert told.startswith("there is one worker: nothing is sent")
    assert warned(wrap(rank, nn.Linear(64, 64)), tw.Dense()) == []
    assert warned(wrap(rank, nn.Linear(64, 64))) == []


def test_one_worker_is_told_that_nothing_is_sent(pools):
    pools(1).run(lonely_job)


def lifetime_job(rank: int, world: int) -> None:
    ddp = wrap(rank)
    handle = tw.attach(ddp, sparse())
    handle.close()
    model = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert model() is None


def test_registry_does_not_keep_models_alive(pools):
    pools(1).run(lifetime_job)
