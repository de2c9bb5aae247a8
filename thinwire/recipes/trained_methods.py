"""Methods in training: what a recipe adds to a method's own settings.

density_warmup   densities of the first epochs, one each, before `density`; 1.0 is dense
dense_epochs     how many epochs come first in which nothing is compressed
adam_scale       settings of tw.AdamScale around the method, such as { limit = 3 }; dense_epochs then say how long its start is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.methods import Method
from thinwire.tools.methods import build_method, check_settings, find_preset
from thinwire.tools.settings.building import Plain, build
from thinwire.validate import check_instance, check_positive_int

WARMUP = "density_warmup"
DENSE_EPOCHS = "dense_epochs"
ADAM_SCALE = "adam_scale"


def own_settings(name: str) -> list[str]:
    """Those of the above that make sense for a method."""
    preset = find_preset(name)
    warmup = [WARMUP] if preset.takes("density") else []
    return warmup if preset.kind is tw.Dense else [*warmup, DENSE_EPOCHS, ADAM_SCALE]


def takes(name: str, setting: str) -> bool:
    return find_preset(name).takes(setting) or setting in own_settings(name)


def check_trained(names: Sequence[str], settings: Plain) -> None:
    """Refuse a setting that none of the methods has, in training."""
    also = dict.fromkeys(setting for name in names for setting in own_settings(name))
    check_settings(names, settings, list(also))


def build_trained(
    name: str, settings: Plain, *, steps_per_epoch: int = 1, clip_norm: float | None = None
) -> Method:
    """The method of that name as it is trained with.

    A method that owns momentum accumulates local gradients, so `clip_norm` goes to it: clipping the average would be
    too late. Its limit is then per worker, clip_norm / sqrt(workers), as in DGC's paper.
    """
    values = dict(settings)
    densities, dense_epochs = values.pop(WARMUP, None), values.pop(DENSE_EPOCHS, None)
    adam = values.pop(ADAM_SCALE, None)
    method = build_method(name, values)
    changes: dict[str, Any] = {}
    if densities:
        if isinstance(densities, str) or not isinstance(densities, Sequence):
            raise UsageError(
                f"{WARMUP} is {densities!r}; it must be a list of densities, one per epoch"
            )
        final: Any = vars(method)["density"]
        changes["density"] = tw.warmup(densities, final=final, every=steps_per_epoch)
    if (
        adam is None
        and clip_norm is not None
        and method.owns_momentum
        and getattr(method, "clip", None) is None
    ):
        if not find_preset(name).takes("clip"):
            raise UsageError(
                f"clip_norm is {clip_norm!r}, but {name} accumulates momentum before the exchange and has no clip of its own"
            )
        changes["clip"] = tw.memory.Clip(norm=clip_norm, by_workers=True)
    method = replace(method, **changes)
    if dense_epochs is not None:
        check_positive_int(DENSE_EPOCHS, dense_epochs)
    if adam is not None and clip_norm is not None:
        raise UsageError(
            f"clip_norm is {clip_norm!r}, but with adam_scale it would cut what arrives, which is lost; say clip_norm = 'none'"
        )
    if adam is not None:
        return in_adams_scale(method, adam, dense_epochs, steps_per_epoch)
    if dense_epochs is None:
        return method
    return tw.Timeline(phases=((0, tw.Dense()), (dense_epochs * steps_per_epoch, method)))


def in_adams_scale(
    method: Method, settings: Any, dense_epochs: int | None, steps_per_epoch: int
) -> Method:
    """tw.AdamScale around a method, from plain values."""
    check_instance(ADAM_SCALE, settings, Mapping, "a table, such as { limit = 3 }, or {}")
    around = tw.AdamScale(method=method)
    if dense_epochs is not None:
        around = replace(around, start=dense_epochs * steps_per_epoch)
    return build(tw.AdamScale, settings, where=ADAM_SCALE, base=around)
