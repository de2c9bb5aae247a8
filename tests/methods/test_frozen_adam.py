"""FrozenAdam: AdamW while dense, linear in the gradients afterwards, refused where it would learn from compressed ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.optim import FrozenAdam

WORKERS = 2
DENSE_STEPS = 3
UNMASKED = tw.MomentumCorrection(masking=False)
SETTINGS = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


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


def begin_dense(method: tw.Method, steps: int = DENSE_STEPS) -> tw.Timeline:
    return tw.Timeline(phases=((0, tw.Dense()), (steps, method)))


def lossless() -> tw.TopK:
    return tw.TopK(density=1.0, values="fp32", dense_fallback=False, memory=UNMASKED)


def train(
    optimizer: FrozenAdam, simulation: tw.Simulation, model: nn.Module, steps: range
) -> list[list[Tensor]]:
    """The parameters after every step."""
    seen = []
    for step in steps:
        simulation.step(compute(model), batches(step))
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


def start(method: tw.Method, **settings) -> tuple[nn.Module, FrozenAdam, tw.Simulation]:
    model = make_model()
    values = {**SETTINGS, "dense_steps": DENSE_STEPS, **settings}
    optimizer = FrozenAdam(model.parameters(), lr=0.05, **values)
    return model, optimizer, tw.simulate(model, method, workers=WORKERS, optimizer=optimizer)


def test_dense_steps_are_those_of_adamw() -> None:
    model, optimizer, simulation = start(begin_dense(lossless()))
    plain = make_model()
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.05, **SETTINGS)
    ours = train(optimizer, simulation, model, range(DENSE_STEPS))
    for step in range(DENSE_STEPS):
        adamw.zero_grad()
        losses = [compute(plain)(*batch) for batch in batches(step)]
        torch.stack(losses).mean().backward()
        adamw.step()
        for mine, parameter in zip(ours[step], plain.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_later_steps_have_adams_momentum_and_the_divisor_of_the_last_dense_one() -> None:
    """Written out, for a method that sends everything."""
    model, optimizer, simulation = start(begin_dense(lossless()))
    reference = make_model()
    beta1, beta2 = SETTINGS["betas"]
    parameters = list(reference.parameters())
    u, v = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    divisors: list[Tensor] = []
    ours = train(optimizer, simulation, model, range(3 * DENSE_STEPS))
    for step in range(3 * DENSE_STEPS):
        losses = [compute(reference)(*batch) for batch in batches(step)]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), parameters)
        t = step + 1
        for i, (parameter, g) in enumerate(zip(parameters, gradients, strict=True)):
            u[i] = beta1 * u[i] + g
            if t <= DENSE_STEPS:
                v[i] = beta2 * v[i] + (1 - beta2) * g * g
            corrected = v[i] / (1 - beta2 ** min(t, DENSE_STEPS))
            if t == DENSE_STEPS + 1:
                divisors.append(corrected.clamp(min=0.01 * corrected.mean()).sqrt() + 1e-6)
            divisor = divisors[i] if t > DENSE_STEPS else corrected.sqrt() + 1e-6
            with torch.no_grad():
                parameter -= 0.05 * 0.1 * parameter
                parameter -= 0.05 * (1 - beta1) / (1 - beta1**t) * u[i] / divisor
        for mine, parameter in zip(ours[step], parameters, strict=True):
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-4, atol=1e-5)


def test_an_entry_without_gradients_so_far_is_not_thrown_away_by_its_first() -> None:
    words = nn.Embedding(4, 3)
    optimizer = FrozenAdam(words.parameters(), lr=0.01, dense_steps=2)
    optimizer.attached = True
    for step in range(4):
        optimizer.exchanges = lambda: step + 1  # noqa: B023
        words.weight.grad = torch.zeros(4, 3)
        words.weight.grad[0] = 1.0
        before = words.weight.detach().clone()
        if step >= 2:
            words.weight.grad[3] = 1.0
        optimizer.step()
        assert (words.weight.detach() - before).abs().max() < 0.2


def test_it_goes_on_where_it_was_saved() -> None:
    """In the dense steps and after them."""
    method = begin_dense(tw.TopK(density=0.2, memory=UNMASKED))
    for stop in (DENSE_STEPS - 1, DENSE_STEPS + 2):
        model, optimizer, simulation = start(method)
        train(optimizer, simulation, model, range(stop))
        # Copies, because both go on in place.
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), simulation.state_dict()))
        again, its_optimizer, its_simulation = start(method)
        for target, state in zip((again, its_optimizer, its_simulation), saved, strict=True):
            target.load_state_dict(state)
        on, resumed = (
            train(*each, range(stop, stop + 4))
            for each in ((optimizer, simulation, model), (its_optimizer, its_simulation, again))
        )
        for left, right in zip(on[-1], resumed[-1], strict=True):
            assert torch.equal(left, right)
    with pytest.raises(UsageError, match="dense_steps is 5, but the saved optimizer has 3"):
        start(begin_dense(lossless(), 5), dense_steps=5)[1].load_state_dict(saved[1])


def test_what_cannot_be_is_one_sentence() -> None:
    model = make_model()
    with pytest.raises(UsageError, match="dense_steps is 3, but TopK compresses in step 0"):
        start(tw.TopK(memory=UNMASKED))
    with pytest.raises(UsageError, match="dense_steps is 3, but Timeline compresses in step 2"):
        start(begin_dense(tw.TopK(memory=UNMASKED), 2))
    with pytest.raises(UsageError, match="FrozenAdam leaves momentum to the method"):
        FrozenAdam(model.parameters(), dense_steps=1).step()
    with pytest.raises(UsageError, match="dense_steps is 0"):
        FrozenAdam(model.parameters(), dense_steps=0)
    with pytest.raises(UsageError, match=r"betas is 1\.0"):
        FrozenAdam(model.parameters(), dense_steps=1, betas=(0.9, 1.0))


class Branch(nn.Module):
    """Whose second layer is used or not, or gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
        self.share: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y if self.share is None else y + self.share * self.second(x)


@pytest.mark.parametrize("before", [None, 0.0])
def test_a_tensor_without_gradients_in_the_dense_steps_moves_like_the_others(before) -> None:
    model = Branch()
    groups = [{"params": layer.parameters()} for layer in (model.first, model.second)]
    optimizer = FrozenAdam(groups, lr=0.01, dense_steps=DENSE_STEPS)
    method = begin_dense(tw.TopK(density=0.3, dense_fallback=False, memory=UNMASKED))
    simulation = tw.simulate(model, method, workers=WORKERS, optimizer=optimizer)
    for step in range(3 * DENSE_STEPS):
        model.share = before if step < DENSE_STEPS + 1 else 1.0
        old = model.second.weight.detach().clone()
        train(optimizer, simulation, model, range(step, step + 1))
        assert (model.second.weight.detach() - old).abs().max() < 0.1
    assert not torch.equal(model.second.weight.detach(), Branch().second.weight)


def test_what_is_learned_is_of_dense_steps_only() -> None:
    """Whichever of them a scaler skips, and whoever had no gradient in some of them."""
    model = Branch()
    optimizer = FrozenAdam(model.parameters(), lr=0.0, dense_steps=8)
    method = begin_dense(tw.TopK(density=0.3, dense_fallback=False, memory=UNMASKED), 8)
    simulation = tw.simulate(model, method, workers=WORKERS, optimizer=optimizer)
    v = torch.zeros(4, 8)
    for step in range(12):
        model.share = None if step in (4, 5) else 1.0
        simulation.step(compute(model), batches(step))
        if step in (0, 3):
            simulation.discard_step()
            continue
        optimizer.step()
        if step < 8 and model.share is not None:
            losses = [compute(model)(*batch) for batch in batches(step)]
            (g,) = torch.autograd.grad(torch.stack(losses).mean(), model.second.weight)
            v = 0.999 * v + 0.001 * g * g
    corrected = v / (1 - 0.999**4)
    expected = corrected.clamp(min=0.01 * corrected.mean()).sqrt() + 1e-8
    torch.testing.assert_close(optimizer.state[model.second.weight]["divisor"], expected)


def test_beta1_is_one_and_stays() -> None:
    model = make_model()
    groups = [
        {"params": model[0].parameters(), "betas": (0.5, 0.9)},
        {"params": model[2].parameters()},
    ]
    optimizer = FrozenAdam(groups, dense_steps=1)
    with pytest.raises(UsageError, match="different"):
        tw.simulate(model, begin_dense(lossless(), 1), workers=1, optimizer=optimizer)
    model, optimizer, simulation = start(begin_dense(lossless()))
    with pytest.raises(UsageError, match="add_param_group was called after attach"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    optimizer.param_groups[0]["betas"] = (0.7, 0.9)
    with pytest.raises(UsageError, match=r"beta1 was taken over as 0\.8"):
        train(optimizer, simulation, model, range(1))


def test_nothing_compresses_while_it_learns() -> None:
    compressing = tw.TopK(density=0.2, dense_fallback=False, memory=UNMASKED)
    model, optimizer, simulation = start(begin_dense(compressing))
    train(optimizer, simulation, model, range(1))
    with pytest.raises(UsageError, match="TopK compresses in step 1"):
        simulation.switch(compressing)
    train(optimizer, simulation, model, range(1, 5))
    simulation.switch(compressing)
    simulation.close()
    # All it needs has been learned.
    again = tw.simulate(model, compressing, workers=WORKERS, optimizer=optimizer)
    train(optimizer, again, model, range(2))
    fresh = FrozenAdam(model.parameters(), dense_steps=3)
    with pytest.raises(UsageError, match="TopK compresses in step 0"):
        tw.simulate(
            model,
            begin_dense(compressing),
            workers=WORKERS,
            optimizer=fresh,
            policy=[tw.rule("0.*", method=compressing)],
        )
