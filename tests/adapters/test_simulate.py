from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.models import batches, make_cnn
from thinwire.adapters.simulate_graph import fresh_casts, recurrent_dropout, run_pass
from thinwire.errors import UsageError

METHOD = tw.ADTopK(density=0.05, dense_fallback=False)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, sim: tw.Simulation, steps: int, seed: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = [batches(rank, steps, seed=seed) for rank in sim.ranks]
    for _ in range(steps):
        for rank in sim.ranks:
            with sim.worker(rank):
                loss_of(model, next(data[rank])).backward()
        sim.exchange()
        optimizer.step()


def bits(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_the_update_is_the_mean_and_nothing_is_lost():
    model = make_cnn()
    sim = tw.simulate(model, METHOD, workers=3)
    for rank, batch in enumerate(next(batches(rank, 1)) for rank in range(3)):
        with sim.worker(rank):
            loss_of(model, batch).backward()
        assert all(p.grad is None for p in model.parameters())
    local = [sim.gradient("6.weight", rank) for rank in sim.ranks]
    sim.exchange()
    update = model[6].weight.grad
    held = sum(sim.residual("6.weight", rank) for rank in sim.ranks)
    torch.testing.assert_close(3 * update + held, sum(local))
    assert 0.03 < update.count_nonzero() / update.numel() < 0.15
    stats = sim.handles[2].stats()
    assert stats.steps == 1 and stats.ratio > 2 and sim.stats().wire_bytes == stats.wire_bytes


def test_step_does_the_same_as_a_loop():
    one, other = make_cnn(), make_cnn()
    train(one, tw.simulate(one, METHOD, workers=2), 3)
    sim = tw.simulate(other, METHOD, workers=2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    data = [batches(rank, 3) for rank in range(2)]
    for _ in range(3):
        losses = sim.step(lambda x, y: loss_of(other, (x, y)), [next(one_s) for one_s in data])
        optimizer.step()
    assert losses.shape == (2,) and not losses.requires_grad
    assert torch.equal(bits(one), bits(other))


def stacked_gradients(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What each worker's backward computes, workers first."""
    rows = []
    for batch in data:
        model.zero_grad()
        loss_of(model, batch).backward()
        rows.append({name: p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad()
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("bucket_mb", [0, 25])
def test_gradients_computed_together_do_the_same_as_a_loop(bucket_mb):
    one, other = make_cnn(), make_cnn()
    train(one, tw.simulate(one, METHOD, workers=3, bucket_mb=bucket_mb), 3)
    sim = tw.simulate(other, METHOD, workers=3, bucket_mb=bucket_mb)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    data = [batches(rank, 3) for rank in range(3)]
    for _ in range(3):
        sim.put_gradients(stacked_gradients(other, [next(one_s) for one_s in data]))
        sim.exchange()
        optimizer.step()
    assert torch.equal(bits(one), bits(other))


def test_gradients_come_from_vmap_as_the_help_shows():
    model = nn.Linear(3, 2)
    inputs = torch.randn(4, 5, 3)
    sim = tw.simulate(model, tw.Dense(), workers=4)

    def loss_of_weights(weights, batch):
        return torch.func.functional_call(model, weights, batch).square().mean()

    compute = torch.func.vmap(torch.func.grad(loss_of_weights), in_dims=(None, 0))
    sim.put_gradients(compute(dict(model.named_parameters()), inputs))
    sim.exchange()
    update = model.weight.grad.clone()
    model.zero_grad()
    model(inputs).square().mean().backward()
    torch.testing.assert_close(update, model.weight.grad)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda given: given.pop("bias"), "'bias' is not given"),
        (lambda given: given.update(tail=torch.zeros(2)), "'tail' is not a trainable parameter"),
        (lambda given: given.update(bias=torch.zeros(2)), r"must be \(2, 2\), workers first"),
    ],
)
def test_gradients_of_another_model_are_refused(change, sentence):
    model = nn.Linear(3, 2)
    given = {"weight": torch.zeros(2, 2, 3), "bias": torch.zeros(2, 2)}
    change(given)
    with pytest.raises(UsageError, match=sentence):
        tw.simulate(model, tw.Dense(), workers=2).put_gradients(given)


def test_every_worker_draws_from_its_own_generator():
    torch.manual_seed(5)
    model = nn.Linear(2, 2)
    before = torch.get_rng_state()
    sim = tw.simulate(model, tw.Dense(), workers=3)
    drawn = []
    for _ in range(2):
        for rank in sim.ranks:
            with sim.worker(rank):
                drawn.append(torch.rand(4))
    assert torch.equal(before, torch.get_rng_state())
    for rank in sim.ranks:
        torch.manual_seed(5 + rank)
        assert torch.equal(torch.cat([drawn[rank], drawn[3 + rank]]), torch.rand(8))


def test_a_saved_simulation_goes_on_bit_for_bit():
    model = make_cnn()
    sim = tw.simulate(model, METHOD, workers=3)
    train(model, sim, 4)
    saved = {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "sim": sim.state_dict(),
    }
    train(model, sim, 4, seed=1)
    again = make_cnn(seed=9)
    again.load_state_dict(saved["model"])
    restored = tw.simulate(again, METHOD, workers=3)
    restored.load_state_dict(saved["sim"])
    assert restored.handles[0].stats().steps == 4
    train(again, restored, 4, seed=1)
    assert torch.equal(bits(model), bits(again))
    fewer = tw.simulate(again, METHOD, workers=2)
    with pytest.raises(UsageError, match="on_world_change"):
        fewer.load_state_dict(saved["sim"])
    fewer.load_state_dict(saved["sim"], on_world_change="mean")
    name = "6.weight"
    mean = sum(saved["sim"]["ranks"][f"rank{r}"]["memory"]["residual"][name] for r in range(3)) / 3
    torch.testing.assert_close(fewer.residual(name, 1), mean)


def test_a_bad_step_reaches_every_worker_and_enters_no_memory():
    model = make_cnn()
    sim = tw.simulate(model, METHOD, workers=3)
    train(model, sim, 2)
    before = [sim.residual("6.weight", rank) for rank in sim.ranks]
    for rank in sim.ranks:
        with sim.worker(rank):
            loss_of(model, next(batches(rank, 1))).backward()
            if rank == 1:
                model[6].weight.grad[0, 0] = torch.inf
    gradient = sim.gradient("6.weight", 0)
    sim.exchange()
    assert all(p.grad.isnan().all() for p in model.parameters())
    torch.testing.assert_close(sim.residual("6.weight", 0), before[0] + gradient)
    assert sim.residual("6.weight", 1).isfinite().all()


def test_parameters_without_a_gradient_are_left_alone_as_under_ddp():
    model = nn.ModuleDict(
        {"used": nn.Linear(8, 8), "some": nn.Linear(8, 8), "spare": nn.Linear(8, 8)}
    )
    sim = tw.simulate(model, tw.Dense(), workers=2)
    with sim.worker(0):
        model["used"](torch.ones(1, 8)).sum().backward()
    with sim.worker(1):
        model["some"](model["used"](torch.ones(1, 8))).sum().backward()
    one_worker = sim.gradient("some.bias", 1)
    sim.exchange()
    assert model["spare"].weight.grad is None
    assert torch.equal(model["some"].bias.grad, one_worker / 2)


def test_an_error_in_a_worker_leaves_everything_in_order():
    model = make_cnn()
    sim = tw.simulate(model, METHOD, workers=2)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="mine"), sim.worker(0):
        torch.rand(1)
        raise RuntimeError("mine")
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(UsageError, match=r"workers \[0, 1\] have no gradient"):
        sim.exchange()
    train(model, sim, 1)


def test_dgc_takes_the_optimizers_momentum_over_for_every_worker():
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of(model, next(batches(0, 1))).backward()
    optimizer.step()
    buffer = optimizer.state[model[6].weight]["momentum_buffer"].clone()
    sim = tw.simulate(model, tw.DGC(density=0.05), workers=3, optimizer=optimizer)
    for handle in sim.handles:
        held = handle.reducer.assignments.held("6.weight", "momentum")
        assert held is not None and torch.equal(held, buffer)
    assert optimizer.param_groups[0]["momentum"] == 0
    sim.close()
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_switching_sends_what_is_held_back():
    model = make_cnn()
    sim = tw.simulate(model, METHOD, workers=2)
    train(model, sim, 2)
    sim.switch(tw.Dense())
    train(model, sim, 2)
    assert not sim.residual("6.weight", 1).any()


def test_the_report_counts_memory_and_time():
    model = make_cnn()
    sim = tw.simulate(model, METHOD, workers=4)
    train(model, sim, 2)
    report = sim.report()
    assert report.steps == 2 and report.workers == 4
    assert report.gradient_bytes == 4 * report.parameter_bytes
    assert report.memory_bytes == 4 * sim.stats().memory_bytes > 0
    assert report.worker_seconds > 0 and report.exchange_seconds > 0
    assert str(report).startswith("4 workers: ")


def test_hundreds_of_workers_of_a_small_model():
    model = nn.Linear(32, 4)
    sim = tw.simulate(model, tw.TopK(density=0.1, dense_fallback=False), workers=256)
    losses = sim.step(
        lambda x: model(x).square().mean(), [(torch.randn(2, 32),) for _ in sim.ranks]
    )
    assert losses.shape == (256,) and model.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"workers": 0}, "workers is 0; it must be a whole number of at least 1"),
        ({"method": "adtopk"}, "method is 'adtopk'"),
        ({"bucket_mb": -1}, "bucket_mb is -1"),
        ({"graph": "yes"}, "graph is 'yes'"),
        ({"model": 3}, "model is 3; it must be a torch.nn.Module"),
        ({"method": tw.DGC(density=0.1)}, "DGC applies momentum before compression"),
        (
            {"method": tw.TopK(exchange=tw.exchange.Hierarchical(per_host=2)), "workers": 3},
            "per_host is 2",
        ),
    ],
)
def test_what_cannot_work_is_refused(settings, sentence):
    chosen = {"model": nn.Linear(2, 2), "method": METHOD, "workers": 2, **settings}
    with pytest.raises(UsageError, match=sentence):
        tw.simulate(chosen.pop("model"), chosen.pop("method"), **chosen)


def test_misuse_is_one_sentence():
    sim = tw.simulate(nn.Linear(2, 2), METHOD, workers=2)
    with pytest.raises(UsageError, match="rank is 2; it must be a whole number from 0 to 1"):
        sim.residual("weight", 2)
    with pytest.raises(UsageError, match="outside of a block"):
        sim.run(lambda: torch.zeros(()))
    with pytest.raises(UsageError, match="begins inside"), sim.worker(0), sim.worker(1):
        pass
    with pytest.raises(UsageError, match="batches has 1 entries"):
        sim.step(lambda: torch.zeros(()), [()])


def test_a_graph_that_cannot_be_is_said_in_one_sentence(caplog):
    one, other = make_cnn(), make_cnn()
    train(one, tw.simulate(one, METHOD, workers=2), 2)
    with caplog.at_level(logging.WARNING):
        sim = tw.simulate(other, METHOD, workers=2, graph=True)
    assert "graph=True does not work here" in caplog.text and not sim.graphed
    train(other, sim, 2)
    assert torch.equal(bits(one), bits(other))


def test_what_a_graph_captures_casts_the_weights_of_its_own_pass():
    """Under an autocast of the caller's, which otherwise keeps the weights it has cast before."""
    model = nn.Linear(4, 1, bias=False)
    inputs = torch.ones(2, 4)

    def compute(inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs).float().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(inputs)
        losses = []
        with fresh_casts():
            for value in (1.0, 2.0):
                nn.init.constant_(model.weight, value)
                losses.append(run_pass(compute, [inputs]).item())
        assert losses == [8.0, 16.0]
        assert torch.is_autocast_cache_enabled()


def test_dropout_inside_a_recurrent_layer_is_no_graphs():
    """Of all layers with dropout: its random state is freed when a generator is seeded, and a graph would go on with it."""
    inside = nn.LSTM(4, 4, 2, dropout=0.5)
    assert recurrent_dropout(inside) == "LSTM"
    assert recurrent_dropout(nn.ModuleDict({"a": nn.Linear(4, 4), "b": inside})) == "b"
    layers = [nn.LSTM(4, 4), nn.Dropout(0.5), nn.GRU(4, 4, 2), nn.TransformerEncoderLayer(4, 1)]
    assert recurrent_dropout(nn.ModuleList(layers)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recurrent_layer_with_dropout_inside_runs_without_a_graph(caplog):
    """Two shapes of inputs in turn, as at the beginning of a stream and further on."""
    model = nn.LSTM(4, 4, 2, dropout=0.5).cuda()
    with caplog.at_level(logging.WARNING):
        sim = tw.simulate(model, METHOD, workers=2, graph=True)
    assert "graph=True does not work here" in caplog.text and not sim.graphed
    for length in (3, 5, 3, 5):
        torch.manual_seed(length)
        inputs = torch.ones(length, 2, 4, device="cuda")
        losses = sim.step(lambda x: model(x)[0].square().mean(), [(inputs,) for _ in sim.ranks])
    assert losses.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inside", [True, False])
def test_graphs_follow_the_weights_under_autocast(inside):
    """Autocast inside the pass, as recipes have it, or around the whole step."""
    results = []
    for graph in (False, True):
        torch.manual_seed(0)
        parts = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
        model = nn.Sequential(*parts, nn.Linear(288, 10)).cuda()
        model = model.to(memory_format=torch.channels_last)
        sim = tw.simulate(model, METHOD, workers=2, graph=graph, deterministic=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = [batches(rank, 5) for rank in sim.ranks]

        def compute(x, y, model=model):
            with torch.autocast("cuda", dtype=torch.bfloat16) if inside else nullcontext():
                return nn.functional.cross_entropy(model(x).float(), y)

        for _ in range(5):
            shown = [tuple(t.cuda() for t in next(mine)) for mine in data]
            with nullcontext() if inside else torch.autocast("cuda", dtype=torch.bfloat16):
                losses = sim.step(compute, shown)
            optimizer.step()
        assert sim.graphed == graph
        results.append(losses)
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("method", [tw.Dense(), METHOD])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_graphs_compute_what_kernels_do(monkeypatch, method, micro_batches, dropout):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    results = []
    for graph in (False, True):
        torch.manual_seed(0)
        parts = [
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
        ]
        model = nn.Sequential(*parts, nn.Linear(288, 10)).cuda()
        sim = tw.simulate(model, method, workers=3, graph=graph, deterministic=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = [batches(rank, 5 * micro_batches) for rank in sim.ranks]

        def compute(x, y, model=model):
            return loss_of(model, (x, y))

        for _ in range(5):
            for rank in sim.ranks:
                with sim.worker(rank):
                    for _ in range(micro_batches):
                        x, y = next(data[rank])
                        sim.run(compute, x.cuda(), y.cuda())
            sim.exchange()
            optimizer.step()
        assert sim.graphed == graph
        results.append(torch.cat([t.reshape(-1).double() for t in model.state_dict().values()]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pass_that_waits_for_the_device_runs_without_a_graph(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
    sim = tw.simulate(model, METHOD, workers=2, graph=True)

    def compute(inputs: Tensor) -> Tensor:
        loss = model(inputs).square().mean()
        return loss * (2.0 if loss.item() > 0 else 1.0)

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            losses = sim.step(compute, [(torch.ones(4, 8, device="cuda"),) for _ in sim.ranks])
    assert caplog.text.count("graph=True does not work here") == 1
    assert losses.isfinite().all() and losses[0] != losses[1]
