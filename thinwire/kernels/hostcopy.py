"""HostCopy: a device value the host will want later, copied without making it wait now."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Start the copy at construction; `read` a step later finds it done."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = value
        if value.is_cuda:
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def on_device(self) -> bool:
        """Whether reading it at once would make the host wait."""
        return self._event is not None

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host
