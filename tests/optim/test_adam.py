"""AdamScale with torch's own Adam: AdamW while dense, and later where nothing is left out; momentum before compression else."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import UsageError

WORKERS = 3
START = 3
SETTINGS: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
LOSSLESS = tw.TopK(density=1.0, values="fp32", dense_fallback=False)
EVERY_STEP = tw.memory.Refresh(every=1, bits=32)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator))
        for _ in range(WORKERS)
    ]


def compute(model: nn.Module):
    return lambda x, y: nn.functional.mse_loss(model(x), y)


def in_scale(method: tw.Method = LOSSLESS, **settings: Any) -> tw.AdamScale:
    return tw.AdamScale(method=method, **{"start": START, **settings})


def start(
    method: tw.Method, kind: type = torch.optim.AdamW, options: dict[str, Any] | None = None, **more
) -> tuple[nn.Module, torch.optim.Optimizer, tw.Simulation]:
    model = make_model()
    optimizer = kind(model.parameters(), **{"lr": 0.05, **SETTINGS, **(options or {})})
    simulation = tw.simulate(
        model, method, workers=WORKERS, optimizer=optimizer, deterministic=True, **more
    )
    return model, optimizer, simulation


def train(optimizer, simulation, model, steps: range) -> list[list[Tensor]]:
    """The parameters after every step."""
    seen = []
    for step in steps:
        simulation.step(compute(model), batches(step))
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


def train_plain(
    steps: int, kind: type = torch.optim.AdamW, options: dict[str, Any] | None = None
) -> list[list[Tensor]]:
    plain = make_model()
    optimizer = kind(plain.parameters(), **{"lr": 0.05, **SETTINGS, **(options or {})})
    seen = []
    for step in range(steps):
        step_plain(plain, optimizer, step)
        seen.append([p.detach().clone() for p in plain.parameters()])
    return seen


def step_plain(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """With the mean of the workers' gradients, added up as a deterministic exchange does it."""
    parameters = list(model.parameters())
    means = [torch.zeros_like(p) for p in parameters]
    for batch in batches(step):
        gradients = torch.autograd.grad(compute(model)(*batch), parameters)
        for mean, gradient in zip(means, gradients, strict=True):
            mean += gradient / WORKERS
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean
    optimizer.step()


def check_close(ours: list[list[Tensor]], theirs: list[list[Tensor]], bound: float) -> None:
    """To within `bound` learning rates, the size of a step."""
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert float((a - b).abs().max()) <= bound * 0.05


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
                if every is not None and (step - START) % every == 0:
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
    "method", [tw.PowerSGD(), tw.OkTopK(), tw.GTopK(), tw.SignSGD()], ids=lambda m: type(m).__name__
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
    ],
    ids=str,
)
def test_bad_settings_get_one_sentence(settings: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        in_scale(**settings)


# -- saving ------------------------------------------------------------------------------------------------------------


def saved(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COMBINATIONS = {
    "top-k, frozen": in_scale(tw.TopK(density=0.25, dense_fallback=False)),
    "top-k, refreshed, limited": in_scale(
        tw.TopK(density=0.25, dense_fallback=False), divisor=tw.memory.Refresh(every=2), limit=0.5
    ),
    "1 bit, refreshed, limited": in_scale(
        tw.Quantized(bits=1, dense_fallback=False), divisor=tw.memory.Refresh(every=2), limit=3.0
    ),
    "2 bits, frozen": in_scale(tw.Quantized(bits=2, dense_fallback=False)),
    "all-dimension, floor": in_scale(tw.ADTopK(density=0.25, dense_fallback=False), floor=0.1),
    "sampled, bf16": in_scale(
        tw.DGC(density=0.25, sample_ratio=0.5, dense_fallback=False), storage="bf16"
    ),
}


@pytest.mark.parametrize("stop", [1, START, START + 3])
@pytest.mark.parametrize("order", ["optimizer first", "handle first"])
@pytest.mark.parametrize("method", COMBINATIONS.values(), ids=COMBINATIONS)
def test_resume_is_bit_exact(method: tw.AdamScale, order: str, stop: int) -> None:
    model, optimizer, simulation = start(method)
    whole = train(optimizer, simulation, model, range(8))
    model, optimizer, simulation = start(method)
    train(optimizer, simulation, model, range(stop))
    states = saved((model.state_dict(), optimizer.state_dict(), simulation.state_dict()))
    model, optimizer, simulation = start(method)
    model.load_state_dict(states[0])
    if order == "optimizer first":
        optimizer.load_state_dict(states[1])
    simulation.load_state_dict(states[2])
    if order == "handle first":
        optimizer.load_state_dict(states[1])
    rest = train(optimizer, simulation, model, range(stop, 8))
    for a, b in zip(whole[-1], rest[-1], strict=True):
        assert torch.equal(a, b)


def test_a_saved_optimizer_is_plain_adamws() -> None:
    """Its second moment goes on where it was; momentum starts anew."""
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP))
    train(optimizer, simulation, model, range(6))
    plain = make_model()
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.05, **SETTINGS)
    reference = make_model()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.05, **SETTINGS)
    for step in range(6):
        step_plain(reference, theirs, step)
    adamw.load_state_dict(saved(optimizer.state_dict()))
    for mine, other in zip(plain.parameters(), reference.parameters(), strict=True):
        assert set(adamw.state[mine]) == set(theirs.state[other])
        assert adamw.state[mine]["step"] == 6
        torch.testing.assert_close(
            adamw.state[mine]["exp_avg_sq"], theirs.state[other]["exp_avg_sq"], rtol=1e-4, atol=1e-9
        )
    plain.load_state_dict(model.state_dict())
    for x, y in batches(7):
        compute(plain)(x, y).backward()
    adamw.step()


def test_other_betas_are_refused_when_loading() -> None:
    _, optimizer, _ = start(in_scale())
    other = torch.optim.AdamW(make_model().parameters(), betas=(0.5, 0.9))
    with pytest.raises(UsageError, match="load it before attach"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("change", ["mean", "reset"])
def test_another_world_goes_on(change: str) -> None:
    method = COMBINATIONS["top-k, refreshed, limited"]
    model, optimizer, simulation = start(method)
    train(optimizer, simulation, model, range(6))
    states = saved((model.state_dict(), optimizer.state_dict(), simulation.state_dict()))
    model = make_model()
    model.load_state_dict(states[0])
    fresh = torch.optim.AdamW(model.parameters(), lr=0.05, **SETTINGS)
    two = tw.simulate(model, method, workers=2, optimizer=fresh)
    fresh.load_state_dict(states[1])
    two.load_state_dict(states[2], on_world_change=change)
    for rank in two.ranks:
        held = two.residual("0.weight", rank)
        assert bool(held.any()) == (change == "mean")
        assert torch.equal(held, two.residual("0.weight", 0))
    for step in range(3):
        two.step(compute(model), batches(step)[:2])
        fresh.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not two.plan()["0.weight"].dense


def test_without_the_optimizers_state_the_next_step_says_so() -> None:
    method = COMBINATIONS["top-k, frozen"]
    model, optimizer, simulation = start(method)
    train(optimizer, simulation, model, range(6))
    state = saved(simulation.state_dict())
    _, _, two = start(method)
    for rank in state["ranks"].values():
        rank["memory"].pop("second_moment")
    two.load_state_dict(state)
    with pytest.raises(UsageError, match="second moment"):
        two.step(compute(two.model), batches(0))


# -- the dense start, and the end --------------------------------------------------------------------------------------


def test_a_trained_optimizer_may_start_at_once() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **SETTINGS)
    for step in range(START):
        step_plain(model, optimizer, step)
    method = in_scale(start=0, divisor=EVERY_STEP)
    simulation = tw.simulate(model, method, workers=WORKERS, optimizer=optimizer)
    ours = train(optimizer, simulation, model, range(START, 9))
    check_close(ours[-1:], train_plain(9)[-1:], 1e-4)


def test_the_dense_start_ends_when_the_second_moment_has_settled() -> None:
    rule = tw.Settled(tolerance=0.5, steps=4, at_least=4)
    model, optimizer, simulation = start(in_scale(start=rule))
    turned = []
    for step in range(60):
        train(optimizer, simulation, model, range(step, step + 1))
        turned.append(not simulation.plan()["0.weight"].dense)
    assert turned[-1] and not any(turned[:7])
    strict = in_scale(start=tw.Settled(tolerance=1e-9, steps=4, at_least=4))
    model, optimizer, simulation = start(strict)
    train(optimizer, simulation, model, range(20))
    assert simulation.plan()["0.weight"].dense


def test_switching_to_dense_sends_what_is_held_and_is_adamw_again() -> None:
    """The step that sends what is held has no refresh, so that the second moment misses one square."""
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP))
    plain = make_model()
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.05, **SETTINGS)
    for step in range(7):
        if step == 6:
            simulation.switch(tw.Dense())
        train(optimizer, simulation, model, range(step, step + 1))
        step_plain(plain, adamw, step)
    ours, theirs = optimizer.state[model[0].weight], adamw.state[plain[0].weight]
    torch.testing.assert_close(ours["exp_avg"], theirs["exp_avg"], rtol=1e-3, atol=1e-6)
    assert int(ours["step"]) == 7
    train(optimizer, simulation, model, range(7, 9))
    assert simulation.plan()["0.weight"].dense
    assert not simulation.handles[0].stats().memory_bytes
    simulation.switch(in_scale(divisor=EVERY_STEP))
    train(optimizer, simulation, model, range(9, 12))
    assert not simulation.plan()["0.weight"].dense
    assert all(p.isfinite().all() for p in model.parameters())
    simulation.switch(tw.Quantized(bits=8))
    train(optimizer, simulation, model, range(12, 14))
    # A method that leaves Adam alone: it is the optimizer's again, momentum and all.
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].any() and state["exp_avg_sq"].any() and int(state["step"]) == 14
    assert simulation.handles[0].steering.takeover is None
    simulation.close()
    assert state["exp_avg"].any()


def test_a_skipped_step_does_not_lose_the_second_moment_of_what_turns_dense() -> None:
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP))
    train(optimizer, simulation, model, range(6))
    simulation.switch(tw.Dense())
    simulation.step(compute(model), batches(6))
    train(optimizer, simulation, model, range(7, 9))
    assert optimizer.state[model[0].weight]["exp_avg_sq"].all()


def test_closing_gives_the_second_moment_back() -> None:
    model, optimizer, simulation = start(in_scale(divisor=EVERY_STEP))
    train(optimizer, simulation, model, range(6))
    held = simulation.handles[0].reducer.assignments.held("0.weight", "second_moment")
    simulation.close()
    state = optimizer.state[model[0].weight]
    torch.testing.assert_close(state["exp_avg_sq"] / (1 - 0.95**6), held)
    assert not state["exp_avg"].any()
    compute(model)(*batches(0)[0]).backward()
    optimizer.step()


def test_rare_rows_are_limited_by_the_floor() -> None:
    """A word that first comes up after the dense start moves by about a learning rate, not by thousands."""
    for floor, wild in ((0.0, True), (0.01, False)):
        torch.manual_seed(0)
        words = nn.Embedding(64, 32)
        optimizer = torch.optim.AdamW(words.parameters(), lr=0.01)
        method = in_scale(start=2, floor=floor)
        simulation = tw.simulate(words, method, workers=1, optimizer=optimizer)
        for step in range(3):
            before = words.weight.detach().clone()
            seen = torch.tensor([0, 1, 2] if step < 2 else [5])
            simulation.step(lambda x: words(x).sum(), [(seen,)])  # noqa: B023
            optimizer.step()
        assert ((words.weight.detach() - before).abs().max() > 1.0) == wild


def test_plain_top_k_with_adam_warns_once_with_the_remedy(caplog) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    tw.simulate(model, tw.TopK(density=0.01), workers=2, optimizer=optimizer)
    assert [record for record in caplog.records if "tw.AdamScale" in record.message]
    caplog.clear()
    tw.simulate(model, tw.Dense(), workers=2, optimizer=optimizer)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    tw.simulate(model, tw.TopK(density=0.01), workers=2, optimizer=sgd)
    assert not [record for record in caplog.records if "AdamScale" in record.message]
