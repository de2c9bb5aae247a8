"""Precision: autocast and the loss scale that goes with it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """What one run computes in. The scaler is a null object (not enabled) unless it is fp16."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        self._type = TYPES.get(name)
        self._device = device

    def autocast(self) -> AbstractContextManager[object]:
        if self._type is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._type)
