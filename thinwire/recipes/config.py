"""How a task is trained, and where it runs: frozen and validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from thinwire.errors import UsageError
from thinwire.validate import (
    check_bool,
    check_choice,
    check_finite_number,
    check_positive_int,
    check_positive_number,
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a task is trained, the same for every method."""

    epochs: int
    batch_size: int
    """Examples per worker and micro-batch."""
    accumulate: int = 1
    """Micro-batches per step (DGC's num_batches_per_step: the GPUs of one machine)."""
    lr: float
    """Peak learning rate, before `lr_scaling`."""
    lr_scaling: Literal["none", "linear"] = "none"
    """linear: times workers x accumulate."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    """Of adam and adamw."""
    eps: float = 1e-8
    """Of adam and adamw."""
    weight_decay: float = 0.0
    decay_norms: bool = True
    """Whether biases and the parameters of norms decay too."""
    schedule: Literal["constant", "cosine", "multistep", "linear", "exponential", "plateau"] = (
        "cosine"
    )
    """What follows the warm-up; cosine and linear end at zero with the last step."""
    milestones: tuple[int, ...] = ()
    """Epochs at which multistep multiplies the rate by `gamma`."""
    gamma: float = 0.1
    """Of multistep, of exponential (per epoch) and of plateau."""
    patience: int = 3
    """Epochs without a better score before plateau multiplies the rate by `gamma`."""
    warmup_steps: int = 0
    warmup_epochs: float = 0.0
    """The learning rate first rises linearly over so many steps or epochs; at most one of the two is given."""
    clip_norm: float | None = None
    """Largest norm of the averaged gradient; None: not clipped."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast's; fp16 comes with a GradScaler."""
    channels_last: bool = False
    """Keep images and the weights of convolutions in torch.channels_last, which is faster on most GPUs; the values are the same."""
    seed: int = 0
    """Of the initial parameters, the order of the examples, augmentation and dropout."""

    def __post_init__(self) -> None:
        for name in ("betas", "milestones"):
            check_numbers(name, getattr(self, name))
            # Files have lists.
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.betas) != 2:
            raise UsageError(f"betas is {self.betas!r}; it must be two numbers")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"betas is {self.betas!r}; both must be in [0, 1)")
        for name in ("epochs", "batch_size", "accumulate", "patience"):
            check_positive_int(name, getattr(self, name))
        for name in ("lr", "gamma", "eps"):
            check_finite_number(name, getattr(self, name))
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be above 0")
        for name in ("warmup_steps", "seed"):
            check_count(name, getattr(self, name))
        for name in ("momentum", "weight_decay", "warmup_epochs"):
            check_finite_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be 0 or more")
        for name in ("lr_scaling", "optimizer", "schedule", "precision"):
            check_choice(name, getattr(self, name), get_args(get_type_hints(Training)[name]))
        for name in ("nesterov", "decay_norms", "channels_last"):
            check_bool(name, getattr(self, name))
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov is True, which needs a momentum above 0")
        if self.clip_norm is not None:
            check_positive_number("clip_norm", self.clip_norm)
        if self.warmup_steps and self.warmup_epochs:
            raise UsageError(
                f"warmup_steps is {self.warmup_steps} and warmup_epochs is {self.warmup_epochs}; give only one of them"
            )


@dataclass(frozen=True, kw_only=True)
class Running:
    """Where a job runs, how far, and what it leaves behind."""

    workers: int = 4
    """Processes, one per data-parallel worker; under torchrun as many as it started."""
    simulate_workers: int | None = None
    """Data-parallel workers in one process instead."""
    graph: bool = False
    """Replay each simulated worker's forward and backward as a CUDA graph, where that works."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if every process of this machine has a GPU of its own, else the CPU."""
    steps: int | None = None
    """Optimisation steps after which to stop; the learning rate is still that of all epochs."""
    checkpoint_every: int | None = None
    """Steps from one checkpoint to the next; None: none is written."""
    deterministic: bool = False
    """Sums in the order of the workers and deterministic kernels, so that a resumed run repeats every bit."""
    tensorboard: bool = False
    """Write TensorBoard's event files beside metrics.jsonl."""

    def __post_init__(self) -> None:
        for name in ("workers", "simulate_workers", "steps", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None or name == "workers":
                check_positive_int(name, value)
        check_choice("device", self.device, get_args(get_type_hints(Running)["device"]))
        check_bool("deterministic", self.deterministic)
        check_bool("tensorboard", self.tensorboard)
        check_bool("graph", self.graph)
        if self.graph and self.simulate_workers is None:
            raise UsageError("graph is True, which goes only with simulate_workers")

    @property
    def processes(self) -> int:
        return self.workers if self.simulate_workers is None else 1

    @property
    def world(self) -> int:
        """Data-parallel workers, real or simulated."""
        return self.simulate_workers or self.workers


def check_count(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{field} is {value!r}; it must be a whole number of at least 0")


def check_numbers(field: str, values: object) -> None:
    if not isinstance(values, list | tuple):
        raise UsageError(f"{field} is {values!r}; it must be a list of numbers")
    for value in values:
        check_finite_number(field, value)
