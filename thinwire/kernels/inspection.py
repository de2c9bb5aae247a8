"""The first look at a group's gradients: are they finite, and did each slot get one at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.kernels.cuda.bucket import (
    Poison,
    cut_slots,
    drop_non_finite,
    find_non_finite,
    inspect_slots,
)
from thinwire.kernels.cuda.source import FLOAT_CODES
from thinwire.kernels.cuda.toolchain import has_kernels
from thinwire.layout import BucketLayout, Group
from thinwire.wire.codec import Flags


def inspect(group: Group, bucket_flat: Tensor) -> tuple[Flags, list[Tensor]]:
    """(flags, the group's pieces of the bucket with non-finite elements replaced by 0). Kernels replace them in the bucket."""
    pieces = group.pieces(bucket_flat)
    if bucket_flat.dtype in FLOAT_CODES and has_kernels(bucket_flat.device):
        if group not in _parts:
            _parts[group] = cut_slots(group)
        largest = inspect_slots(bucket_flat, _parts[group], len(group.slots))
        return _flags(largest), pieces
    return inspect_pieces(pieces)


_parts: WeakKeyDictionary[Group, Tensor] = WeakKeyDictionary()


def inspect_pieces(pieces: Sequence[Tensor]) -> tuple[Flags, list[Tensor]]:
    """The same in plain torch.

    A maximum is NaN or infinite exactly if an element is, and zero exactly if the slot got no gradient.
    """
    flags = _flags(_largest(pieces))
    if flags.non_finite.device.type == "cpu" and not bool(flags.non_finite):
        return flags, list(pieces)
    return flags, [torch.where(piece.isfinite(), piece, 0.0) for piece in pieces]


def is_any_non_finite(group: Group, update: Tensor, bucket_flat: Tensor) -> Tensor:
    """bool []: the group's delivered update has an element that is NaN or infinite."""
    if (
        update.dtype == bucket_flat.dtype
        and update.dtype in FLOAT_CODES
        and has_kernels(update.device)
    ):
        return find_non_finite(update)
    # A cast to a narrower dtype can overflow, so what was delivered counts.
    return ~_largest(group.pieces(bucket_flat)).isfinite().all()


def holds_non_finite(flat: Tensor) -> Tensor:
    """bool []: an element is NaN or infinite. `isfinite` makes four tensors on the way to that."""
    if flat.dtype in FLOAT_CODES and flat.is_contiguous() and has_kernels(flat.device):
        return find_non_finite(flat)
    return ~flat.isfinite().all()


def drop_if_bad(flat: Tensor, bad: Tensor) -> None:
    """Elements that are not finite become 0 if `bad` (bool []) is up."""
    if flat.dtype in FLOAT_CODES and has_kernels(flat.device):
        drop_non_finite(flat, bad)
    elif flat.device.type != "cpu":
        flat.copy_(torch.where(bad, torch.nan_to_num(flat, 0.0, 0.0, 0.0), flat))
    elif bool(bad):
        torch.nan_to_num(flat, 0.0, 0.0, 0.0, out=flat)


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """bool []: at least one of some flags, in as few operations as possible."""
    if len(flags) <= 2:
        return flags[0] if len(flags) == 1 else flags[0] | flags[1]
    return torch.stack(list(flags)).any()


def prepare_poison(layout: BucketLayout) -> Callable[[Tensor, Tensor], None]:
    """What makes a bucket of this layout not-a-number everywhere if a flag (bool []) is up, so that every rank skips the step."""
    if layout.dtype in FLOAT_CODES and has_kernels(layout.device):
        return Poison(layout)

    def poison(flat: Tensor, bad: Tensor) -> None:
        if flat.device.type != "cpu" or bool(bad):
            for begin, count in layout.buffers:
                flat[begin : begin + count] += torch.where(bad, torch.nan, 0.0).to(flat.dtype)

    return poison


def _largest(pieces: Sequence[Tensor]) -> Tensor:
    """[pieces]: the largest magnitude of each, NaN if it holds one."""
    if pieces[0].device.type != "cpu":
        return torch.stack(list(torch._foreach_norm(list(pieces), torch.inf)))
    # Many times faster there than a norm, which is not vectorised.
    lows, highs = zip(*(piece.aminmax() for piece in pieces), strict=True)
    return torch.maximum(torch.stack(highs), -torch.stack(lows))


def _flags(largest: Tensor) -> Flags:
    return Flags(non_finite=holds_non_finite(largest), had_gradient=largest != 0)
