"""What is trained, how, and where: frozen and validated. The sections of a settings file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from thinwire.errors import UsageError
from thinwire.lab.rates import UNSHAPED, parse_rate
from thinwire.tools.methods import METHODS  # noqa: F401 (shown in a field's text)
from thinwire.tools.settings.building import check_fields
from thinwire.tools.settings.fields import EITHER_WAY
from thinwire.tools.settings.kinds import (
    AboveZero,
    Count,
    Folder,
    NewFile,
    NotNegative,
    Positive,
    PositiveNumber,
    Ranks,
)
from thinwire.validate import check_instance

if TYPE_CHECKING:
    from thinwire.recipes.tasks import Task


LONGEST_TIMEOUT = 365 * 24 * 3600


def check_listed(name: str, value: Any) -> None:
    check_instance(f"task.{name}", value, str, "a name of --list")


Listed = Annotated[str, check_listed]
AUTO = "auto"


def check_link(name: str, value: Any) -> None:
    check_instance(name, value, str, f"a rate such as 50mbit, or {AUTO!r}")
    if value == UNSHAPED:
        raise UsageError(f"{name} is {value!r}; it must be a rate such as 50mbit, or {AUTO!r}")
    if value != AUTO:
        parse_rate(value, name)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where data comes from."""

    data_dir: Folder | None = None
    """Where the data sets are, in their official layouts; THINWIRE_DATA unless given."""
    download: bool = False
    """Fetch missing files from their official place, and check them."""
    synthetic: bool = False
    """Random data of the right shape instead of real data."""
    tiny: bool = False
    """The same code with a two-layer model on little data."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Choice(DataOptions):
    """Which task: its name, or data and model; and where the data comes from."""

    name: Listed | None = None
    data: Listed | None = None
    """A data set of --list; with --model, in place of TASK."""
    model: Listed | None = None
    """A model of --list; with --data, in place of TASK."""

    def find(self) -> Task:
        from thinwire.recipes.tasks import compose, find_task

        if self.name is not None:
            if self.data is not None or self.model is not None:
                raise UsageError(
                    f"task is {self.name!r} with data {self.data!r} and model {self.model!r}; name the task or both parts"
                )
            return find_task(self.name)
        if self.data is None and self.model is None:
            raise UsageError(
                "missing argument 'TASK'; name one, or --data and --model (--list shows what there is)"
            )
        if self.data is None or self.model is None:
            raise UsageError(
                f"data is {self.data!r} and model is {self.model!r}; name both, or a task"
            )
        return compose(self.data, self.model)

    @property
    def label(self) -> str:
        return self.name or f"{self.data}-{self.model}"

    @property
    def parts(self) -> dict[str, str]:
        """What the task was called by."""
        named = {"name": self.name, "data": self.data, "model": self.model}
        return {key: value for key, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a task is trained, the same for every method."""

    epochs: Positive
    """Passes over the data."""
    batch_size: Positive
    """Examples per worker and micro-batch."""
    accumulate: Positive = 1
    """Micro-batches per step (DGC's num_batches_per_step: the GPUs of one machine)."""
    lr: Annotated[AboveZero, "RATE"]
    """Peak learning rate, before lr_scaling."""
    lr_scaling: Literal["none", "linear"] = "none"
    """linear: times workers x accumulate."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: NotNegative = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    """For adam and adamw."""
    eps: AboveZero = 1e-8
    """For adam and adamw."""
    weight_decay: NotNegative = 0.0
    decay_norms: bool = True
    """Whether biases and the parameters of norms decay too."""
    schedule: Literal["constant", "cosine", "multistep", "linear", "exponential", "plateau"] = (
        "cosine"
    )
    """What follows the warm-up; cosine and linear end at zero with the last step."""
    milestones: tuple[int, ...] = ()
    """Epochs at which multistep multiplies the rate by gamma."""
    gamma: AboveZero = 0.1
    """Factor of multistep, exponential (per epoch) and plateau."""
    patience: Positive = 3
    """Epochs without a better score before plateau multiplies the rate by gamma."""
    warmup_steps: Count = 0
    """The learning rate first rises linearly over so many steps."""
    warmup_epochs: NotNegative = 0.0
    """The same in epochs; at most one of the two is given."""
    clip_norm: PositiveNumber | None = None
    """Largest norm of the averaged gradient; None: not clipped."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The dtype of autocast; fp16 comes with a GradScaler."""
    channels_last: Annotated[bool, EITHER_WAY] = False
    """Images and convolutions in that memory format, which is faster on most GPUs; --no-channels-last turns it off."""
    seed: Count = 0
    """Seed of the initial parameters, the order of the examples, augmentation and dropout."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.betas) != 2:
            raise UsageError(f"betas is {self.betas!r}; it must be two numbers")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"betas is {self.betas!r}; both must be in [0, 1)")
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov is True, which needs a momentum above 0")
        if self.warmup_steps and self.warmup_epochs:
            raise UsageError(
                f"warmup_steps is {self.warmup_steps} and warmup_epochs is {self.warmup_epochs}; give only one of them"
            )


@dataclass(frozen=True, kw_only=True)
class Running:
    """Where a job runs, how far, and what it leaves behind."""

    workers: Ranks = 4
    """Processes on this machine, one per data-parallel worker; under torchrun as many as it started."""
    simulate_workers: Ranks | None = None
    """Data-parallel workers in one process instead."""
    graph: bool = False
    """Replay each simulated worker's forward and backward as a CUDA graph, where that works."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if every process of this machine has a GPU of its own, else the CPU."""
    link: Annotated[str | None, check_link, "RATE"] = None
    """Join the workers by emulated links, such as 50mbit, as root on Linux; auto: 50mbit where that is possible. The workers then
    compute on the CPU unless --device says cuda."""
    steps: Positive | None = None
    """Stop after so many optimisation steps; the learning rate is still that of all epochs."""
    checkpoint_every: Positive | None = None
    """Save everything every so many steps."""
    deterministic: bool = False
    """Repeat every bit, also after --resume: sums in the order of the workers, deterministic kernels."""
    tensorboard: bool = False
    """Write TensorBoard's event files beside metrics.jsonl."""
    wandb: bool = False
    """Curves in Weights & Biases; WANDB_MODE=offline keeps them in the run folder."""
    mlflow: bool = False
    """Curves in MLflow: at MLFLOW_TRACKING_URI, or in the run folder."""
    timeout: Annotated[PositiveNumber, "SECONDS"] = 300.0
    """A worker that the others have waited for so long is given up, and the job ends."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.graph and self.simulate_workers is None:
            raise UsageError("graph is True, which goes only with simulate_workers")
        if self.timeout > LONGEST_TIMEOUT:
            raise UsageError(
                f"timeout is {self.timeout:g}; it must be at most {LONGEST_TIMEOUT}, a year of seconds"
            )

    @property
    def processes(self) -> int:
        return self.workers if self.simulate_workers is None else 1

    @property
    def world(self) -> int:
        """Data-parallel workers, real or simulated."""
        return self.simulate_workers or self.workers


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a comparison runs: each method at each density from each seed."""

    methods: tuple[str, ...] = ("dense", "topk", "adtopk")
    """Some of {METHODS}, with commas, or all; your own as module:attribute."""
    densities: Annotated[tuple[float, ...], "--density", "FRACTIONS"] = ()
    """Fractions of the entries sent, with commas; each method's own unless given."""
    seeds: Annotated[tuple[int, ...] | None, "--seed", "NUMBERS"] = None
    """With commas; each for every method. The task's own unless given."""
    target: Annotated[float | None, "SCORE"] = None
    """Also show after how many seconds in training steps a test was this good, such as 0.95."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class SettingsFiles:
    """Settings that are not options of their own. Not a section of a file."""

    config: Annotated[list[str], "FILES"] = field(default_factory=list)
    """TOML or YAML, or a name of --list; several with commas, later ones win."""
    set_: Annotated[list[str], "NAME=VALUE"] = field(default_factory=list)
    """Any setting, such as training.lr=0.1."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Settings with several values: every combination is a job of its own. Not a section of a file."""

    sweep: Annotated[list[str], "NAME=VALUES"] = field(default_factory=list)
    """Any setting, such as training.lr=0.1,0.2; several times for all combinations."""
    seeds: Annotated[tuple[int, ...], "NUMBERS"] = ()
    """Each combination from each of these seeds."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Where a job's files go, and what is done with those that are there. Not a section of a file."""

    out: Folder | None = None
    """Run folder; runs/... unless given."""
    suffix: Annotated[str, "TEXT"] = ""
    """Behind the run folder's own name."""
    resume: bool = False
    """Go on with what is in --out."""
    evaluate: bool = False
    """Only test what --resume finds."""
    ledger: NewFile | None = None
    """Write the traffic per worker, method and phase there, as CSV."""

    def __post_init__(self) -> None:
        check_fields(self)
