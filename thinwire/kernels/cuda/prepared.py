"""PreparedKernels: the kernels of one codec on one group, whose launches are prepared once and made in every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import Compiler, Kernel, Site, Varying, compile_with_nvrtc
from thinwire.plan.groups import Group
from thinwire.wire.codec import Codec
from thinwire.wire.fixed import PackedCode

FLOAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ROW_WARPS = 4
"""Rows per block where one warp has a whole row."""
LOOK_BLOCKS = 256
"""Blocks of a kernel that usually only looks at a flag."""
MOMENTUM_NAMES = ("u", "kept", "u_ratio")
BUCKET, MEMORY, PAYLOAD, RATIO = map(Varying, ("bucket", "memory", "payload", "ratio"))
GATHERED, OUT, STRIDE = map(Varying, ("gathered", "out", "stride"))
USED, FLAG = map(Varying, ("used", "flag"))


class PreparedKernels(ABC):
    """Encode, decode and give back; buffers that shapes fix are made once."""

    compiler: Compiler = staticmethod(compile_with_nvrtc)

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

    def _prepare(self) -> None:
        """To be called when all that launches refer to is there."""
        self._encode = list(self._encode_sites())
        self._decode = list(self._decode_sites())
        self._give_back = {of_used: self._give_back_site(of_used) for of_used in (True, False)}

    def _kernel(self, file: str, name: str, **more: int) -> Kernel:
        return self.compiler(file, name, (*self._defines, *more.items()))

    @abstractmethod
    def _encode_sites(self) -> Iterator[Site]: ...

    @abstractmethod
    def _decode_sites(self) -> Iterator[Site]: ...

    @abstractmethod
    def _give_back_site(self, of_used: bool) -> Site: ...

    @abstractmethod
    def _new_payload(self) -> Tensor:
        """What encoding writes to, as it expects it."""

    # -- one step ---------------------------------------------------------------------------------------------

    def encode(
        self,
        bucket_flat: Tensor,
        memory: Tensor,
        ratio: Tensor | None,
        momentum: Sequence[Tensor] = (),
    ) -> Tensor:
        """The payload; `memory` (the residual times `ratio`, plus the gradient or momentum) keeps what is not in it."""
        payload = self._new_payload()
        values = {
            "bucket": bucket_flat,
            "memory": memory,
            "payload": payload,
            "ratio": self._one if ratio is None else ratio,
            **dict(zip(MOMENTUM_NAMES, momentum, strict=False)),
        }
        for site in self._encode:
            site.launch(values)
        return payload

    def decode(self, gathered: Tensor, out: Tensor) -> None:
        """Write the mean of all ranks' entries to `out` (bucket or group layout); sets `used`, `unused` and `wrong`."""
        values: dict[str, Tensor | int] = {
            "gathered": gathered,
            "out": out,
            "stride": gathered.stride(0),
        }
        for site in self._decode:
            site.launch(values)

    def give_back(
        self,
        memory: Tensor,
        payload: Tensor,
        used: Tensor,
        flag: Tensor,
        of_used: bool,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        """If the flag (a byte) is up: the payload's entries of the used (or of the unused) slots return to memory."""
        values = {
            "memory": memory,
            "payload": payload,
            "used": used,
            "flag": flag,
            **dict(zip(MOMENTUM_NAMES, momentum, strict=False)),
        }
        self._give_back[of_used].launch(values)
