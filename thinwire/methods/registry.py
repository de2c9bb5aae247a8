"""Registry: the names that methods have on the command line, and the options they share there."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from thinwire.errors import UsageError
from thinwire.memory.residual import Residual
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.adtopk import ADTopK
from thinwire.methods.base import Dense, Method
from thinwire.methods.chunktopk import ChunkTopK
from thinwire.methods.dgc import DGC
from thinwire.methods.exclusive import ExclusiveTopK
from thinwire.methods.gaussiank import GaussianK
from thinwire.methods.gtopk import GTopK
from thinwire.methods.oktopk import OkTopK
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.randomk import RandomK
from thinwire.methods.redsync import RedSync
from thinwire.methods.sidco import SIDCo
from thinwire.methods.signsgd import SignSGD
from thinwire.methods.threshold import Threshold
from thinwire.methods.topk import TopK
from thinwire.methods.topka import TopKA
from thinwire.methods.topkdsa import TopKDSA
from thinwire.select.rows import Axis


class Preset:
    """A method class and the settings its name stands for; shared options fill in the rest.

    `lr_scale` is what a recipe multiplies its learning rate with, for updates that are not of a gradient's size.
    """

    def __init__(self, kind: type[Method], *, lr_scale: float = 1.0, **fixed: Any) -> None:
        self.kind = kind
        self.lr_scale = lr_scale
        self.fixed = fixed

    def takes(self, option: str) -> bool:
        return option in {field.name for field in dataclasses.fields(self.kind)}


METHODS: dict[str, Preset] = {
    "dense": Preset(Dense),
    "topk": Preset(TopK),
    "adtopk": Preset(ADTopK),
    "adtopk-interleave": Preset(ADTopK, interleave=2),
    "adtopk-threshold": Preset(ADTopK, interleave=2, threshold=True),
    "dgc": Preset(DGC),
    "gaussiank": Preset(GaussianK),
    "redsync": Preset(RedSync),
    "redsync-trimmed": Preset(RedSync, trimmed=True),
    "sidco": Preset(SIDCo),
    "randomk": Preset(RandomK),
    "threshold": Preset(Threshold, threshold=0.002),
    "chunktopk": Preset(ChunkTopK, chunk=16),
    # A vote is +1 or -1, hundreds of times a gradient.
    "signsgd": Preset(SignSGD, lr_scale=0.002),
    "efsignsgd": Preset(SignSGD, memory=Residual()),
    "oktopk": Preset(OkTopK),
    "oktopk-published": Preset(OkTopK, thresholds="published"),
    "exclusive": Preset(ExclusiveTopK),
    "gtopk": Preset(GTopK),
    "gtopk-conserve": Preset(GTopK, conserve=True),
    "topkdsa": Preset(TopKDSA),
    "topka": Preset(TopKA),
    "powersgd": Preset(PowerSGD),
    "acpsgd": Preset(ACPSGD),
}
"""One line per name, in the order in which they are listed to the user."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What can be set for any method that has it; None leaves the method's own default.

    Each field has the name of a field of the methods that take it.
    """

    density: float | None = None
    values: str | None = None
    axis: Axis | None = None
    rank: int | None = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def find_preset(name: str) -> Preset:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"method is {name!r}; it must be one of {', '.join(METHODS)}{hint}")
    return METHODS[name]


def parse_names(text: str) -> list[str]:
    """Method names with commas between them; "all" is every one."""
    if text.strip() == "all":
        return list(METHODS)
    names = [name.strip() for name in text.split(",")]
    return names if any(names) else []


def build_method(name: str, options: MethodOptions) -> Method:
    """The method of that name with the options it takes; the others do not concern it."""
    preset = find_preset(name)
    chosen = {key: value for key, value in options.given().items() if preset.takes(key)}
    return preset.kind(**{**preset.fixed, **chosen})
