"""LoadedState: what an optimizer has loaded, before anything of it is taken over."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class LoadedState:
    """Kept from `load_state_dict` to the next step: a handle may load a state, too, in which the optimizer works alone."""

    def __init__(self) -> None:
        self._state: dict[Any, dict[str, Any]] = {}

    def follow(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Hooks that look at what is loaded before those that are registered later."""
        return [
            optimizer.register_load_state_dict_post_hook(self._note),
            optimizer.register_step_pre_hook(lambda *_: self._state.clear()),
        ]

    def _note(self, optimizer: Optimizer) -> None:
        self._state = {parameter: dict(own) for parameter, own in optimizer.state.items()}

    def put_back(self, optimizer: Optimizer) -> None:
        """Have the optimizer go on from it."""
        for parameter, own in self._state.items():
            optimizer.state[parameter].update(own)
        self._state.clear()
