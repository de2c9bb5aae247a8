"""AdamScale with torch's own Adam: AdamW while dense, and later where nothing is left out; momentum before compression else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.optim.adam_job import (
    EVERY_STEP,
    SETTINGS,
    START,
    WORKERS,
    batches,
    check_close,
    compute,
    in_scale,
    make_model,
    start,
    step_plain,
    train,
    train_plain,
)
from thinwire.errors import UsageError

# -- against AdamW ---------------------------------------------------------------------------------------------------


def test_dense_steps_are_adamws_own() -> None:
    model, optimizer, simulation = start(in_scale(start=100))
    check_close(train(optimizer, simulation, model, range(6)), train_plain(6), 0.0)


VARIANTS = [
    {},
    {"maximize": True},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"weight_decay": 0.0},
    {"capturable": False, "foreach": False, "lr": torch.tensor(0.05)},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_refreshed_in_every_step_and_sending_all_it_is_adamw(kind: type, options: dict) -> None:
    """To 1e-4 of a step, after 12 of them: the roundings of c, of means and of the bias correction."""
    if kind is torch.optim.Adam:
        options = {**options, "weight_decay": 0.0}
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP), kind, options)
    ours = train(optimizer, simulation, model, range(12))
    assert simulation.handles[0].plan()["0.weight"].method.memory.adam.since == START
    check_close(ours, train_plain(12, kind, options), 1e-4)


def recompute(steps: int, density: float, limit: float | None, every: int | None) -> list:
    """Three workers in plain torch, tensor by tensor, as FRONTIER's rules say."""
    model = make_model()
    named = dict(model.named_parameters())
    compressed = {name for name, p in named.items() if p.dim() == 2}
    beta1, beta2 = SETTINGS["betas"]
    m = {name: torch.zeros_like(p) for name, p in named.items()}
    v = copy.deepcopy(m)
    u: dict[str, list[Tensor]] = {}
    residual = {name: [torch.zeros_like(p)] * WORKERS for name, p in named.items()}
    frozen: dict[str, Tensor] = {}
    seen = []
    for step in range(steps):
        gradients = [
            torch.autograd.grad(compute(model)(*batch), list(named.values()))
            for batch in batches(step)
        ]
        t = step + 1
        for i, (name, p) in enumerate(named.items()):
            g = [one[i] for one in gradients]
            mean = sum(g) / WORKERS
            with torch.no_grad():
                p -= 0.05 * 0.1 * p
                if step < START or name not in compressed:
                    m[name] = beta1 * m[name] + (1 - beta1) * mean
                    v[name] = beta2 * v[name] + (1 - beta2) * mean * mean
                    divisor = (v[name] / (1 - beta2**t)).sqrt() + 1e-6
                    p -= 0.05 / (1 - beta1**t) * m[name] / divisor
                    u[name], frozen[name] = [m[name]] * WORKERS, v[name] / (1 - beta2**t)
                    continue
                if every is not None and (step - START + 1) % every == 0:
                    learned = START + (step - START) // every * min(every, 20)
                    raw = frozen[name] * (1 - beta2**learned)
                    w = beta2 ** min(every, 20)
                    raw = w * raw + (1 - w) * mean * mean
                    frozen[name] = raw / (1 - beta2**learned * w)
                divisor = frozen[name].sqrt() + 1e-6
                sent = []
                for rank in range(WORKERS):
                    u[name][rank] = beta1 * u[name][rank] + (1 - beta1) * g[rank]
                    c = residual[name][rank] + u[name][rank]
                    keep = max(1, int(c.numel() * density))
                    chosen = (c / divisor).abs().flatten().topk(keep).indices
                    q = torch.zeros_like(c)
                    q.view(-1)[chosen] = c.flatten()[chosen]
                    if limit is not None:
                        # With the bits of bfloat16, so that c - q is exact.
                        most = ((limit * divisor).view(torch.int32) & -65536).view(torch.float32)
                        q = torch.minimum(torch.maximum(q, -most), most)
                    residual[name] = list(residual[name])
                    residual[name][rank] = c - q
                    sent.append(q)
                p -= 0.05 / (1 - beta1**t) * (sum(sent) / WORKERS) / divisor
            u[name] = list(u[name])
        seen.append([p.detach().clone() for p in named.values()])
    return seen


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("density", [0.25, 1.0])
def test_three_workers_as_recomputed(density: float, every: int | None, limit: float | None):
    method = tw.TopK(density=density, values="fp32", dense_fallback=False)
    divisor = "frozen" if every is None else tw.memory.Refresh(every=every, bits=32)
    model, optimizer, simulation = start(in_scale(method, divisor=divisor, limit=limit))
    ours = train(optimizer, simulation, model, range(10))
    check_close(ours, recompute(10, density, limit, every), 1e-2)


# -- the optimizer as the user knows it ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["scheduler", "attach"])
def test_schedulers_change_the_rate_of_both_kinds_of_steps(first: str) -> None:
    def scheduled(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **SETTINGS)
    scheduler = scheduled(optimizer) if first == "scheduler" else None
    simulation = tw.simulate(
        model, in_scale(divisor=EVERY_STEP), workers=WORKERS, optimizer=optimizer
    )
    scheduler = scheduler or scheduled(optimizer)
    plain = make_model()
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.05, **SETTINGS)
    their_scheduler = scheduled(adamw)
    for step in range(8):
        simulation.step(compute(model), batches(step))
        optimizer.step()
        scheduler.step()
        step_plain(plain, adamw, step)
        their_scheduler.step()
    ours = [p.detach() for p in model.parameters()]
    check_close([ours], [[p.detach() for p in plain.parameters()]], 1e-4)


def test_groups_have_rates_and_decays_of_their_own() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": list(model[0].parameters()), "lr": 0.01, "weight_decay": 0.5},
            {"params": list(model[2].parameters()), "weight_decay": 0.0},
        ]

    model, plain = make_model(), make_model()
    optimizer = torch.optim.AdamW(groups(model), lr=0.05, **SETTINGS)
    adamw = torch.optim.AdamW(groups(plain), lr=0.05, **SETTINGS)
    simulation = tw.simulate(
        model, in_scale(divisor=EVERY_STEP), workers=WORKERS, optimizer=optimizer
    )
    for step in range(8):
        simulation.step(compute(model), batches(step))
        optimizer.step()
        step_plain(plain, adamw, step)
    ours = [p.detach() for p in model.parameters()]
    check_close([ours], [[p.detach() for p in plain.parameters()]], 1e-4)


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP))
    calls = []

    def closure() -> float:
        calls.append(1)
        losses = simulation.step(compute(model), batches(len(calls) - 1))
        return float(losses.mean())

    for step in range(6):
        assert isinstance(optimizer.step(closure), float)
        assert len(calls) == step + 1
    ours = [p.detach() for p in model.parameters()]
    check_close([ours], train_plain(6)[-1:], 1e-4)


REFUSED = [
    (torch.optim.SGD, {"momentum": 0.9}, "optimizer is SGD"),
    (torch.optim.NAdam, {}, "optimizer is NAdam"),
    (torch.optim.AdamW, {"amsgrad": True}, "amsgrad is True"),
    (torch.optim.AdamW, {"differentiable": True}, "differentiable is True"),
    (torch.optim.Adam, {"weight_decay": 0.1}, "use torch.optim.AdamW"),
    (torch.optim.AdamW, {"eps": 0.0}, "eps is 0.0"),
]


@pytest.mark.parametrize(("kind", "options", "sentence"), REFUSED, ids=str)
def test_what_cannot_be_taken_over_is_refused(kind, options, sentence) -> None:
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    with pytest.raises(UsageError, match=sentence):
        tw.simulate(model, in_scale(), workers=2, optimizer=optimizer)


def test_an_optimizer_is_needed_and_must_know_its_second_moment() -> None:
    model = make_model()
    with pytest.raises(UsageError, match="optimizer=opt"):
        tw.simulate(model, in_scale(), workers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match="start is 0"):
        tw.simulate(model, in_scale(start=0), workers=2, optimizer=optimizer)
    with pytest.raises(UsageError, match="begins dense by itself"):
        tw.Timeline(phases=((0, tw.Dense()), (5, in_scale())))
    groups = [{"params": model[0].parameters(), "eps": 1e-3}, {"params": model[2].parameters()}]
    with pytest.raises(UsageError, match="different"):
        tw.simulate(model, in_scale(), workers=2, optimizer=torch.optim.AdamW(groups))


def test_a_cycled_momentum_is_refused() -> None:
    model, optimizer, simulation = start(in_scale())
    simulation.step(compute(model), batches(0))
    optimizer.param_groups[0]["betas"] = (0.5, 0.95)
    with pytest.raises(UsageError, match="cycle_momentum"):
        optimizer.step()


@pytest.mark.parametrize(
    "method", [tw.OkTopK(), tw.GTopK(), tw.SignSGD()], ids=lambda m: type(m).__name__
)
def test_methods_that_compare_ranks_or_choose_nothing_are_refused(method: tw.Method) -> None:
    with pytest.raises(UsageError, match="scale"):
        tw.AdamScale(method=method)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"start": -1}, "start is -1"),
        ({"start": True}, "start is True"),
        ({"divisor": "alive"}, "divisor is 'alive'"),
        ({"limit": 0}, "limit is 0"),
        ({"floor": 2.0}, "floor is 2.0"),
        ({"storage": "fp8"}, "storage is 'fp8'"),
        ({"method": tw.ADTopK(partial=True)}, "partial=True.*chooses by itself"),
    ],
    ids=str,
)
def test_bad_settings_get_one_sentence(settings: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        tw.AdamScale(**{"method": tw.TopK(), **settings})
