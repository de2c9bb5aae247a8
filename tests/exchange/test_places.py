"""Messages of fixed size: what cannot be in its place is refused."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import WireError
from thinwire.exchange.places import pack, unpack


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_an_index_that_cannot_be_in_its_place_is_refused(wire):
    lowest, highest = (torch.tensor(n, dtype=torch.int32) for n in ([0, 0, 8], [7, 7, 11]))
    indices = torch.tensor([[[7, -1, 8], [0, 5, -1]]], dtype=torch.int32)
    values = torch.tensor([[[1.0, 0.0, 2.0], [3.0, 4.0, 0.0]]], dtype=wire)
    found, numbers = unpack(pack(indices, values), wire, lowest, highest)
    assert torch.equal(found, indices)
    assert torch.equal(numbers, values)
    for wrong in (-2, 7, 12):
        bad = indices.clone()
        bad[0, 0, 2] = wrong
        with pytest.raises(WireError, match="outside its owner's region"):
            unpack(pack(bad, values), wire, lowest, highest)
