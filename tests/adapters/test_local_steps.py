"""Local steps: rounds against plain re-computations, bad rounds, fragments on their way, state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.local_jobs import (
    EXACT,
    WORKERS,
    adamw,
    inner_step,
    make_models,
    mean_in_rank_order,
    run,
    sgd,
    values,
)

# -- against plain re-computations -------------------------------------------------------------------------------------


def test_one_step_and_a_plain_outer_step_is_the_mean_of_the_distances():
    models = make_models()
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, EXACT, every=1, outer={"lr": 1.0})
    plain = make_models()
    plain_optimizers = [sgd(model) for model in plain]
    point = values(plain[0])
    for step in range(4):
        run(sim, models, optimizers, 1, step)
        for rank in range(WORKERS):
            inner_step(plain[rank], plain_optimizers[rank], rank, step)
        ends = [values(model) for model in plain]
        point = point - mean_in_rank_order([point - end for end in ends])
        torch.testing.assert_close(point, mean_in_rank_order(ends), rtol=0, atol=2e-7)
        for model in plain:
            nn.utils.vector_to_parameters(point.clone(), model.parameters())
        assert all(torch.equal(values(model), point) for model in models)


def test_diloco_is_its_recomputation():
    every, lr, momentum = 3, 0.7, 0.9
    models = make_models()
    optimizers = [adamw(model) for model in models]
    outer = {"lr": lr, "momentum": momentum, "nesterov": True}
    sim = tw.LocalSteps.simulate(models, optimizers, EXACT, every=every, outer=outer)
    run(sim, models, optimizers, 4 * every)

    plain = make_models()
    plain_optimizers = [adamw(model) for model in plain]
    point, velocity = values(plain[0]), None
    for step in range(4 * every):
        for rank in range(WORKERS):
            inner_step(plain[rank], plain_optimizers[rank], rank, step)
        if (step + 1) % every:
            continue
        gradient = mean_in_rank_order([point - values(model) for model in plain])
        velocity = gradient.clone() if velocity is None else momentum * velocity + gradient
        point = point - lr * (gradient + momentum * velocity)
        for model in plain:
            nn.utils.vector_to_parameters(point.clone(), model.parameters())
    torch.testing.assert_close(values(models[0]), point, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(values(model), values(models[0])) for model in models)


def test_sparse_rounds_lose_nothing():
    """The point's way and what is held back add up to the workers' distances; a decayed residual is asked for otherwise."""
    models = make_models()
    optimizers = [sgd(model) for model in models]
    method = tw.TopK(density=0.05, dense_fallback=False)
    sim = tw.LocalSteps.simulate(models, optimizers, method, every=2, outer={"lr": 1.0})
    start = {name: tensor.detach().clone() for name, tensor in sim.workers[0].point.tensors.items()}
    sent = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for step in range(6):
        for rank in range(WORKERS):
            inner_step(models[rank], optimizers[rank], rank, step)
        if step % 2:
            for name, point in sim.workers[0].point.tensors.items():
                for worker in sim.workers:
                    sent[name] += point.detach() - worker.point.parameters[name].detach()
        sim.step()
    for name, before in start.items():
        moved = before - sim.workers[0].point.tensors[name].detach()
        held = sum(worker.handle.residual(name) for worker in sim.workers)
        torch.testing.assert_close(WORKERS * moved + held, sent[name], rtol=1e-4, atol=1e-5)


def test_sparse_loco_entries_take_at_most_twelve_bits():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(2)]
    method = tw.Compose(
        select=tw.select.ChunkwiseTopK(1 / 64, chunk=4096),
        memory=tw.memory.Residual(beta=0.95),
        wire=tw.wire.Wire(values="int2", indices="rice"),
    )
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, method, every=1, outer={"lr": 1.0})
    run(sim, models, optimizers, 3)
    stats = sim.workers[0].stats()
    entries = 256 * 256 // 64
    bits = 8 * stats.wire_bytes_per_step / entries
    assert 9 < bits <= 12, bits
    assert "chunks of 4096" in str(sim.workers[0].plan())


# -- fragments and rounds on their way ---------------------------------------------------------------------------------


def test_fragments_take_turns_and_travel_while_steps_go_on():
    models = make_models()
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(
        models, optimizers, EXACT, every=6, fragments=2, delay=2, keep_local=0.0, outer={"lr": 1.0}
    )
    worker = sim.workers[0]
    assert [len(fragment.names) for fragment in worker.fragments] == [1, 3]
    seen = []
    for step in range(12):
        run(sim, models, optimizers, 1, step)
        seen.append(worker.travelling)
    # A round begins after steps 3, 6, 9 and 12 and takes two more.
    assert seen == [bool(step % 3 < 2 and step >= 3) for step in range(1, 13)]
    assert sim.workers[0].handle.reducer.step == 4


def test_a_merged_round_keeps_a_part_of_the_local_place():
    models = make_models(2)
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(
        models, optimizers, EXACT, every=3, delay=1, keep_local=0.25, outer={"lr": 1.0}
    )
    run(sim, models, optimizers, 3)
    for rank in range(2):
        inner_step(models[rank], optimizers[rank], rank, 3)
    before = [values(model) for model in models]
    sim.step()
    point = torch.cat([t.detach().reshape(-1) for t in sim.workers[0].point.tensors.values()])
    for model, local in zip(models, before, strict=True):
        torch.testing.assert_close(values(model), 0.25 * local + 0.75 * point)


# -- bad rounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [EXACT, tw.TopK(density=0.1), tw.Quantized(bits=4)], ids=["dense", "topk", "int4"]
)
def test_a_bad_round_costs_that_round(method):
    models = make_models()
    optimizers = [adamw(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, method, every=2, outer={"lr": 1.0})
    run(sim, models, optimizers, 4)
    common = values(models[0])
    held = sim.workers[0].handle.state_dict()["ranks"]["rank0"]["memory"]
    run(sim, models, optimizers, 1, 4)
    with torch.no_grad():
        models[1][0].weight[3, 3] = torch.nan
        optimizers[1].state[models[1][0].weight]["exp_avg"][0, 0] = torch.inf
    run(sim, models, optimizers, 1, 5)
    assert [worker.lost_rounds for worker in sim.workers] == [1] * WORKERS
    assert all(torch.equal(values(model), common) for model in models)
    after = sim.workers[0].handle.state_dict()["ranks"]["rank0"]["memory"]
    for store, contents in held.items():
        for name, tensor in contents.items():
            assert torch.equal(tensor, after[store][name])
    run(sim, models, optimizers, 4, 6)
    assert all(torch.equal(values(model), values(models[0])) for model in models)
    assert values(models[0]).isfinite().all() and not torch.equal(values(models[0]), common)


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [4, 5, 7])
def test_resume_is_exact_in_mid_round(stop):
    settings = {"every": 4, "fragments": 2, "delay": 1, "bucket_mb": 0.001}
    method = tw.TopK(density=0.1, dense_fallback=False)

    def begin():
        models = make_models(2)
        optimizers = [adamw(model) for model in models]
        return models, optimizers, tw.LocalSteps.simulate(models, optimizers, method, **settings)

    whole, optimizers, sim = begin()
    run(sim, whole, optimizers, 12)
    first, first_optimizers, first_sim = begin()
    run(first_sim, first, first_optimizers, stop)
    saved = copy.deepcopy(
        (
            first_sim.state_dict(),
            [model.state_dict() for model in first],
            [optimizer.state_dict() for optimizer in first_optimizers],
        )
    )
    second, second_optimizers, second_sim = begin()
    second_sim.load_state_dict(saved[0])
    for model, optimizer, weights, state in zip(
        second, second_optimizers, saved[1], saved[2], strict=True
    ):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    run(second_sim, second, second_optimizers, 12 - stop, stop)
    for model, other in zip(whole, second, strict=True):
        assert torch.equal(values(model), values(other))


def test_the_state_is_plain_tensors_and_numbers(tmp_path):
    models = make_models(2)
    optimizers = [adamw(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, tw.Quantized(bits=8), every=2, delay=1)
    run(sim, models, optimizers, 2)
    torch.save(sim.state_dict()[1], tmp_path / "local.pt")
    sim.workers[1].load_state_dict(torch.load(tmp_path / "local.pt", weights_only=True))


# -- memory ------------------------------------------------------------------------------------------------------------

OUTER = {"lr": 0.7, "momentum": 0.9}


@pytest.mark.parametrize(
    ("method", "settings", "wanted"),
    [
        (EXACT, {"outer": OUTER}, (4, 4, 4)),
        (EXACT, {"outer": {"lr": 1.0}}, (4, 0, 4)),
        (EXACT, {"outer": torch.optim.AdamW, "fragments": 4}, (4, 8, 1)),
        (tw.Quantized(bits=4), {"outer": OUTER, "fragments": 4}, (4, 4, 1)),
    ],
    ids=["momentum", "none", "adam", "fragments"],
)
def test_the_plan_counts_all_bytes_of_a_parameter(method, settings, wanted):
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, method, every=4, **settings)
    before = sim.workers[0].plan().beside
    run(sim, models, optimizers, 4)
    after = sim.workers[0].plan()
    count = 4 * 64 * 64
    found = tuple(round(nbytes / count, 2) for nbytes in after.beside.values())
    assert found == wanted
    # What SGD will keep is known before its first step.
    assert after.beside == before or "outer" not in settings or callable(settings["outer"])
    kept = after.memory_bytes + after.spare_bytes + after.kept_bytes
    assert kept == (0 if method is EXACT else pytest.approx(8.6 * count, rel=0.05))
    whole = (sum(after.beside.values()) + kept) / count
    assert f"all of it takes {whole * count / 1e6:.1f} MB ({whole:.3g} bytes per element)" in str(
        after
    )


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 4, "fragments": 5}, "fragments is 5"),
        ({"every": 4, "delay": 4}, "delay is 4"),
        ({"every": 4, "fragments": 2, "delay": 2}, "delay is 2.* 2 where every is 4"),
        ({"every": 4, "keep_local": 1.0}, "keep_local is 1.0"),
    ],
)
def test_senseless_schedules_are_refused(settings, words):
    models = make_models(1)
    with pytest.raises(tw.UsageError, match=words):
        tw.LocalSteps.simulate(models, [sgd(models[0])], **settings)


def test_an_optimizer_of_other_parameters_is_refused():
    models = make_models(2)
    with pytest.raises(tw.UsageError, match="does not have"):
        tw.LocalSteps.simulate(models[:1], [sgd(models[1])], every=2)


def test_methods_that_own_momentum_are_refused():
    models = make_models(1)
    with pytest.raises(tw.UsageError, match="outer optimizer"):
        tw.LocalSteps.simulate(models, [sgd(models[0])], tw.DGC(density=0.1), every=2)


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 1)])
def test_at_the_end_workers_are_averaged_without_the_outer_optimizer(fragments, delay):
    models = make_models()
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(
        models, optimizers, EXACT, every=4, fragments=fragments, delay=delay
    )
    run(sim, models, optimizers, 7)
    for worker in sim.workers:
        worker.finish_now()
    mean = mean_in_rank_order([values(model) for model in models])
    sim.finish()
    assert all(torch.equal(values(model), values(models[0])) for model in models)
    torch.testing.assert_close(values(models[0]), mean, rtol=0, atol=2e-7)
    # Momentum would move the point once more if a round of nothing went through the outer optimizer.
    before = values(models[0])
    sim.finish()
    assert torch.equal(values(models[0]), before)
    run(sim, models, optimizers, 2, 7)
    assert sim.workers[0].steps == 9
