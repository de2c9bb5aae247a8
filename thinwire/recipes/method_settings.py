"""Method settings: a method from plain values, as files and the command line have them.

Any field of the method can be set. A field that holds a part (memory, exchange, clip) takes a table of the part's own
fields, with `kind` for another part: `memory = { masking = false }`, `exchange = { kind = "SplitReduce" }`. Two
settings are the recipe's own:

    density_warmup   densities of the first epochs, one each, before `density`; 1.0 is dense
    dense_epochs     how many epochs come first in which nothing is compressed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import torch

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.methods.base import Dense, Method
from thinwire.methods.registry import METHODS, Preset, find_preset
from thinwire.recipes.names import hint
from thinwire.validate import check_instance, check_positive_int

Plain = Mapping[str, Any]
WARMUP = "density_warmup"
DENSE_EPOCHS = "dense_epochs"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def takes(preset: Preset, setting: str) -> bool:
    if setting == DENSE_EPOCHS:
        return preset.kind is not Dense
    return preset.takes("density" if setting == WARMUP else setting)


def check_shared(names: Sequence[str], settings: Plain) -> None:
    """Refuse names that are wrong or come twice, and a setting that none of the methods has."""
    if not names:
        raise UsageError(f"methods is empty; name at least one of {', '.join(METHODS)}")
    for name in names:
        check_instance("method", name, str, f"one of {', '.join(METHODS)}")
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"methods names {twice!r} twice; name each method once")
    presets = [find_preset(name) for name in names]
    for setting, value in settings.items():
        if not any(takes(preset, setting) for preset in presets):
            who = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
            what = "no such setting" if len(names) == 1 else "such a setting"
            near = hint(setting, field_names(presets))
            raise UsageError(f"{setting} is {value!r}, but {who} has {what}{near}")


def check_own(name: str, settings: Plain) -> None:
    """Refuse a setting that a method does not have."""
    preset = find_preset(name)
    for setting, value in settings.items():
        if not takes(preset, setting):
            raise UsageError(
                f"{setting} is {value!r}, but {name} has no such setting{hint(setting, field_names([preset]))}"
            )


def field_names(presets: Iterable[Preset]) -> list[str]:
    kinds = {preset.kind for preset in presets}
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    own = [WARMUP, DENSE_EPOCHS] if "density" in names else [DENSE_EPOCHS]
    return [*names, *own]


def build_method(
    name: str, settings: Plain, *, steps_per_epoch: int = 1, clip_norm: float | None = None
) -> Method:
    """The method of that name with these settings, all of which it has.

    A method that owns momentum accumulates local gradients, so `clip_norm` goes to it: clipping the average would be
    too late. Its limit is then per worker, clip_norm / sqrt(workers), as in DGC's paper.
    """
    preset = find_preset(name)
    values = {**preset.fixed, **settings}
    epochs, dense_epochs = values.pop(WARMUP, None), values.pop(DENSE_EPOCHS, None)
    built = {setting: build_value(preset, setting, value) for setting, value in values.items()}
    method = preset.kind(**built)
    changes: dict[str, Any] = {}
    if epochs:
        check_warmup(epochs)
        final: Any = vars(method)["density"]
        changes["density"] = tw.warmup(epochs, final=final, every=steps_per_epoch)
    if clip_norm is not None and method.owns_momentum and getattr(method, "clip", None) is None:
        if not preset.takes("clip"):
            raise UsageError(
                f"clip_norm is {clip_norm!r}, but {name} accumulates momentum before the exchange and has no clip of its own"
            )
        changes["clip"] = tw.Clip(norm=clip_norm, by_workers=True)
    method = replace(method, **changes)
    if dense_epochs is None:
        return method
    check_positive_int(DENSE_EPOCHS, dense_epochs)
    phases = ((0, Dense()), (dense_epochs * steps_per_epoch, method))
    return tw.Timeline(phases=phases)


def check_warmup(densities: Any) -> None:
    if isinstance(densities, str) or not isinstance(densities, Sequence):
        raise UsageError(
            f"{WARMUP} is {densities!r}; it must be a list of densities, one per epoch"
        )


def build_value(preset: Preset, setting: str, value: Any) -> Any:
    """A field's value; the method itself judges it."""
    if setting == "dtype" and value in DTYPES:
        return DTYPES[value]
    if not isinstance(value, Mapping):
        return value
    field = next(field for field in dataclasses.fields(preset.kind) if field.name == setting)
    default = preset.fixed.get(setting, default_of(field))
    return build_part(setting, value, default, part_type(preset.kind, setting))


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def part_type(kind: type[Method], setting: str) -> type | None:
    """The class of the part that a field holds, if it holds one."""
    annotation = get_type_hints(kind)[setting]
    candidates = [annotation, *get_args(annotation)]
    return next(
        (c for c in candidates if isinstance(c, type) and dataclasses.is_dataclass(c)), None
    )


def build_part(setting: str, values: Plain, default: Any, annotated: type | None) -> Any:
    """A part from its own fields: the default with some of them changed, or another kind."""
    fields = {key: value for key, value in values.items() if key != "kind"}
    if "kind" in values:
        kind = getattr(tw, str(values["kind"]), None)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise UsageError(
                f"{setting}.kind is {values['kind']!r}; it must be the name of a part of thinwire, such as Residual"
            )
        default = None
    else:
        kind = type(default) if dataclasses.is_dataclass(default) else annotated
    if kind is None:
        raise UsageError(
            f"{setting} is {dict(values)!r}; it holds no part with settings of its own"
        )
    known = [field.name for field in dataclasses.fields(kind)]
    for key in fields:
        if key not in known:
            raise UsageError(
                f"{setting}.{key} is no setting of {kind.__name__}, which has {', '.join(known)}{hint(key, known)}"
            )
    return kind(**fields) if default is None else replace(default, **fields)
