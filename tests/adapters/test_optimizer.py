from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.models import batches, fingerprint, make_cnn, train

METHOD = tw.ADTopK(density=0.05)


def make(rank: int = 0, **options) -> tuple[nn.Module, tw.DistributedOptimizer]:
    model = make_cnn(seed=rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, tw.DistributedOptimizer(
        inner, model=model, method=METHOD, bucket_mb=0.02, **options
    )


def replicas_job(rank: int, world: int, method: tw.Dense) -> bytes:
    model = make_cnn(seed=rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = tw.DistributedOptimizer(inner, model=model, method=method, bucket_mb=0.02)
    train(model, optimizer, batches(rank, 60))
    assert optimizer.handle.stats().steps == 60
    optimizer.close()
    return fingerprint(model)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("method", [tw.Dense(), METHOD], ids=["dense", "adtopk"])
def test_replicas_that_start_apart_become_and_stay_identical(pools, world, method):
    assert len(set(pools(world).run(replicas_job, method))) == 1


def own_collectives_job(rank: int, world: int) -> list[bool]:
    found = []
    for norm in (nn.BatchNorm1d(64), nn.SyncBatchNorm(64)):
        model = nn.Sequential(nn.Linear(64, 64), norm)
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = tw.DistributedOptimizer(plain, model=model, method=METHOD)
        found.append(optimizer.handle.reducer.driver.in_turn)
        optimizer.close()
    return found


def test_exchanges_keep_their_turn_among_the_collectives_of_layers(pools):
    assert pools(2).run(own_collectives_job) == [[False, True]] * 2


def schedule_and_clip_job(rank: int, world: int) -> tuple[bytes, float]:
    model, optimizer = make(rank)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for images, labels in batches(rank, 6):
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    learning_rate = optimizer.param_groups[0]["lr"]
    plain = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == learning_rate
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.close()
    return fingerprint(model), learning_rate


def test_scheduler_scaler_clipping_and_plain_state_dict_work(pools):
    results = pools(3).run(schedule_and_clip_job)
    assert len(set(results)) == 1
    assert results[0][1] == 0.05 * 0.5**3


def closure_job(rank: int, world: int) -> bytes:
    model, optimizer = make(rank)
    for images, labels in batches(rank, 3):

        def closure(images=images, labels=labels):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    optimizer.close()
    return fingerprint(model)


def test_a_closure_exchanges_inside_step(pools):
    assert len(set(pools(3).run(closure_job))) == 1


def accumulation_job(rank: int, world: int) -> list[int]:
    model, optimizer = make(rank, backward_passes_per_step=3)
    messages = []
    for step, (images, labels) in enumerate(batches(rank, 6)):
        (nn.functional.cross_entropy(model(images), labels) / 3).backward()
        messages.append(optimizer.handle.ledger.messages())
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.handle.stats().steps == 2
    optimizer.close()
    return messages


def test_only_the_last_of_the_accumulated_passes_sends(pools):
    for messages in pools(3).run(accumulation_job):
        assert messages[0] == messages[1] == 0
        assert 0 < messages[2] == messages[3] == messages[4] < messages[5]


def second_backward_job(rank: int, world: int) -> str:
    model, optimizer = make(rank)
    images, labels = next(batches(rank, 1))
    nn.functional.cross_entropy(model(images), labels).backward()
    try:
        nn.functional.cross_entropy(model(images), labels).backward()
    except tw.UsageError as error:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_a_second_backward_before_step_is_refused_and_recoverable(pools):
    for message in pools(2).run(second_backward_job):
        assert "backward_passes_per_step is 1" in message


class TwoHeads(nn.Module):
    """Rank 0 uses one head, the others another; a third is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 64)
        self.heads = nn.ModuleList(nn.Linear(64, 32) for _ in range(3))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(inputs).relu())


def missing_job(rank: int, world: int) -> tuple[bytes, float]:
    torch.manual_seed(0)
    model = TwoHeads()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    method = tw.ADTopK(density=0.1, dense_fallback=False)
    optimizer = tw.DistributedOptimizer(inner, model=model, method=method)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(
            torch.randn(8, 16, generator=generator), 0 if rank == 0 else 1
        ).square().mean().backward()
        optimizer.step()
    unused = optimizer.handle.residual("heads.2.weight").abs().sum()
    optimizer.close()
    return fingerprint(model), float(unused)


def test_missing_gradients_count_as_zero_on_every_rank(pools):
    results = pools(3).run(missing_job)
    assert len(set(results)) == 1
    assert results[0][1] == 0.0


def overlap_job(rank: int, world: int) -> tuple[float, float]:
    model, optimizer = make(rank)
    driver = optimizer.handle.reducer.driver
    # Buckets this small would otherwise wait for each other.
    optimizer.handle.reducer.coalesce_bytes = 0
    issued, fired = [], []
    perform = driver.network.perform
    driver.network.perform = lambda *args: (issued.append(time.perf_counter()), perform(*args))[1]
    first = next(model.parameters())

    def slow(_: torch.Tensor) -> None:
        # As long as a busy machine may need.
        deadline = time.perf_counter() + 20
        while not issued and time.perf_counter() < deadline:
            time.sleep(0.01)
        fired.append(time.perf_counter())

    first.register_hook(slow)
    images, labels = next(batches(rank, 1))
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.close()
    return issued[0], fired[0]


def test_the_first_collective_leaves_before_the_last_gradient_is_there(pools):
    for first_issued, last_fired in pools(2).run(overlap_job):
        assert first_issued < last_fired


def reentrant_job(rank: int, world: int, use_reentrant: bool | None) -> list[torch.Tensor]:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    optimizer = tw.DistributedOptimizer(
        torch.optim.SGD(layers.parameters(), lr=0.1), model=layers, method=tw.Dense(), bucket_mb=0
    )
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    for layer in layers:
        x = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
    x.square().sum().backward()
    gradients = [p.grad.clone() for p in layers.parameters()]
    optimizer.close()
    return gradients


def test_checkpointing_does_not_end_the_exchange_early(pools):
    plain = pools(2).run(reentrant_job, None)[0]
    for use_reentrant in (True, False):
        for gradients in pools(2).run(reentrant_job, use_reentrant):
            assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def refusals_job(rank: int, world: int) -> list[str]:
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Linear(2, 2)
    messages = []
    for arguments in (
        {"model": model, "method": "adtopk"},
        {"model": other, "method": METHOD},
        {"model": model, "method": METHOD, "bucket_mb": -1},
        {"model": model, "method": METHOD, "backward_passes_per_step": 0},
        {"named_parameters": [("w", p) for p in model.parameters()], "method": METHOD},
    ):
        with pytest.raises(tw.UsageError) as caught:
            tw.DistributedOptimizer(optimizer, **arguments)
        messages.append(str(caught.value))
    return messages


def test_bad_arguments_get_one_sentence(pools):
    messages = pools(1).run(refusals_job)[0]
    for field, message in zip(
        ("method", "model", "bucket_mb", "backward_passes_per_step", "named_parameters"),
        messages,
        strict=True,
    ):
        assert message.startswith(field)
        assert "\n" not in message
