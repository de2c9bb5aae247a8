"""Contract 9: settings that differ between ranks end in the same error on every rank, not in a hang."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.contracts.cluster import sparse
from tests.models import batches, make_cnn, train

SETTINGS = {
    "density": lambda rank: {"method": tw.ADTopK(density=0.01 if rank else 0.02)},
    "method": lambda rank: {"method": tw.ADTopK() if rank else tw.TopK()},
    "policy": lambda rank: {"policy": [tw.rule("6.*", dense=True)] if rank else []},
    "deterministic": lambda rank: {"deterministic": bool(rank)},
    "grad_scaler": lambda rank: {"grad_scaler": torch.amp.GradScaler("cpu") if rank else None},
    "an axis only one rank refuses": lambda rank: {"method": sparse(axis=7 if rank == 1 else 0)},
}


def differing_job(rank: int, world: int, adapter: str) -> list[str]:
    messages = []
    for different in SETTINGS.values():
        options = {"method": sparse(), **different(rank)}
        model = make_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(tw.ExchangeError) as caught:
            make(adapter, model, optimizer, **options)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_settings_that_differ_give_the_same_error_on_every_rank(pools, adapter):
    results = pools(3).run(differing_job, adapter)
    assert all(result == results[0] for result in results)
    for message in results[0]:
        assert "differs between ranks: rank 0 has" in message


def differing_switch_job(rank: int, world: int) -> None:
    model = make_cnn()
    module, optimizer, handle = make(
        "ddp", model, torch.optim.SGD(model.parameters(), lr=0.05), sparse()
    )
    train(module, optimizer, batches(rank, 2))
    held = handle.residual("6.weight")
    with pytest.raises(tw.ExchangeError, match="method differs between ranks"):
        handle.switch(tw.TopK(density=0.1 + rank / 100))
    with pytest.raises(tw.UsageError, match="axis is 7"):
        handle.switch(tw.ADTopK(axis=7), policy=[tw.rule("6.*", dense=True)])
    with pytest.raises(tw.UsageError, match="policy is 5"):
        handle.switch(tw.ADTopK(), policy=5)
    assert torch.equal(handle.residual("6.weight"), held)
    assert not handle.plan()["6.weight"].dense
    # Nothing has changed, so training goes on.
    train(module, optimizer, batches(rank, 2))
    handle.switch(tw.Dense())
    handle.close()


def test_refused_switch_changes_nothing(pools):
    pools(2).run(differing_switch_job)
