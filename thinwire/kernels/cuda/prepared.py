"""PreparedKernels: the kernels of one codec on one group. Their launches are prepared once and started in every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.cuda.joint import Joint
from thinwire.kernels.cuda.launch import PreparedLaunch, Varying, fitting
from thinwire.kernels.cuda.source import FLOAT_CODES, Defines
from thinwire.kernels.cuda.structs import Row, layout_of
from thinwire.kernels.cuda.toolchain import toolchain_of
from thinwire.layout import Group
from thinwire.wire.codec import FIXED_WORDS, FLAGS_WORD, HAD_WORD, SLOT_WORDS, Codec
from thinwire.wire.fixed import PackedCode

ROW_WARPS = 4
"""Rows per block where one warp has a whole row, or a whole chunk of one."""
MOMENTUM_NAMES = ("u_before", "u", "u_ratio")
SCALE_NAMES = ("second_moment", "loss_scale")
BUCKET, MEMORY, PAYLOAD, RATIO = map(Varying, ("bucket", "memory", "payload", "ratio"))
BEFORE = Varying("before")
"""Memory before the step; the same buffer where it is changed in place."""
GATHERED, OUT = map(Varying, ("gathered", "out"))
STRIDE = Varying("stride", is_number=True)
USED, BAD, UNUSED = map(Varying, ("used", "bad", "unused"))
DENSE = Varying("dense")
"""Dense tensors in the same buffer, before the payload."""


def payload_defines(values: torch.dtype, gradients: torch.dtype, packed: bool) -> Defines:
    """For row.cuh: the floats of payload and bucket, whether indices are packed, and the words of the header."""
    return (
        ("VALUE_CODE", FLOAT_CODES[values]),
        ("GRADIENT_CODE", FLOAT_CODES[gradients]),
        ("PACKED", int(packed)),
        ("HEADER_FIXED", FIXED_WORDS),
        ("HEADER_FLAGS", FLAGS_WORD),
        ("HEADER_SLOT", SLOT_WORDS),
        ("HEADER_HAD", HAD_WORD),
        layout_of(Row),
    )


class PreparedKernels(ABC):
    """Encode, decode and give back. Buffers whose size shapes tell are made once."""

    dense_prefix = 0
    """Bytes of dense tensors that lie before the payload in what is sent."""
    summed = False
    """Whether they are summed on the way, and the payloads gathered by themselves."""

    def __init__(self, group: Group, codec: Codec, gradient_dtype: torch.dtype, world: int) -> None:
        self.toolchain = toolchain_of(group.device)
        self.group = group
        self.codec = codec
        self.world = world
        self.into_bucket = gradient_dtype == torch.float32
        """Whether decoding writes the bucket itself. Narrower gradients need the exact update, to keep what rounding loses."""
        values = getattr(codec.values, "dtype", torch.float32)
        packed = isinstance(codec.indices, PackedCode)
        self._defines = payload_defines(values, gradient_dtype, packed)
        self._one = torch.ones(1, device=group.device)
        self._share = torch.full((1,), 1 / world, device=group.device)
        slots = len(codec.table.rows)
        self.every_slot = torch.ones(slots, dtype=torch.uint8, device=group.device)
        self.used = torch.zeros(slots, dtype=torch.uint8, device=group.device)
        """uint8 [slots]: a rank had a gradient in the last step that was decoded."""
        self._status = torch.zeros(2, dtype=torch.bool, device=group.device)
        self.wrong, self.unused = self._status.unbind()
        """bool [] each: something was wrong in that step; no rank had a gradient for some slot."""
        self.never = torch.zeros((), dtype=torch.bool, device=group.device)
        """bool []: a flag that is never up."""

    def prepare(self) -> None:
        """Subclasses call it when all that launches refer to is there."""
        self._encode = list(self._encode_launches())
        self._decode = list(self._decode_launches())
        self._give_back = self._give_back_launch()

    def _launch(
        self, file: str, name: str, defines: Defines, blocks: int, threads: int, args: Sequence[Any]
    ) -> PreparedLaunch:
        kernel = self.toolchain.compile(file, name, (*self._defines, *defines))
        return PreparedLaunch(kernel, blocks, threads, args)

    @abstractmethod
    def _encode_launches(self) -> Iterator[PreparedLaunch]: ...

    @abstractmethod
    def _decode_launches(self) -> Iterator[PreparedLaunch]: ...

    @abstractmethod
    def _give_back_launch(self) -> PreparedLaunch: ...

    @abstractmethod
    def _new_buffer(self) -> Tensor:
        """A buffer for `encode` to write to."""

    # -- one step ---------------------------------------------------------------------------------------------

    def encode(
        self,
        bucket_flat: Tensor,
        before: Tensor,
        memory: Tensor,
        ratio: Tensor | None,
        momentum: Sequence[Tensor] = (),
    ) -> Tensor:
        """What is sent. `memory` becomes `before` times `ratio`, plus the gradient or momentum, less what is sent."""
        sent = self._new_buffer()
        at = sent.data_ptr()
        values = {
            "bucket": bucket_flat.data_ptr(),
            "before": before.data_ptr(),
            "memory": memory.data_ptr(),
            "dense": at,
            "payload": at + self.dense_prefix,
            "ratio": (self._one if ratio is None else ratio).data_ptr(),
        }
        self._add_momentum(values, momentum)
        self._start_encoding(values)
        return sent

    def _start_encoding(self, values: Mapping[str, int]) -> None:
        for launch in self._encode:
            launch.start(values)

    def decode(self, gathered: Tensor, out: Tensor, sums: Tensor | None = None) -> None:
        """Write the mean of what all ranks sent to `out` (bucket or group layout). Sets `used`, `unused` and `wrong`.

        `sums` is the sum of the dense tensors, if they are `summed` and not gathered.
        """
        at = gathered.data_ptr()
        values = {
            "dense": at if sums is None else sums.data_ptr(),
            "gathered": at + self.dense_prefix if sums is None else at,
            "out": out.data_ptr(),
            "stride": fitting(gathered.stride(0)),
        }
        for launch in self._decode:
            launch.start(values)

    def payload(self, sent: Tensor) -> Tensor:
        """The part of what is sent that the codec knows."""
        return sent[self.dense_prefix :]

    def give_back(
        self,
        memory: Tensor,
        sent: Tensor,
        used: Tensor,
        bad: Tensor,
        unused: Tensor,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        """Return entries to memory: those of used slots if the flag `bad` (a byte) is up, those of the others if `unused` is."""
        values = {
            "memory": memory.data_ptr(),
            "payload": sent.data_ptr() + self.dense_prefix,
            "used": used.data_ptr(),
            "bad": bad.data_ptr(),
            "unused": unused.data_ptr(),
        }
        self._add_momentum(values, momentum)
        self._give_back.start(values)

    def open_momentum(self, before: Tensor, u: Tensor, ratio: Tensor | None) -> list[Tensor]:
        """`momentum` for `encode` and `give_back` of one step: u before it, u, and what it has to be multiplied with first."""
        return [before, u, self._one if ratio is None else ratio]

    def open_scale(self, second_moment: Tensor, scale: Tensor | None) -> list[Tensor]:
        """What `momentum` has beside that in Adam's scale. `scale` is the GradScaler's."""
        return [second_moment, self._one if scale is None else scale.float()]

    def joint_entry(
        self,
        memory: Tensor,
        sent: Tensor,
        used: Tensor,
        unused: Tensor,
        momentum: Sequence[Tensor] = (),
    ) -> Joint | None:
        """The arguments of `give_back`, for a launch that gives back for all payloads of one format; None if there is none."""
        return None

    def _add_momentum(self, values: dict[str, int], momentum: Sequence[Tensor]) -> None:
        for name, tensor in zip((*MOMENTUM_NAMES, *SCALE_NAMES), momentum, strict=False):
            values[name] = tensor.data_ptr()
