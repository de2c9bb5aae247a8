"""DGC with an optimizer, whose momentum it takes over: torch's SGD where nothing is left out, and plain when it is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.contracts.cluster import Cluster
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.errors import UsageError
from thinwire.memory.momentum import MomentumCorrection
from thinwire.methods.dgc import DGC
from thinwire.optim import DGCSGD
from thinwire.optim.dgc_sgd import decay_direction
from thinwire.optim.takeover import take_over


class Single:
    """One worker without DDP: gradients pass through a one-rank reducer between backward and step."""

    def __init__(self, method, optimizer, model):
        self.model = model
        named = dict(model.named_parameters())
        self.takeover = take_over(method, optimizer, named)
        self.cluster = Cluster(
            1,
            self.takeover.bind(method),
            shapes={name: p.shape for name, p in named.items()},
        )
        self.reducer = self.cluster.reducers[0]
        self.closing = []
        self.takeover.commit([self])

    def on_close(self, action):
        self.closing.append(action)

    def exchange(self):
        named = dict(self.model.named_parameters())
        updates = self.cluster.step([{n: p.grad for n, p in named.items()}])[0]
        for name, parameter in named.items():
            parameter.grad.copy_(updates[name])


def run_pair(method, settings, optimizer=torch.optim.SGD, steps=8, warm=0):
    """The same training with torch's SGD and with a method that took momentum over; both models."""
    plain, ours = make_cnn(), make_cnn()
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.05, **settings)
    our_opt = optimizer(ours.parameters(), lr=0.05, **settings)
    single = None
    for step, (images, labels) in enumerate(batches(0, steps)):
        for model, opt in ((plain, plain_opt), (ours, our_opt)):
            opt.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
        if step >= warm:
            single = single or Single(method, our_opt, ours)
            single.exchange()
        plain_opt.step()
        our_opt.step()
    return plain, ours, our_opt, single, plain_opt


SGD_SETTINGS = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    {"momentum": 0.0, "weight_decay": 0.01},
]
UNMASKED = DGC(
    density=1.0,
    values="fp32",
    dense_fallback=False,
    memory=MomentumCorrection(masking=False),
)


def close(left, right):
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, DGCSGD])
def test_one_worker_at_density_one_is_sgd(settings, optimizer):
    plain, ours, *_ = run_pair(UNMASKED, settings, optimizer)
    close(plain, ours)


@pytest.mark.parametrize("settings", SGD_SETTINGS[1::2], ids=str)
def test_the_dense_path_is_sgd(settings):
    all_dense = DGC(density=tw_dense_schedule())
    plain, ours, *_ = run_pair(all_dense, settings)
    close(plain, ours)


def tw_dense_schedule():
    from thinwire.methods.schedule import Schedule

    return Schedule((0,), (1.0,))


def test_without_decay_every_step_has_the_bits_of_sgd():
    for settings in SGD_SETTINGS[:2]:
        plain, ours, *_ = run_pair(UNMASKED, settings)
        assert fingerprint(plain) == fingerprint(ours)


@pytest.mark.parametrize("settings", SGD_SETTINGS[2:4], ids=str)
def test_momentum_of_earlier_steps_is_taken_along(settings):
    plain, ours, *_ = run_pair(UNMASKED, settings, warm=4)
    close(plain, ours)


DECAYED = {"momentum": 0.9, "weight_decay": 0.01}


def test_settings_come_back_when_the_handle_closes():
    _, ours, optimizer, single, _ = run_pair(UNMASKED, DECAYED)
    group = optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"]) == (0.0, 0.0)
    for action in single.closing:
        action()
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.01)
    assert "taken_over" not in group
    assert not any(optimizer.state[p] for p in ours.parameters())


def test_a_saved_optimizer_is_a_plain_one():
    _, ours, optimizer, *_ = run_pair(UNMASKED, DECAYED)
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 0.01, False)
    assert set(group) == set(
        torch.optim.SGD(ours.parameters(), lr=0.1).state_dict()["param_groups"][0]
    )
    assert all(set(state) == {"momentum_buffer"} for state in saved["state"].values())
    assert optimizer.param_groups[0]["momentum"] == 0.0, "saving changes nothing"
    fresh = torch.optim.SGD(ours.parameters(), lr=0.05)
    fresh.load_state_dict(saved)
    assert take_over(UNMASKED, fresh, dict(ours.named_parameters())).momentum == 0.9


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
def test_a_plain_script_goes_on_from_a_saved_optimizer(settings):
    """Where everything is dense, exactly as if there had been no takeover."""
    plain, ours, optimizer, _, plain_opt = run_pair(DGC(density=tw_dense_schedule()), settings)
    went_on = torch.optim.SGD(ours.parameters(), lr=0.9)
    went_on.load_state_dict(optimizer.state_dict())
    never_left = torch.optim.SGD(plain.parameters(), lr=0.9)
    never_left.load_state_dict(plain_opt.state_dict())
    train(plain, never_left, batches(0, 4, seed=5))
    train(ours, went_on, batches(0, 4, seed=5))
    close(plain, ours)


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
def test_a_dense_checkpoint_loads_after_attach(settings):
    plain = make_cnn()
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.05, **settings)
    train(plain, plain_opt, batches(0, 4))
    ours = make_cnn()
    our_opt = torch.optim.SGD(ours.parameters(), lr=0.9, **{**settings, "weight_decay": 0.5})
    single = Single(UNMASKED, our_opt, ours)
    ours.load_state_dict(plain.state_dict())
    our_opt.load_state_dict(plain_opt.state_dict())
    for images, labels in batches(0, 4, seed=1):
        for model, opt in ((plain, plain_opt), (ours, our_opt)):
            opt.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
        single.exchange()
        plain_opt.step()
        our_opt.step()
    close(plain, ours)


def test_a_checkpoint_with_another_momentum_is_refused_before_anything_changes():
    _, ours, optimizer, *_ = run_pair(UNMASKED, DECAYED)
    for other in ({"momentum": 0.8}, {"momentum": 0.9, "nesterov": True}):
        saved = torch.optim.SGD(ours.parameters(), lr=0.7, **other).state_dict()
        with pytest.raises(UsageError, match=r"in the saved optimizer, but .* was taken over"):
            optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_gradients_are_left_as_they_were_exchanged():
    _, ours, optimizer, *_ = run_pair(UNMASKED, {"momentum": 0.9, "weight_decay": 0.5}, steps=1)
    before = [p.grad.clone() for p in ours.parameters()]
    held = [p.grad for p in ours.parameters()]
    optimizer.step()
    for p, grad, kept in zip(ours.parameters(), before, held, strict=True):
        assert p.grad is kept and torch.equal(p.grad, grad)


def refused(method, optimizer, model, match):
    with pytest.raises(UsageError, match=match):
        take_over(method, optimizer, dict(model.named_parameters()))


def test_what_cannot_be_taken_over_is_refused():
    model = nn.Linear(4, 4)
    other = nn.Linear(2, 2)
    both = [*model.parameters(), *other.parameters()]
    refused(DGC(), None, model, "optimizer=opt")
    refused(DGC(), torch.optim.Adam(model.parameters()), model, "optimizer is Adam")
    refused(DGC(), torch.optim.SGD(both, lr=0.1, momentum=0.9), model, "not the attached model's")
    part = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    refused(DGC(), part, model, "does not hold bias of the attached model")
    damped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    refused(DGC(), damped, model, "dampening")
    upwards = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    refused(DGC(), upwards, model, "maximize")
    groups = [
        {"params": [model.weight], "momentum": 0.9},
        {"params": [model.bias], "momentum": 0.5},
    ]
    refused(DGC(), torch.optim.SGD(groups, lr=0.1), model, "different")
    cycled = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(cycled, max_lr=0.1, total_steps=9)
    refused(DGC(), cycled, model, "cycle_momentum=False")
    assert take_over(tw.TopK(), None, {}) is None
    unattached = DGCSGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="attach"):
        unattached.step()


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
@pytest.mark.parametrize("positional", [False, True])
def test_a_closure_computes_the_gradients_inside_step(settings, positional):
    """Weight decay is then added behind it."""
    plain, ours = make_cnn(), make_cnn()
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.05, **settings)
    our_opt = torch.optim.SGD(ours.parameters(), lr=0.05, **settings)
    single = Single(UNMASKED, our_opt, ours)
    for images, labels in batches(0, 6):

        def backward(model, opt, images=images, labels=labels):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            return loss

        def closure():
            loss = backward(ours, our_opt)
            single.exchange()
            return loss

        wanted = plain_opt.step(lambda: backward(plain, plain_opt))
        loss = our_opt.step(closure) if positional else our_opt.step(closure=closure)
        torch.testing.assert_close(loss, wanted)
    close(plain, ours)


def test_cycled_momentum_is_noticed():
    _, _, optimizer, *_ = run_pair(UNMASKED, {"momentum": 0.9}, steps=1)
    optimizer.param_groups[0]["momentum"] = 0.8
    with pytest.raises(UsageError, match="must stay 0"):
        optimizer.step()


def test_a_parameter_group_that_comes_later_is_noticed():
    _, _, optimizer, *_ = run_pair(UNMASKED, {"momentum": 0.9}, steps=1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(UsageError, match="attach again with the new group"):
        optimizer.step()


def test_decay_direction_is_momentum_of_decay():
    w, state = torch.ones(3), {}
    settings = {"momentum": 0.5, "weight_decay": 0.1, "nesterov": True}
    first = decay_direction(w, state, settings)
    torch.testing.assert_close(first, torch.full((3,), 0.15))
    assert decay_direction(w, state, {**settings, "weight_decay": 0.0}) is None


def test_a_changed_weight_decay_is_noticed():
    """SGD would add it to the one that was taken over."""
    _, _, optimizer, *_ = run_pair(UNMASKED, {"momentum": 0.9, "weight_decay": 0.1}, steps=1)
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(UsageError, match=r"weight_decay is 0.2.*must stay 0"):
        optimizer.step()


def test_the_state_of_another_kind_of_optimizer_is_refused():
    ours, _, optimizer, *_ = run_pair(UNMASKED, {"momentum": 0.9}, steps=1)
    state = torch.optim.Adam(ours.parameters()).state_dict()
    with pytest.raises(UsageError, match="momentum is None in the saved optimizer"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("setting", ["lr", "weight_decay"])
def test_negative_settings_are_refused(setting):
    with pytest.raises(UsageError, match=f"{setting} is -0.1; it must be a number of at least 0"):
        tw.optim.DGCSGD([torch.nn.Parameter(torch.zeros(2))], **{"lr": 0.1, setting: -0.1})
