"""Spoiled payloads: refused with one clear error, or decoded inside their bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.bench.payloads import (
    FUZZ_SHAPES,
    assert_legal,
    fuzz,
    make_flags,
    make_picks,
    make_table,
)
from thinwire.errors import WireError
from thinwire.wire.codec import Codec
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES


def test_random_corruption() -> None:
    result = fuzz(2500, seed=11, limit_s=5.0)
    assert result.payloads == result.refused + result.decoded
    assert result.refused > 0 and result.decoded > 0


@pytest.mark.parametrize("indices", INDEX_CODES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bytes_behind_an_honest_header(indices: str, data: st.DataObject) -> None:
    table = make_table(data.draw(st.sampled_from(FUZZ_SHAPES)))
    codec = Codec(
        table, VALUE_CODES[data.draw(st.sampled_from(list(VALUE_CODES)))], INDEX_CODES[indices]
    )
    picks = make_picks(table, torch.randn(table.numel))
    payload, _ = codec.encode(picks, make_flags(table, torch.device("cpu")))
    start = data.draw(st.integers(codec.values_at, codec.nbytes - 1))
    noise = data.draw(st.binary(min_size=1, max_size=codec.nbytes - start))
    payload[start : start + len(noise)] = torch.tensor(list(noise), dtype=torch.uint8)
    try:
        positions, values = codec.decode(payload)
    except WireError as error:
        assert "\n" not in str(error)
    else:
        assert_legal(codec, positions, values)
