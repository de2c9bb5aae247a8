"""Takeover: what moves from an optimizer to a handle while a method does a part of the optimizer's work, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import UsageError
from thinwire.methods.base import Method
from thinwire.plan.policy import Rule
from thinwire.plan.report import shorten

if TYPE_CHECKING:
    from thinwire.handle import Handle


class Takeover(ABC):
    """One optimizer in the hands of one handle, or of several where workers in one process share it."""

    @abstractmethod
    def bind(self, method: Method) -> Method:
        """The method with what was taken over in it."""

    @abstractmethod
    def bind_policy(self, policy: Sequence[Rule]) -> list[Rule]:
        """The same for the methods of rules."""

    @abstractmethod
    def commit(self, handles: Sequence[Handle]) -> None:
        """Do it. Where there are several handles the first gives everything back when it closes."""

    can_give_back: bool = False
    """Whether the optimizer can go on by itself in mid-training, from what has been gathered."""

    def give_back(self) -> None:
        """Have it go on so. All parameters must be dense by now: what was gathered is then the same on all ranks."""
        raise NotImplementedError

    def step_back(self) -> None:
        """Have it go on from what it has loaded itself, as in the state that its handle is about to load."""
        raise NotImplementedError

    def follow_switch(self, handle: Handle) -> None:  # noqa: B027
        """The handle has another method from now on."""

    def stores(self) -> dict[str, dict[str, Tensor]]:
        """What a handle saves for this beside its memory: tensors by parameter name."""
        return {}

    def shared_state(self) -> dict[str, Tensor]:
        """Copies of what is the same on all ranks and changes with the parameters, by name."""
        return {}

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Replace it."""

    def numbers(self) -> dict[str, int | str]:
        """What a handle saves for this: numbers, or text that has some, the same on all ranks."""
        return {}

    def before_load(self, handle: Handle, numbers: Mapping[str, int | str]) -> None:  # noqa: B027
        """The handle is about to load its state, with what `numbers` returned when it was saved."""

    def after_load(  # noqa: B027
        self, handle: Handle, memory: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """The handle has loaded its state; `memory` has the stores that were saved."""


def refuse_foreign_parameters(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], lost: str
) -> None:
    """Refuse an optimizer that also steps parameters that no handle knows, which would lose what is taken over, and one that does
    not step all that the handle knows: of those, another optimizer would do a second time what the handle does."""
    known = {id(parameter) for parameter in parameters.values()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stepped = {id(parameter) for parameter in held}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in stepped]
    if missing:
        raise UsageError(
            f"the optimizer does not hold {shorten(missing, 3)} of the attached model; whoever else steps them would apply their "
            f"{lost} a second time, so give all parameters to one optimizer, or freeze those that are not trained"
        )
    if any(id(parameter) not in known and parameter.requires_grad for parameter in held):
        raise UsageError(
            f"the optimizer also holds parameters that are not the attached model's; they would lose their {lost}, "
            "so give them an optimizer of their own"
        )


def refuse_cycled_momentum(optimizer: Optimizer) -> None:
    """Refuse an optimizer of which a scheduler has noted that it will change the momentum in every step."""
    if any("max_momentum" in group for group in optimizer.param_groups):
        raise UsageError(
            "a scheduler cycles the optimizer's momentum, which cannot be taken over then; make it with cycle_momentum=False"
        )


def common_setting(optimizer: Optimizer, keys: Sequence[str], who: str) -> tuple[Any, ...]:
    """Settings that all parameter groups must have alike."""
    found = {tuple(group[key] for key in keys) for group in optimizer.param_groups}
    if len(found) != 1:
        raise UsageError(
            f"the optimizer's parameter groups have different ({', '.join(keys)}) {sorted(found)}; {who} needs one"
        )
    return found.pop()
