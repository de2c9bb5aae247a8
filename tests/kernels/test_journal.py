"""The journal of a step of several backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.kernels.journal import Journal


class Copies(TorchDispatchMode):
    """Counts the tensors that are cloned."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.ops.aten.clone.default
        return function(*args, **(kwargs or {}))


def test_several_backwards_are_taken_back_with_a_copy_of_each_buffer() -> None:
    journal, buffers = Journal(), (torch.zeros(4), torch.ones(4))
    with Copies() as copies:
        for backward in range(6):
            before, now = buffers if backward % 2 else buffers[::-1]
            journal.note(now, before)
            torch.add(before, 1, out=now)
            journal.extend()
    assert copies.count == len(buffers)
    journal.restore(torch.tensor(True))
    assert all(torch.equal(buffer, torch.ones(4)) for buffer in buffers)
