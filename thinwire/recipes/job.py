"""Job: a task trained with some methods, fully resolved; the same settings in a file give the same job again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thinwire.errors import UsageError
from thinwire.methods.base import Method
from thinwire.methods.registry import find_preset
from thinwire.observe.files import write_text
from thinwire.recipes.config import Running, Training, check_count, check_numbers
from thinwire.recipes.examples import DataOptions
from thinwire.recipes.method_settings import build_method, check_own, check_shared, takes
from thinwire.recipes.optimizers import check_frozen_adam
from thinwire.recipes.settings import Settings, check_names
from thinwire.recipes.tasks import Task, compose, find_task
from thinwire.validate import check_instance

TRAIN_METHOD = "adtopk"
COMPARE_METHODS = ("dense", "topk", "adtopk")
NOTHING = "none"
"""How a file says None where a task has something."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which task: its name, or data and model."""

    name: str | None = None
    data: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        for field, value in drop_nothing(vars(self)).items():
            check_instance(f"task.{field}", value, str, "a name of --list")

    def find(self) -> Task:
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


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a job: a method at a density from a seed."""

    label: str
    method: str
    settings: Mapping[str, Any]
    """The method's, as plain values."""
    training: Training
    about: Mapping[str, Any]
    """All that decides what the run computes, as plain values; `steps` among it, up to where."""

    def build_method(self, steps_per_epoch: int) -> Method:
        return build_method(
            self.method,
            self.settings,
            steps_per_epoch=steps_per_epoch,
            clip_norm=self.training.clip_norm,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One task trained once with each of some methods, densities and seeds."""

    command: Literal["train", "compare"]
    choice: Choice
    source: DataOptions
    methods: tuple[str, ...]
    densities: tuple[float, ...] = ()
    """For the methods that have a density; none leaves each its own."""
    seeds: tuple[int, ...]
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of every method that has them."""
    own: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Settings of single methods."""
    training: Training
    running: Running
    out: Path
    """The run folder."""
    resume: bool = False
    evaluate: bool = False
    """Only test what was saved."""
    ledger: Path | None = None
    """Where every worker's traffic goes as CSV."""

    def __post_init__(self) -> None:
        check_shared(self.methods, self.shared)
        for name, settings in self.own.items():
            check_own(name, settings)
        if self.densities and not any(find_preset(name).takes("density") for name in self.methods):
            check_shared(self.methods, {"density": self.densities[0]})
        if not self.seeds:
            raise UsageError("seeds is empty; name at least one")
        for field, values in (("densities", self.densities), ("seeds", self.seeds)):
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise UsageError(f"{field} names {twice!r} twice; name each once")
        for cell in self.cells():
            method = cell.build_method(steps_per_epoch=1)
            # Said at attach as well, but then other cells may have been trained for hours.
            if method.owns_momentum and self.training.optimizer != "sgd":
                check_frozen_adam(self.training, method)

    def cells(self) -> list[Cell]:
        """Every run, methods first; a name says only what tells it from the others."""
        return [
            self._cell(method, density, seed)
            for method in self.methods
            for density in (self.densities if find_preset(method).takes("density") else ())
            or (None,)
            for seed in self.seeds
        ]

    def _cell(self, method: str, density: float | None, seed: int) -> Cell:
        preset = find_preset(method)
        settings = {key: value for key, value in self.shared.items() if takes(preset, key)}
        if density is not None:
            settings["density"] = density
        settings.update(self.own.get(method, {}))
        label = method
        if density is not None and len(self.densities) > 1:
            label += f"@{density:g}"
        if len(self.seeds) > 1:
            label += f"#{seed}"
        training = dataclasses.replace(self.training, seed=seed)
        about = {
            "task": drop_nothing(dataclasses.asdict(self.choice)),
            "synthetic": self.source.synthetic,
            "tiny": self.source.tiny,
            "method": method,
            "settings": settings,
            "training": plain(training),
            "workers": self.running.world,
            "steps": self.running.steps,
        }
        # As it comes back from a file.
        about = json.loads(json.dumps(about))
        return Cell(label=label, method=method, settings=settings, training=training, about=about)

    def to_settings(self) -> Settings:
        """The resolved settings, which give the same job again."""
        source = {key: value for key, value in plain(self.source).items() if value}
        settings: Settings = {
            "task": {**drop_nothing(dataclasses.asdict(self.choice)), **source},
            "method": dict(self.shared),
            "methods": {name: dict(values) for name, values in self.own.items()},
            "training": plain(self.training),
            "run": drop_nothing(plain(self.running)),
        }
        if self.training.clip_norm is None:
            settings["training"]["clip_norm"] = NOTHING
        if self.command == "train":
            settings["method"] = {"name": self.methods[0], **self.shared}
        else:
            settings["compare"] = {
                "methods": list(self.methods),
                "densities": list(self.densities),
                "seeds": list(self.seeds),
            }
        return settings


def build_job(command: Literal["train", "compare"], settings: Settings, **places: Any) -> Job:
    """A job from composed settings; `places` are what is not part of them: out, resume, evaluate, ledger."""
    task, compared = dict(settings.get("task", {})), drop_nothing(settings.get("compare", {}))
    choice = Choice(**{key: task.pop(key, None) for key in ("name", "data", "model")})
    source = build_source(task)
    found = choice.find()
    training = build_training(found.training, settings.get("training", {}))
    shared = drop_nothing(settings.get("method", {}))
    name = shared.pop("name", TRAIN_METHOD)
    check_names("compare", compared, ("methods", "densities", "seeds"))
    densities: list[float] = []
    methods, seeds = [name], [training.seed]
    if command == "compare":
        methods = as_list("compare.methods", compared.get("methods", COMPARE_METHODS))
        densities = as_list("compare.densities", compared.get("densities", ()))
        seeds = as_list("compare.seeds", compared.get("seeds", (training.seed,)))
        check_numbers("densities", densities)
        for seed in seeds:
            check_count("seeds", seed)
    running = settings.get("run", {})
    check_names("run", running, [field.name for field in dataclasses.fields(Running)])
    return Job(
        command=command,
        choice=choice,
        source=source,
        methods=tuple(methods),
        densities=tuple(densities),
        seeds=tuple(seeds),
        shared=shared,
        own={key: build_own(key, value) for key, value in settings.get("methods", {}).items()},
        training=training,
        running=Running(**drop_nothing(running)),
        **places,
    )


def build_source(values: Mapping[str, Any]) -> DataOptions:
    known = [field.name for field in dataclasses.fields(DataOptions)]
    check_names("task", values, ["name", "data", "model", *known])
    given = drop_nothing(values)
    if isinstance(given.get("data_dir"), str):
        given["data_dir"] = Path(given["data_dir"])
    return DataOptions(**given)


def build_training(default: Training, values: Mapping[str, Any]) -> Training:
    """The task's training with some fields replaced."""
    check_names("training", values, [field.name for field in dataclasses.fields(Training)])
    given = drop_nothing(values)
    if given.get("clip_norm") == NOTHING:
        given["clip_norm"] = None
    # Whoever gives one kind of warm-up replaces the other.
    for one, other in (("warmup_steps", "warmup_epochs"), ("warmup_epochs", "warmup_steps")):
        if one in given and other not in given:
            given[other] = 0
    return dataclasses.replace(default, **given)


def build_own(method: str, values: Any) -> dict[str, Any]:
    check_instance(f"methods.{method}", values, Mapping, "a section of settings")
    return drop_nothing(values)


def as_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name} is {value!r}; it must be a list")
    return list(value)


def drop_nothing(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def plain(value: Any) -> dict[str, Any]:
    """A dataclass of settings as plain values."""
    fields = dataclasses.asdict(value)
    return {key: str(one) if isinstance(one, Path) else one for key, one in fields.items()}


def first_difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """The first setting in which two runs differ, in words; None if they are the same."""
    for key in dict.fromkeys((*here, *there)):
        one, other = here.get(key), there.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            inner = first_difference(one, other)
            if inner is not None:
                return f"{key}.{inner}"
        elif one != other:
            return f"{key} is {one!r} now and was {other!r}"
    return None


def difference_but_steps(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """The same, whichever step each of them goes to."""
    return first_difference({**here, "steps": None}, {**there, "steps": None})


# -- for the workers -------------------------------------------------------------------------------------------


def write_job(path: Path, job: Job) -> None:
    content = {
        "command": job.command,
        "settings": job.to_settings(),
        "out": str(job.out),
        "resume": job.resume,
        "evaluate": job.evaluate,
        "ledger": None if job.ledger is None else str(job.ledger),
    }
    write_text(path, json.dumps(content))


def read_job(path: Path) -> Job:
    content = json.loads(path.read_text())
    ledger = content["ledger"]
    return build_job(
        content["command"],
        content["settings"],
        out=Path(content["out"]),
        resume=content["resume"],
        evaluate=content["evaluate"],
        ledger=None if ledger is None else Path(ledger),
    )
