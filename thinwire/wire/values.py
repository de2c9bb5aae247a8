"""Value codes by name: how the chosen values are written down."""

from __future__ import annotations

import torch

from thinwire.wire.blocks import Fp8Code, IntCode, PairCode, SignCode
from thinwire.wire.floats import FloatCode, ValueCode

__all__ = ["VALUE_CODES", "FloatCode", "Fp8Code", "IntCode", "PairCode", "SignCode", "ValueCode"]

VALUE_CODES: dict[str, ValueCode] = {
    "fp32": FloatCode("fp32", torch.float32),
    "bf16": FloatCode("bf16", torch.bfloat16),
    "fp16": FloatCode("fp16", torch.float16),
    "int8": IntCode("int8", code_bits=8, size=64),
    "int4": IntCode("int4", code_bits=4, size=64),
    "int2": PairCode("int2", size=64),
    "sign": SignCode("sign", size=256),
}
if hasattr(torch, "float8_e4m3fn"):
    VALUE_CODES["fp8"] = Fp8Code("fp8", size=64)
