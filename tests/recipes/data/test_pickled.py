"""Pickled batches: arrays of bytes are read, and crafted ones are refused before numpy sees them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.errors import UsageError
from thinwire.recipes.data.cifar import CIFAR10, read_python
from thinwire.recipes.data.pickled import read_batch


class Reduced:
    """Pickled as a call of `function` and a state for what it returns."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.recipe = (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.recipe


RECONSTRUCT = np.empty(0).__reduce__()[0]


def array(shape: Any, kind: Any, content: Any) -> Reduced:
    return Reduced(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, shape, kind, False, content))


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_bytes_are_read(protocol: int, order: Any) -> None:
    pixels = np.asarray(np.arange(12, dtype=np.uint8).reshape(3, 4), order=order)
    content = {"data": pixels, "labels": [1, 2, 3], "name": b"batch"}
    found = read_batch(io.BytesIO(pickle.dumps(content, protocol=protocol)))
    found = {
        str(key, "utf-8") if isinstance(key, bytes) else key: one for key, one in found.items()
    }
    assert np.array_equal(found["data"].values, pixels)
    assert found["labels"] == [1, 2, 3]


CRAFTED = {
    "objects": np.array([{}], object),
    "floats": np.zeros(3),
    # numpy takes such a state, and ends the process when it uses the dtype.
    "dtype": Reduced(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": 1}, 8, 1, 27)),
    "array": array((1 << 40,), np.dtype("u1"), b"short"),
    "sizes": array((-1,), np.dtype("u1"), b"x"),
    "state": array("no shape", 7, None),
    "code": Reduced(__import__("_codecs").encode, ("x", "rot13")),
    "call": Reduced(print, ("nobody must see this",)),
    "deep": None,
}


@pytest.mark.parametrize("name", CRAFTED)
def test_what_is_crafted_is_one_sentence(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data_batch_1"
    content = {b"data": CRAFTED[name], b"labels": [0]}
    path.write_bytes(pickle.dumps(content, protocol=2))
    if name == "deep":
        path.write_bytes(b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".")
    with pytest.raises(UsageError, match="data_batch_1 is damaged or of another kind"):
        read_python(path, CIFAR10)
    assert capfd.readouterr().out == ""


def test_random_bytes_are_one_sentence(tmp_path: Path) -> None:
    whole = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}, protocol=2)
    draw = np.random.default_rng(0)
    path, read = tmp_path / "data_batch_1", 0
    for _ in range(300):
        content = bytearray(whole)
        for place in draw.integers(0, 200, size=3):
            content[place] = draw.integers(256)
        path.write_bytes(content)
        try:
            read_python(path, CIFAR10)
            read += 1
        except UsageError:
            continue
    assert read < 300
