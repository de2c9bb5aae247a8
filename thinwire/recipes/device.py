"""Device: where this process computes, and how strictly."""

from __future__ import annotations

import os

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.recipes.config import Running
from thinwire.recipes.examples import Batch

IMAGE_DIMS = 4
"""What channels_last is defined for: [N, C, H, W]."""


def choose_device(running: Running) -> torch.device:
    """A GPU of this process's own if it is to have one, else the CPU."""
    # Hosts of a lab are one machine, though each looks like one of its own.
    if running.device == "cpu" or (running.device == "auto" and running.link is not None):
        return torch.device("cpu")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", running.processes))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < processes:
        if running.device == "cuda":
            raise UsageError(
                f"device is 'cuda', but this machine has {gpus} GPUs for {processes} processes; use fewer workers, "
                "--simulate-workers or --device cpu"
            )
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def place_model(
    model: nn.Module, device: torch.device, memory_format: torch.memory_format
) -> nn.Module:
    """The model on the device, its convolutions in that format; before anything looks at its parameters."""
    if memory_format is torch.channels_last and not any(
        parameter.ndim == IMAGE_DIMS for parameter in model.parameters()
    ):
        raise UsageError(
            "channels_last is True, but the model has no convolution over images; leave it out"
        )
    placed: nn.Module = model.to(device, memory_format=memory_format)  # type: ignore[call-overload]
    return placed


def place_batch(batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
    """A batch where the model is, its images in the model's format."""
    return tuple(
        column.to(device, non_blocking=True, memory_format=memory_format)
        if column.ndim == IMAGE_DIMS
        else column.to(device, non_blocking=True)
        for column in batch
    )


def prefer_determinism(wanted: bool) -> None:
    """Kernels that give the same bits every time, or on CUDA those that a first measurement finds fastest."""
    torch.backends.cudnn.benchmark = not wanted
    if wanted:
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
