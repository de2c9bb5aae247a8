"""Job: a task trained with some methods, fully resolved; the same settings in a file give the same job again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from thinwire.errors import UsageError
from thinwire.methods import Method
from thinwire.recipes.config import Choice, Compared, DataOptions, Running, Training
from thinwire.recipes.optimizers import check_takeover
from thinwire.recipes.trained_methods import build_trained, check_trained, takes
from thinwire.tools.files import write_text
from thinwire.tools.methods import check_methods, expand_all, find_preset
from thinwire.tools.settings.building import NOTHING, build, drop_nothing, to_plain
from thinwire.tools.settings.sections import Settings
from thinwire.validate import check_instance

TRAIN_METHOD = "adtopk"


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
        return build_trained(
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
    methods: tuple[str, ...]
    densities: tuple[float, ...] = ()
    """For the methods that have a density; none leaves each its own."""
    seeds: tuple[int, ...]
    target: float | None = None
    """The score whose time is shown."""
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
        check_methods(self.methods)
        asked = {"density": self.densities[0]} if self.densities else {}
        check_trained(self.methods, {**self.shared, **asked})
        for name, settings in self.own.items():
            check_trained([name], settings)
        if not self.seeds:
            raise UsageError("seeds is empty; name at least one")
        for field, values in (("densities", self.densities), ("seeds", self.seeds)):
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise UsageError(f"{field} names {twice!r} twice; name each once")
        for cell in self.cells():
            method = cell.build_method(steps_per_epoch=1)
            # Said at attach as well, but then other cells may have been trained for hours.
            check_takeover(self.training, method)

    @property
    def source(self) -> DataOptions:
        return self.choice

    def cells(self) -> list[Cell]:
        """Every run, methods first; a name says only what tells it from the others."""
        return [
            self._cell(method, density, seed)
            for method in self.methods
            for density in (self.densities if takes(method, "density") else ()) or (None,)
            for seed in self.seeds
        ]

    def _cell(self, method: str, density: float | None, seed: int) -> Cell:
        settings = {key: value for key, value in self.shared.items() if takes(method, key)}
        if density is not None:
            settings["density"] = density
        settings.update(self.own.get(method, {}))
        label = method
        if density is not None and len(self.densities) > 1:
            label += f"@{density:g}"
        if len(self.seeds) > 1:
            label += f"#{seed}"
        training = replace(self.training, seed=seed)
        about = {
            "task": self.choice.parts,
            "synthetic": self.source.synthetic,
            "tiny": self.source.tiny,
            "method": method,
            "settings": settings,
            "training": to_plain(training),
            "workers": self.running.world,
            "steps": self.running.steps,
        }
        if self.running.link is not None:
            about["link"] = self.running.link
        # As it comes back from a file.
        about = json.loads(json.dumps(about))
        return Cell(label=label, method=method, settings=settings, training=training, about=about)

    def to_settings(self) -> Settings:
        """The resolved settings, which give the same job again."""
        task = {key: value for key, value in to_plain(self.choice).items() if value}
        settings: Settings = {
            "task": {**self.choice.parts, **task},
            "method": dict(self.shared),
            "methods": {name: dict(values) for name, values in self.own.items()},
            "training": to_plain(self.training),
            "run": drop_nothing(to_plain(self.running)),
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
            if self.target is not None:
                settings["compare"]["target"] = self.target
        return settings


def build_job(command: Literal["train", "compare"], settings: Settings, **places: Any) -> Job:
    """A job from composed settings; `places` are what is not part of them: out, resume, evaluate, ledger."""
    choice = build(Choice, settings.get("task", {}), where="task")
    training = build_training(choice.find().training, settings.get("training", {}))
    compared = build(Compared, settings.get("compare", {}), where="compare")
    shared = drop_nothing(settings.get("method", {}))
    name = shared.pop("name", TRAIN_METHOD)
    find_preset(name)
    if command == "train":
        compared = Compared(methods=(name,))
    return Job(
        command=command,
        choice=choice,
        methods=tuple(expand_all(compared.methods)),
        densities=compared.densities,
        seeds=(training.seed,) if compared.seeds is None else compared.seeds,
        target=compared.target,
        shared=shared,
        own={key: build_own(key, value) for key, value in settings.get("methods", {}).items()},
        training=training,
        running=build(Running, settings.get("run", {}), where="run"),
        **places,
    )


def build_training(default: Training, values: Mapping[str, Any]) -> Training:
    """The task's training with some fields replaced."""
    given = drop_nothing(values)
    # Whoever gives one kind of warm-up replaces the other.
    for one, other in (("warmup_steps", "warmup_epochs"), ("warmup_epochs", "warmup_steps")):
        if one in given and other not in given:
            given[other] = 0
    return build(Training, given, where="training", base=default)


def build_own(method: str, values: Any) -> dict[str, Any]:
    check_instance(f"methods.{method}", values, Mapping, "a section of settings")
    return drop_nothing(values)


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


PLACES = ("out", "resume", "evaluate", "ledger")
"""What is not part of a job's settings."""


def write_job(path: Path, job: Job) -> None:
    places = {name: getattr(job, name) for name in PLACES}
    content = {"command": job.command, "settings": job.to_settings(), "places": places}
    write_text(path, json.dumps(content, default=str))


def read_job(path: Path) -> Job:
    content = json.loads(path.read_text())
    places = content["places"]
    for name in ("out", "ledger"):
        places[name] = None if places[name] is None else Path(places[name])
    return build_job(content["command"], content["settings"], **places)
