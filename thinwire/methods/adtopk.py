"""ADTopK = AllDimensionTopK + Residual + AllGatherFast.

Ming et al., "ADTopk: All-Dimension Top-k Compression for High-Performance Data-Parallel DNN Training" (HPDC'24).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.methods.base import Sparsifier
from thinwire.select.base import Selector
from thinwire.select.rows import Axis
from thinwire.select.topk import AllDimensionTopK
from thinwire.validate import check_axis


@dataclass(frozen=True, kw_only=True)
class ADTopK(Sparsifier):
    """Top-k inside every row or fibre, so that every dimension contributes."""

    axis: Axis = "auto"
    """"auto" chooses by the kind of layer, "published" takes axis 1 always, a number is taken as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_axis("axis", self.axis)

    def selector(self) -> Selector:
        return AllDimensionTopK(self.density, self.axis)
