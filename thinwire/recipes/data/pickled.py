"""Pickled batches: dictionaries, lists, numbers, texts and arrays of bytes, and nothing that could run code.

No part of numpy is unpickled: its dtypes and arrays take whatever state a file gives them, and a crafted one ends the process.
`ByteArray` and `ByteType` stand for them, and check what they are given.
"""

from __future__ import annotations

import math
import pickle
from typing import Any, BinaryIO

import numpy as np


class ByteType:
    """Stands for numpy's dtype of unsigned bytes, the only one that batches have."""

    def __init__(self, code: Any, *flags: Any) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"it has an array of {code!r}; batches have bytes, u1")

    def __setstate__(self, state: Any) -> None:
        """Byte order and layout, which bytes do not have."""


class ByteArray:
    """Stands for numpy's ndarray until its bytes are known."""

    values: np.ndarray

    def __init__(self, *placeholder: Any) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns_first, content = state
        sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if not sizes or not isinstance(kind, ByteType) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("it has an array that is not made of bytes")
        if math.prod(shape) != len(content):
            raise pickle.UnpicklingError(
                f"it has an array of shape {shape} with {len(content)} bytes"
            )
        values = np.frombuffer(content, np.uint8)
        self.values = values.reshape(shape, order="F" if columns_first else "C")


def encode(text: Any, encoding: Any) -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"it has bytes in the code {encoding!r}; batches have latin1")
    return text.encode("latin1")


STAND_INS = {
    ("numpy", "dtype"): ByteType,
    ("numpy", "ndarray"): ByteArray,
    ("numpy.core.multiarray", "_reconstruct"): ByteArray,
    ("numpy._core.multiarray", "_reconstruct"): ByteArray,
    ("_codecs", "encode"): encode,
}
"""By module and name in the file."""


class BatchUnpickler(pickle.Unpickler):
    """Knows the stand-ins and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch needs")
        return STAND_INS[module, name]


def read_batch(file: BinaryIO) -> Any:
    """A pickled batch; its arrays are `ByteArray`s."""
    return BatchUnpickler(file, encoding="bytes").load()
