"""Local steps in loops that do more: several optimizers, closures, schedules, narrow parameters, frozen layers, compilation."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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

SPARSE = tw.TopK(density=0.1, dense_fallback=False)


def draw(rank: int, step: int) -> torch.Tensor:
    return torch.randn(16, 48, generator=torch.Generator().manual_seed(1000 * step + rank))


def are_alike(models) -> bool:
    return all(torch.equal(values(model), values(models[0])) for model in models)


# -- bad rounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 0), (3, 1)])
def test_a_spoiled_worker_costs_one_round_whatever_the_fragments(fragments, delay):
    """What is not finite in one fragment has spoiled the others by the next step."""
    models = make_models()
    optimizers = [adamw(model) for model in models]
    sim = tw.LocalSteps.simulate(
        models, optimizers, EXACT, every=6, fragments=fragments, delay=delay
    )
    run(sim, models, optimizers, 7)
    with torch.no_grad():
        models[1][0].weight[0, 0] = torch.nan
    others = values(models[0]), values(models[2])
    run(sim, models, optimizers, 12, 7)
    assert [worker.lost_rounds for worker in sim.workers] == [1] * WORKERS
    assert all(values(model).isfinite().all() for model in models)
    sim.finish()
    assert are_alike(models) and not torch.equal(values(models[0]), others[0])


# -- optimizers --------------------------------------------------------------------------------------------------------


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


def compute_loss(model, optimizer, inputs):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    return loss


def test_an_optimizer_with_a_closure_takes_one_step():
    models = make_models()
    optimizers = [lbfgs(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, EXACT, every=2, outer={"lr": 1.0})
    for step in range(8):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.step(partial(compute_loss, model, optimizer, draw(rank, step)))
        if step == 4:
            # Its state lies in lists.
            optimizers[1].state[models[1][0].weight]["old_dirs"][0].fill_(torch.inf)
            with torch.no_grad():
                models[1][0].weight[0, 0] = torch.nan
        sim.step()
    assert sim.workers[0].steps == 8 and sim.workers[0].lost_rounds == 1
    assert are_alike(models) and values(models[0]).isfinite().all()
    assert sim.workers[0].plan().beside["the outer optimizer"] == 0


def train_with_two_optimizers(rank, world):
    model = make_models(1)[0]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with pytest.raises(tw.UsageError, match=r"does not have '0.bias'"):
        tw.LocalSteps(model, optimizers[:1], every=2)
    local = tw.LocalSteps(model, optimizers, every=2, grad_scaler=scaler)
    for step in range(6):
        loss = model(draw(rank, step)).square().mean()
        loss = loss * torch.inf if (rank, step) == (1, 2) else loss
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return local.steps, local.rounds, values(model)


@pytest.mark.workers
def test_parameters_may_be_divided_among_optimizers(pools):
    results = pools(2).run(train_with_two_optimizers)
    assert all(result[:2] == (6, 3) and torch.equal(result[2], results[0][2]) for result in results)


def test_both_learning_rates_may_follow_schedules():
    models = make_models()
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, EXACT, every=2, outer={"lr": 1.0})
    inner = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]
    outer = [torch.optim.lr_scheduler.StepLR(one.outer, 1, gamma=0.1) for one in sim.workers]
    for step in range(4):
        before = values(models[0])
        run(sim, models, optimizers, 1, step)
        for schedule in inner:
            schedule.step()
        if step % 2:
            for schedule in outer:
                schedule.step()
    assert optimizers[0].param_groups[0]["lr"] == 0.05 / 16
    assert sim.workers[0].outer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert are_alike(models) and not torch.equal(before, values(models[0]))
    # The rate is a part of the state.
    again = tw.LocalSteps.simulate(models, optimizers, EXACT, every=2, outer={"lr": 1.0})
    again.load_state_dict(sim.state_dict())
    assert again.workers[0].outer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_accumulated_batches_are_one_step():
    models, plain = make_models(), make_models()
    for these, parts in ((models, 2), (plain, 1)):
        optimizers = [sgd(model) for model in these]
        sim = tw.LocalSteps.simulate(these, optimizers, EXACT, every=2, outer={"lr": 1.0})
        for step in range(4):
            for rank, (model, optimizer) in enumerate(zip(these, optimizers, strict=True)):
                optimizer.zero_grad()
                for piece in draw(rank, step).chunk(parts):
                    (model(piece).square().mean() / parts).backward()
                optimizer.step()
            sim.step()
        assert sim.workers[0].rounds == 2
    torch.testing.assert_close(values(models[0]), values(plain[0]))


# -- parameters --------------------------------------------------------------------------------------------------------


def test_the_point_keeps_what_narrow_parameters_cannot_hold():
    """One of four workers moves by the last place of bfloat16 in each round: after four rounds so has the point."""
    models = [nn.Linear(64, 1, bias=False).bfloat16() for _ in range(4)]
    with torch.no_grad():
        models[0].weight.fill_(1.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, EXACT, every=1, outer={"lr": 1.0})
    place = 2.0**-7
    for number in range(1, 9):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.weight.grad = torch.full_like(model.weight, 0.0 if rank else -place)
            optimizer.step()
        sim.step()
        (point,) = sim.workers[0].point.tensors.values()
        assert point.dtype == torch.float32 and (point == 1 + number * place / 4).all()
        assert (models[3].weight == point.bfloat16()).all()
    assert (models[3].weight == 1 + 2 * place).all()


class Tied(nn.Module):
    """A convolution with channels last, and a decoder that is the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.encode = nn.Linear(16, 8, bias=False)
        self.decode = nn.Linear(8, 16, bias=False)
        self.decode.weight = nn.Parameter(torch.zeros(16, 8))
        self.again = self.encode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.images(x).reshape(-1, 16)
        return self.decode(self.again(hidden))


def test_tied_weights_and_other_memory_formats():
    torch.manual_seed(0)
    models = [Tied() for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, EXACT, every=2, outer={"lr": 1.0})
    assert sorted(sim.workers[0].point.tensors) == [
        *("decode.weight", "encode.weight", "images.bias", "images.weight")
    ]
    for step in range(4):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            inputs = draw(rank, step)[:, :12].reshape(-1, 3, 8, 8)
            (model(inputs) - 1).square().mean().backward()
            optimizer.step()
        ends = [values(model) for model in models]
        sim.step()
    assert are_alike(models)
    torch.testing.assert_close(values(models[0]), mean_in_rank_order(ends), rtol=0, atol=2e-7)
    assert models[0].images.weight.is_contiguous(memory_format=torch.channels_last)


def freeze(model):
    model[2].weight.requires_grad_(False)


def unfreeze(model):
    model[0].bias.requires_grad_(True)


def add(model):
    model.append(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (freeze, "'2.weight' is not trained now and was"),
        (unfreeze, "'0.bias' is trained now and was not"),
        (add, "'3.bias' is trained now and was not"),
    ],
)
def test_what_is_trained_cannot_change_under_way(change, words):
    models = make_models()
    for model in models:
        model[0].bias.requires_grad_(False)
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, EXACT, every=2)
    frozen = models[0][0].bias.clone()
    run(sim, models, optimizers, 5)
    assert torch.equal(models[0][0].bias, frozen)
    for model in models:
        change(model)
    with pytest.raises(tw.UsageError, match=words):
        run(sim, models, optimizers, 1, 5)
    # Begun again with what is trained now.
    optimizers = [sgd(model) for model in models]
    run(tw.LocalSteps.simulate(models, optimizers, EXACT, every=2), models, optimizers, 2)
    assert are_alike(models)


# -- compilation -------------------------------------------------------------------------------------------------------


def train_compiled(rank, world, compiled):
    model = make_models(1)[0]
    optimizer = sgd(model)
    shown = torch.compile(model, backend="eager") if compiled else model
    local = tw.LocalSteps(shown, optimizer, SPARSE, every=3, fragments=2, delay=0)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for number in range(7):
        optimizer.zero_grad()
        shown(draw(rank, number)).square().mean().backward()
        step()
    names = list(local.point.tensors)
    local.finish()
    return local.steps, local.rounds, names, values(model)


@pytest.mark.workers
def test_compiled_models_and_steps_have_the_bits_of_others(pools):
    plain, compiled = (pools(2).run(train_compiled, which) for which in (False, True))
    for one, other in zip(plain, compiled, strict=True):
        assert one[:3] == other[:3] and torch.equal(one[3], other[3])


# -- state -------------------------------------------------------------------------------------------------------------


def test_a_state_does_not_change_with_the_training():
    models = make_models()
    optimizers = [adamw(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, SPARSE, every=2)
    run(sim, models, optimizers, 4)
    state = sim.state_dict()
    before = copy.deepcopy(state)
    run(sim, models, optimizers, 4, 4)
    # Nor with that of who has loaded it.
    sim.load_state_dict(state)
    run(sim, models, optimizers, 4, 8)
    for one, other in zip(before, state, strict=True):
        momenta = [each["outer"]["state"][0]["momentum_buffer"] for each in (one, other)]
        assert torch.equal(*momenta)
        assert all(torch.equal(one["point"][name], other["point"][name]) for name in one["point"])


def go_back(rank, world):
    """Load a state of mid-round while another round travels."""
    model = make_models(1)[0]
    optimizer = sgd(model)
    local = tw.LocalSteps(model, optimizer, SPARSE, every=4, delay=2)
    for step in range(4):
        inner_step(model, optimizer, rank, step)
    saved = copy.deepcopy((local.state_dict(), model.state_dict(), optimizer.state_dict()))
    for step in range(4, 8):
        inner_step(model, optimizer, rank, step)
    assert local.travelling
    for part, state in zip((local, model, optimizer), saved, strict=True):
        part.load_state_dict(state)
    for step in range(4, 12):
        inner_step(model, optimizer, rank, step)
    return values(model)


def go_on(rank, world):
    model = make_models(1)[0]
    optimizer = sgd(model)
    tw.LocalSteps(model, optimizer, SPARSE, every=4, delay=2)
    for step in range(12):
        inner_step(model, optimizer, rank, step)
    return values(model)


@pytest.mark.workers
def test_loading_drops_a_round_under_way(pools):
    for back, on in zip(pools(2).run(go_back), pools(2).run(go_on), strict=True):
        assert torch.equal(back, on)


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_a_round_that_was_saved_under_other_settings_arrives(fragments):
    """The part of the model that travelled moves to where it would have gone, however fragments are cut now."""
    models = make_models()
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, EXACT, every=8, fragments=2, delay=3)
    run(sim, models, optimizers, 4)
    saved, places = sim.state_dict(), [copy.deepcopy(model.state_dict()) for model in models]
    for _ in range(3):
        sim.step()
    assert not sim.workers[0].travelling
    others = make_models()
    again = tw.LocalSteps.simulate(
        others, list(map(sgd, others)), EXACT, every=3, fragments=fragments
    )
    for other, place in zip(others, places, strict=True):
        other.load_state_dict(place)
    again.load_state_dict(saved)
    assert again.workers[0].travelling
    for worker in again.workers:
        worker.finish_now()
    for model, other in zip(models, others, strict=True):
        assert torch.equal(values(model), values(other))


def test_the_next_round_waits_for_one_that_was_saved_with_a_longer_delay():
    models = make_models()
    optimizers = [sgd(model) for model in models]
    sim = tw.LocalSteps.simulate(models, optimizers, EXACT, every=8, delay=7)
    run(sim, models, optimizers, 8)
    others = make_models()
    again = tw.LocalSteps.simulate(others, list(map(sgd, others)), EXACT, every=2)
    again.load_state_dict(sim.state_dict())
    for _ in range(2):
        again.step()
    assert [worker.rounds for worker in again.workers] == [2] * len(others)


def test_a_method_may_change_while_a_round_travels():
    """The round arrives first, and what was held back leaves with the last one."""
    models = make_models()
    optimizers = [sgd(model) for model in models]
    method = tw.Quantized(bits=4, dense_fallback=False)
    sim = tw.LocalSteps.simulate(models, optimizers, method, every=7, delay=3)
    run(sim, models, optimizers, 8)
    for worker in sim.workers:
        assert worker.travelling and worker.handle.residual("0.weight").any()
        worker.handle.switch(tw.Dense())
        assert not worker.travelling and worker.rounds == 1
    sim.finish()
    for worker, model in zip(sim.workers, models, strict=True):
        assert worker.lost_rounds == 0 and not worker.handle.residual("0.weight").any()
        assert torch.equal(values(model), values(models[0]))


def finish_too_late(rank, world):
    model = make_models(1)[0]
    local = tw.LocalSteps(model, sgd(model), every=2)
    local.close()
    with pytest.raises(tw.UsageError, match="before close"):
        local.finish()


@pytest.mark.workers
def test_closed_local_steps_say_so(pools):
    pools(2).run(finish_too_late)


def save(rank, world):
    model = make_models(1)[0]
    optimizer = sgd(model)
    local = tw.LocalSteps(model, optimizer, SPARSE, every=4, delay=1)
    for step in range(8):
        inner_step(model, optimizer, rank, step)
    return local.state_dict(), model.state_dict(), local.handle.residual("0.weight")


def load(rank, world, states, model_state, how):
    model = make_models(1)[0]
    model.load_state_dict(model_state)
    optimizer = sgd(model)
    local = tw.LocalSteps(model, optimizer, SPARSE, every=4, delay=1, deterministic=True)
    with pytest.raises(tw.UsageError, match="on_world_change"):
        local.load_state_dict(states[0])
    local.load_state_dict(states[0], others=states, on_world_change=how)
    held = local.handle.residual("0.weight")
    assert local.travelling and local.steps == 8
    for step in range(8, 13):
        inner_step(model, optimizer, rank, step)
    rounds = local.rounds
    local.finish()
    return held, rounds, values(model)


@pytest.mark.workers
@pytest.mark.parametrize("how", ["mean", "reset"])
def test_another_number_of_workers_goes_on_from_the_states_of_all(pools, how):
    saved = pools(2).run(save)
    states, held = [one[0] for one in saved], [one[2] for one in saved]
    results = pools(3).run(load, states, saved[0][1], how)
    wanted = (held[0] + held[1]) / 2 if how == "mean" else torch.zeros_like(held[0])
    for found, rounds, end in results:
        torch.testing.assert_close(found, wanted)
        assert rounds == 3 and torch.equal(end, results[0][2])


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "words"),
    [
        (0.7, "outer is of type float; it must be settings of torch.optim.SGD"),
        ({"lrr": 1.0}, "torch.optim.SGD says: .*lrr"),
        ({"lr": 1.0, "nesterov": True}, "torch.optim.SGD says: Nesterov"),
        (
            lambda point: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
            "outer does not have '0.weight'",
        ),
    ],
    ids=["number", "unknown", "wrong", "other parameters"],
)
def test_senseless_outer_optimizers_are_refused(outer, words):
    models = make_models(1)
    with pytest.raises(tw.UsageError, match=words):
        tw.LocalSteps.simulate(models, [sgd(models[0])], every=2, outer=outer)


@pytest.mark.parametrize("bucket_mb", [-1, float("nan")])
def test_senseless_buckets_are_refused(bucket_mb):
    models = make_models(1)
    with pytest.raises(tw.UsageError, match="bucket_mb"):
        tw.LocalSteps.simulate(models, [sgd(models[0])], every=2, bucket_mb=bucket_mb)


def refuse(rank, world):
    model = make_models(1)[0]
    optimizer = sgd(model)
    with pytest.raises(tw.UsageError, match="every gradient would still cross the link"):
        tw.LocalSteps(DistributedDataParallel(model), optimizer, every=2)
    with pytest.raises(tw.UsageError, match="Auto, which chooses by what an exchange adds"):
        tw.LocalSteps(model, optimizer, tw.Auto(), every=2)
    with pytest.raises(tw.UsageError, match="model is None"):
        tw.LocalSteps(None, optimizer, every=2)
    with pytest.raises(tw.UsageError, match="optimizer is"):
        tw.LocalSteps(model, model.parameters(), every=2)
    alone = [dist.new_group([one]) for one in range(world)][rank]
    ddp = DistributedDataParallel(model, process_group=alone)
    local = tw.LocalSteps(ddp, optimizer, every=2)
    with pytest.raises(tw.UsageError, match="begun twice with this optimizer"):
        tw.LocalSteps(model, optimizer, every=2)
    local.close()
    tw.LocalSteps(model, optimizer, every=2).close()
    return True


@pytest.mark.workers
def test_models_and_methods_that_local_steps_cannot_have_are_refused(pools):
    assert all(pools(2).run(refuse))
