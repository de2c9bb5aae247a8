"""AdamTakeover: how Adam's momentum and second moment move to a handle when the dense start ends, and back.

The optimizer stays the user's own and takes its own steps in the dense start, and for dense parameters always. For those that
are compressed its place is taken behind every one of its steps:

    w = w - lr x weight_decay x w - lr / (1 - beta1^t) x q / (sqrt(v) + eps)

where q is what the exchange left in `p.grad`. t counts the steps, those of the dense start among them; v has its bias
corrected (`thinwire/memory/adam.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import UsageError
from thinwire.memory.adam import SECOND_MOMENT, AdamSettings, raise_to_floor
from thinwire.methods.adam_scale import AdamScale
from thinwire.methods.base import Dense, Method
from thinwire.methods.timeline import Timeline
from thinwire.optim.adam_step import step_of, take_step
from thinwire.optim.base import (
    Takeover,
    common_setting,
    refuse_cycled_momentum,
    refuse_foreign_parameters,
)
from thinwire.optim.loaded import LoadedState
from thinwire.optim.settling import SettlingWatch, find_compressed, measure_moments
from thinwire.plan.policy import Rule

if TYPE_CHECKING:
    from thinwire.handle import Handle
    from thinwire.memory.base import Stores

logger = logging.getLogger(__name__)

NEVER = 1 << 40
"""The step at which the dense start ends, as long as that is not known."""
ALIKE = ("betas", "eps", "maximize")
"""What all parameter groups must have alike: all but the first are needed where nobody knows of groups."""


@dataclass(eq=False)
class AdamTakeover(Takeover):
    """Momentum and second moment of one Adam, in the hands of one handle from the end of the dense start on."""

    optimizer: Optimizer
    parameters: dict[str, nn.Parameter]
    method: AdamScale
    adam: AdamSettings
    handles: Sequence[Handle] = ()
    _hidden: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    """Gradients of compressed parameters, while the optimizer steps the others."""
    _watch: SettlingWatch = field(default_factory=SettlingWatch)
    _loaded: LoadedState = field(default_factory=LoadedState)
    _removers: list[Any] = field(default_factory=list)
    """Take the hooks off the optimizer; empty when nothing is taken over."""

    can_give_back = True

    @classmethod
    def check(
        cls, method: Method, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> AdamTakeover:
        """Refuse what cannot be taken over."""
        assert isinstance(method, AdamScale)
        check_adam(optimizer)
        refuse_foreign_parameters(optimizer, parameters, "moments")
        refuse_cycled_momentum(optimizer)
        betas, eps, _ = common_setting(optimizer, ALIKE, "AdamScale")
        adam = AdamSettings(float(betas[0]), float(betas[1]), float(eps), 0, NEVER)
        made = cls(optimizer, dict(parameters), method, adam)
        if method.start == 0 and not made.count_learned():
            raise UsageError(
                "start is 0, but the optimizer has taken no step so far, so that there is nothing to divide by; it must be "
                "at least 1"
            )
        return made

    @property
    def _sign(self) -> float:
        """Of the gradient in Adam's own momentum."""
        return -1.0 if self.optimizer.param_groups[0]["maximize"] else 1.0

    @property
    def turned(self) -> bool:
        """Whether the dense start has ended."""
        return self.adam.since != NEVER

    # -- what the handle works with ----------------------------------------------------------------------------

    def bind(self, method: Method) -> Method:
        if isinstance(method, AdamScale):
            self.method = method
            return self._later(method.scaled(self.adam))
        if method.is_dense:
            return method
        raise UsageError(
            f"method is {type(method).__name__}, but the handle has taken Adam over; use tw.AdamScale(method=...) or attach "
            "anew"
        )

    def bind_policy(self, policy: Sequence[Rule]) -> list[Rule]:
        return [
            rule if rule.method is None else replace(rule, method=self._scaled(rule.method))
            for rule in policy
        ]

    def _scaled(self, method: Method) -> Method:
        """A rule's method; what says nothing of the scale gets that of the handle's own."""
        if isinstance(method, AdamScale):
            return self._later(method.scaled(self.adam))
        return self._later(method.in_scale(self.method.memory(self.adam)))

    def _later(self, method: Method) -> Method:
        """Dense until the dense start ends; what comes then is checked from the beginning."""
        # A state that is loaded is planned as its last step was; at the end of the dense start it holds memory already.
        begin = self.adam.since - 1 if self.turned else NEVER
        return Timeline(phases=((0, Dense()), (begin, method))) if begin > 0 else method

    def commit(self, handles: Sequence[Handle]) -> None:
        self.handles = handles
        optimizer = self.optimizer
        self._removers = [
            *self._loaded.follow(optimizer),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._save_plain),
            optimizer.register_load_state_dict_pre_hook(self._check_loaded),
            optimizer.register_load_state_dict_post_hook(lambda optimizer: self._collect()),
        ]
        handles[0].on_close(self._drop)
        if self.method.start == 0:
            self._turn()

    # -- one step ----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hide the gradients of compressed parameters from the optimizer; a closure is called before."""
        self._check_unchanged()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        result: tuple[Any, Any] | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            result = (args[0], lambda: loss), {}
        for parameter, _ in self._compressed():
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None
        return result

    def _check_unchanged(self) -> None:
        betas, eps, _ = common_setting(self.optimizer, ALIKE, "AdamScale")
        if (*betas, eps) != (self.adam.beta1, self.adam.beta2, self.adam.eps):
            raise UsageError(
                f"(betas, eps) is {(betas, eps)!r} in the optimizer, but was taken over as "
                f"{((self.adam.beta1, self.adam.beta2), self.adam.eps)!r} and must stay that (schedulers that cycle momentum do "
                "not work with it: say cycle_momentum=False)"
            )
        if getattr(self.optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "fused is True in the optimizer, to which a GradScaler leaves its scaling; with AdamScale it must be False"
            )

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Give the gradients back, take the steps of compressed parameters, and see whether the dense start ends."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        hidden = {parameter for parameter, _ in self._hidden}
        self._hidden.clear()
        divisors = {p: v for p, v in self._compressed() if p in hidden}
        for group in optimizer.param_groups:
            used = [parameter for parameter in group["params"] if parameter in divisors]
            if used:
                take_step(used, [divisors[p] for p in used], optimizer, group, self.adam)
        self._end_flushes()
        if not self.turned and self._is_time():
            self._turn()

    def _compressed(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Parameters that are compressed, each with its second moment, which is the handle's own."""
        for name, memory in self._memories(self.handles[0]):
            v = memory.stores[SECOND_MOMENT].view(name)
            if v is not None:
                yield self.parameters[name], v

    def _memories(self, handle: Handle) -> Iterator[tuple[str, Stores]]:
        """The memories that have a second moment, by parameter name."""
        assigned = handle.reducer.assignments.by_name
        for name in self.parameters:
            memory = assigned[name].compressor.memory
            if memory is not None and SECOND_MOMENT in memory.stores:
                yield name, memory

    # -- the end of the dense start ----------------------------------------------------------------------------

    def _is_time(self) -> bool:
        start, reducer = self.method.start, self.handles[0].reducer
        if isinstance(start, int):
            return reducer.step >= start
        # Workers in one process share the optimizer: they agree anyhow.
        driver = reducer.driver if len(self.handles) == 1 else None
        return self._watch.has_settled(start, self._measure, reducer.step, driver)

    def _measure(self) -> Tensor:
        """The sizes of the second moments that are to be divided by."""
        handle, state = self.handles[0], self.optimizer.state
        held = [self.parameters[name] for name in find_compressed(handle)]
        states = [state[parameter] for parameter in held if parameter in state]
        return measure_moments(states, self.adam.beta2, handle.reducer.device)

    def count_learned(self) -> int:
        """Steps that the optimizer has taken."""
        return count_steps(self.optimizer)

    def _turn(self) -> None:
        """Compress from the next exchange on."""
        since = self.handles[0].reducer.step
        self.adam = replace(self.adam, learned=self.count_learned(), since=since)
        for handle in self.handles:
            handle.steering.rebind()
        self._collect()
        logger.info(
            "the dense start ends after %d steps: momentum comes before compression from now on, in Adam's scale",
            self.adam.learned,
        )

    def follow_switch(self, handle: Handle) -> None:
        if self.turned:
            self._collect()
            # Who skips the step that sends what is held, and does not say so, goes on without momentum.
            self._end_flushes(with_momentum=False)

    @torch.no_grad()
    def _collect(self) -> None:
        """What the optimizer has of compressed parameters becomes the handles', unless they have it already."""
        learned: dict[str, Tensor] | None = None
        holders: Counter[str] = Counter()
        for handle in self.handles:
            for name, memory in self._memories(handle):
                if memory.stores[SECOND_MOMENT].view(name) is None:
                    learned = self._learned() if learned is None else learned
                    self._hand_over(name, memory, learned)
                holders[name] += memory.stores[SECOND_MOMENT].view(name) is not None
        for name, count in holders.items():
            if count == len(self.handles):
                state = self.optimizer.state[self.parameters[name]]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.pop(key, None)

    def _hand_over(self, name: str, memory: Stores, learned: Mapping[str, Tensor]) -> None:
        if name not in learned:
            return
        memory.stores[SECOND_MOMENT].write(name, learned[name])
        momentum = self.optimizer.state[self.parameters[name]].get("exp_avg")
        if momentum is not None:
            memory.stores["momentum"].write(name, self._sign * momentum.to(learned[name].dtype))

    def _learned(self) -> dict[str, Tensor]:
        """The second moments with their bias corrected and their floor; one without gradients so far gets the mean of all."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
            # Of a parameter that was saved before its first step there is a moment of 0, which says nothing.
            if "exp_avg_sq" in state and state["step"] > 0:
                wide = state["exp_avg_sq"].to(torch.promote_types(parameter.dtype, torch.float32))
                v = wide / (1 - self.adam.beta2 ** state["step"].to(wide))
                found[name] = raise_to_floor(v, self.method.floor)
        if not found:
            return {}
        total = torch.stack([v.sum(dtype=torch.float32) for v in found.values()]).sum()
        typical = total / sum(v.numel() for v in found.values())
        for name, parameter in self.parameters.items():
            if name not in found:
                wide_dtype = torch.promote_types(parameter.dtype, torch.float32)
                found[name] = typical.to(wide_dtype).expand(parameter.shape).clone()
        return found

    # -- and back ----------------------------------------------------------------------------------------------

    def _end_flushes(self, *, with_momentum: bool = True) -> None:
        """Parameters that turn dense, and whose memory is being sent, are the optimizer's again.

        Their momentum is the same on all ranks once it has been sent.
        """
        assigned = self.handles[0].reducer.assignments.by_name
        for name, memory in self._memories(self.handles[0]):
            if assigned[name].flushing:
                momentum = memory.stores["momentum"].read(name) if with_momentum else None
                self._return(name, momentum, memory)

    def _return(self, name: str, momentum: Tensor | None, memory: Stores) -> None:
        parameter = self.parameters[name]
        state = self.optimizer.state[parameter]
        step = step_of(parameter, state, self._group_of(parameter))
        state.update(self._plain(name, memory, step))
        if momentum is not None:
            state["exp_avg"].copy_(self._sign * momentum)

    def _group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        return next(group for group in groups if any(p is parameter for p in group["params"]))

    def _plain(self, name: str, memory: Stores, step: Tensor) -> dict[str, Tensor]:
        """What plain Adam would have of a compressed parameter: its second moment, and no momentum, which differs by rank."""
        parameter = self.parameters[name]
        v = memory.stores[SECOND_MOMENT].view(name)
        biased = torch.zeros_like(parameter)
        if v is not None:
            biased.copy_(v * (1 - self.adam.beta2 ** step.to(v)))
        return {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": biased}

    def give_back(self) -> None:
        """Each parameter has returned in the step in which it turned dense: only the hooks are left."""
        self._let_go()
        logger.info(
            "gave momentum and second moment back to the optimizer, which goes on from them"
        )

    def step_back(self) -> None:
        self._let_go()
        self._loaded.put_back(self.optimizer)

    def _drop(self) -> None:
        """Before the memories are freed. Ranks hold different momenta, so that everybody starts from none."""
        if self._removers:
            self._let_go()
            for name, memory in self._memories(self.handles[0]):
                self._return(name, None, memory)

    def _let_go(self) -> None:
        for remover in self._removers:
            remover.remove()
        self._removers = []

    # -- saving and loading ------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Tensor]:
        held = ((n, m.stores[SECOND_MOMENT].read(n)) for n, m in self._memories(self.handles[0]))
        return {name: v for name, v in held if v is not None}

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        for name, memory in self._memories(self.handles[0]):
            memory.stores[SECOND_MOMENT].write(name, state[name])

    def numbers(self) -> dict[str, int | str]:
        return {
            "learned": self.adam.learned,
            "since": self.adam.since,
            "watch": self._watch.to_json(),
        }

    def before_load(self, handle: Handle, numbers: Mapping[str, int | str]) -> None:
        learned, since = (
            int(numbers.get(key, missing)) for key, missing in (("learned", 0), ("since", NEVER))
        )
        if since == NEVER:
            self._watch = SettlingWatch()
        if self.turned and since == NEVER:
            # The optimizer goes on alone, until the dense start ends again.
            for name, held in list(self._memories(handle)):
                self._return(name, None, held)
        self.adam = replace(self.adam, learned=learned, since=since)
        watch = numbers.get("watch")
        self._watch = SettlingWatch() if watch is None else SettlingWatch.from_json(str(watch))
        handle.steering.rebind()

    def after_load(self, handle: Handle, memory: Mapping[str, Mapping[str, Tensor]]) -> None:
        if not self.turned:
            # It may have loaded its moments when they were still the handle's.
            self._loaded.put_back(self.optimizer)
        self._collect()

    def _save_plain(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """A saved optimizer is one that any script can load into plain Adam, which trains on from it.

        The momentum of compressed parameters differs between ranks; it is in the handle's state, and 0 here.
        """
        self.handles[0].reducer.settle()
        memories = dict(self._memories(self.handles[0]))
        names = {parameter: name for name, parameter in self.parameters.items()}
        state = dict(state_dict["state"])
        for packed, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            for index, parameter in zip(packed["params"], group["params"], strict=True):
                memory = memories.get(names.get(parameter, ""))
                if memory is not None:
                    own = dict(state.get(index, {}))
                    step = step_of(parameter, own, group)
                    state[index] = {**own, **self._plain(names[parameter], memory, step)}
        state_dict["state"] = state

    def _check_loaded(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Before anything is replaced."""
        for saved in state_dict["param_groups"]:
            betas = saved.get("betas")
            if betas is None or tuple(betas) != (self.adam.beta1, self.adam.beta2):
                raise UsageError(
                    f"betas is {betas!r} in the saved optimizer, but "
                    f"{(self.adam.beta1, self.adam.beta2)!r} was taken over; load it before attach, or make the optimizer "
                    "with that"
                )


def count_steps(optimizer: Optimizer) -> int:
    """Steps that an optimizer of Adam's kind has taken. The host waits for one whose counters are on a device."""
    counts = [int(s["step"]) for s in optimizer.state.values() if "exp_avg_sq" in s]
    return max(counts, default=0)


def check_adam(optimizer: Optimizer) -> None:
    """Refuse settings that cannot be taken over."""
    for group in optimizer.param_groups:
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            raise UsageError(
                f"betas is {group['betas']!r} in the optimizer; for AdamScale it must be a pair of numbers"
            )
        for key in ("amsgrad", "differentiable"):
            if group.get(key):
                raise UsageError(
                    f"{key} is {group[key]!r} in the optimizer; AdamScale cannot take that over, it must be False"
                )
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            raise UsageError(
                f"weight_decay is {group['weight_decay']!r} in {type(optimizer).__name__}, which adds it to the gradient, so "
                "that it would be compressed; use torch.optim.AdamW"
            )
