"""WrappedOptimizer: an optimizer around another one, whose groups, state and hooks stay its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from thinwire.errors import UsageError


class WrappedOptimizer(Optimizer):
    """Passes on to `optimizer` whatever it does not do itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        # The base class is not initialised: groups, state and hooks are the wrapped optimizer's own.
        self.optimizer = optimizer

    def step_wrapped(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For scripts written for Horovod, which must not synchronise twice."""
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError(
            f"parameters cannot be added after {type(self).__name__} was built; add the group to the plain optimizer first"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
