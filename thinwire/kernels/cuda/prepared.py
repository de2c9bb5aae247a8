"""PreparedKernels: the kernels of one codec on one group, whose launches are prepared once and made in every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import (
    Compiler,
    Kernel,
    Site,
    Varying,
    compile_with_nvrtc,
    fitting,
)
from thinwire.plan.groups import Group
from thinwire.wire.codec import Codec
from thinwire.wire.fixed import PackedCode

FLOAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ROW_WARPS = 4
"""Rows per block where one warp has a whole row."""
LOOK_BLOCKS = 256
"""Blocks of a kernel that usually only looks at a flag."""
MOMENTUM_NAMES = ("u", "u_ratio")
BUCKET, MEMORY, PAYLOAD, RATIO = map(Varying, ("bucket", "memory", "payload", "ratio"))
GATHERED, OUT = map(Varying, ("gathered", "out"))
STRIDE = Varying("stride", is_number=True)
USED, BAD, UNUSED = map(Varying, ("used", "bad", "unused"))
BESIDE = Varying("beside")
"""Dense tensors in the same buffer, before the payload."""


class PreparedKernels(ABC):
    """Encode, decode and give back; buffers that shapes fix are made once."""

    compiler: Compiler = staticmethod(compile_with_nvrtc)
    before = 0
    """Bytes of dense tensors that lie before the payload in what is sent."""
    summed = False
    """Whether they are summed on the way, and the payloads gathered by themselves."""

    def __init__(
        self, group: Group, codec: Codec, gradient_dtype: torch.dtype, world: int, **more: int
    ) -> None:
        """`more` are settings of the sources beside the dtypes."""
        self.group = group
        self.codec = codec
        self.world = world
        self.into_bucket = gradient_dtype == torch.float32
        """Whether decoding writes the bucket itself; a narrower one needs the exact update for its rounding."""
        values = getattr(codec.values, "dtype", torch.float32)
        self._defines = (
            ("VALUE_CODE", FLOAT_CODES[values]),
            ("GRADIENT_CODE", FLOAT_CODES[gradient_dtype]),
            ("PACKED", int(isinstance(codec.indices, PackedCode))),
            *more.items(),
        )
        self._one = torch.ones(1, device=group.device)
        self._share = torch.full((1,), 1 / world, device=group.device)
        slots = len(codec.table.rows)
        self.every_slot = torch.ones(slots, dtype=torch.uint8, device=group.device)
        self.used = torch.zeros(slots, dtype=torch.uint8, device=group.device)
        """uint8 [slots]: anybody had a gradient in the last step that was decoded."""
        self._status = torch.zeros(2, dtype=torch.bool, device=group.device)
        self.wrong, self.unused = self._status.unbind()
        """bool []: something was wrong in that step; some slot had no gradient."""
        self.never = torch.zeros((), dtype=torch.bool, device=group.device)
        """bool []: a flag that is never up."""

    def _prepare(self) -> None:
        """To be called when all that launches refer to is there."""
        self._encode = list(self._encode_sites())
        self._decode = list(self._decode_sites())
        self._give_back = self._give_back_site()

    def _kernel(self, file: str, name: str, **more: int) -> Kernel:
        return self.compiler(file, name, (*self._defines, *more.items()))

    @abstractmethod
    def _encode_sites(self) -> Iterator[Site]: ...

    @abstractmethod
    def _decode_sites(self) -> Iterator[Site]: ...

    @abstractmethod
    def _give_back_site(self) -> Site: ...

    @abstractmethod
    def _new_buffer(self) -> Tensor:
        """What encoding writes to, as it expects it."""

    # -- one step ---------------------------------------------------------------------------------------------

    def encode(
        self,
        bucket_flat: Tensor,
        memory: Tensor,
        ratio: Tensor | None,
        momentum: Sequence[Tensor] = (),
    ) -> Tensor:
        """What is sent; `memory` (the residual times `ratio`, plus the gradient or momentum) keeps what is not in it."""
        sent = self._new_buffer()
        at = sent.data_ptr()
        values = {
            "bucket": bucket_flat.data_ptr(),
            "memory": memory.data_ptr(),
            "beside": at,
            "payload": at + self.before,
            "ratio": (self._one if ratio is None else ratio).data_ptr(),
        }
        self._add_momentum(values, momentum)
        for site in self._encode:
            site.launch(values)
        return sent

    def decode(self, gathered: Tensor, out: Tensor, sums: Tensor | None = None) -> None:
        """Write the mean of what all ranks sent to `out` (bucket or group layout); sets `used`, `unused` and `wrong`.

        `sums` is that of what lies before the payloads, if it is `summed`.
        """
        at = gathered.data_ptr()
        values = {
            "beside": at if sums is None else sums.data_ptr(),
            "gathered": at + self.before if sums is None else at,
            "out": out.data_ptr(),
            "stride": fitting(gathered.stride(0)),
        }
        for site in self._decode:
            site.launch(values)

    def payload(self, sent: Tensor) -> Tensor:
        """The part of it that the codec knows."""
        return sent[self.before :]

    def give_back(
        self,
        memory: Tensor,
        sent: Tensor,
        used: Tensor,
        bad: Tensor,
        unused: Tensor,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        """Entries return to memory: those of the used slots if `bad` (a byte) is up, those of the others if `unused` is."""
        values = {
            "memory": memory.data_ptr(),
            "payload": sent.data_ptr() + self.before,
            "used": used.data_ptr(),
            "bad": bad.data_ptr(),
            "unused": unused.data_ptr(),
        }
        self._add_momentum(values, momentum)
        self._give_back.launch(values)

    def _add_momentum(self, values: dict[str, int], momentum: Sequence[Tensor]) -> None:
        for name, tensor in zip(MOMENTUM_NAMES, momentum, strict=False):
            values[name] = tensor.data_ptr()
