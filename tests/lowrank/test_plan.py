"""Which parameters go low rank, and what the settings refuse."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.lowrank.ranks import describe
from thinwire.errors import UsageError
from thinwire.layout import SlotKind
from thinwire.lowrank.matrices import matrices_of
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.base import Dense
from thinwire.methods.powersgd import PowerSGD
from thinwire.plan.policy import make_plan, rule

F32 = torch.float32


def decide(method, shape, *, dtype=F32, strides=None, kind=None, policy=()):
    info = describe("w", shape, dtype, strides, kind)
    return make_plan([info], method, list(policy), 4)["w"]


@pytest.mark.parametrize("shape", [(), (0, 5), (7,), (4096,)])
def test_what_is_no_matrix_goes_dense(shape):
    assert decide(PowerSGD(rank=1), shape).dense
    explicit = [rule("w", method=ACPSGD(rank=1, dense_fallback=False))]
    assert decide(PowerSGD(rank=1), shape, policy=explicit).dense


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(8, 8), (16, 16), (32, 32), (17, 64), (64, 3, 3, 3), (10, 500)])
@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0, 3.0])
def test_the_size_rules_of_both_methods(rank, shape, rate):
    n, m = shape[0], torch.Size(shape).numel() // shape[0]
    r = min(rank, n, m)
    powersgd = decide(PowerSGD(rank=rank, min_compression_rate=rate), shape)
    acpsgd = decide(ACPSGD(rank=rank, min_compression_rate=rate), shape)
    assert powersgd.dense == (not (n + m) * r * rate < n * m)
    assert acpsgd.dense == (not (n + m) * r * rate < 2 * n * m)


def test_dtypes_count_in_the_size_rule():
    shape = (16, 16)
    assert not decide(ACPSGD(rank=4), shape).dense
    assert decide(ACPSGD(rank=4), shape, dtype=torch.bfloat16).dense
    assert not decide(ACPSGD(rank=4, wire="bf16"), shape, dtype=torch.bfloat16).dense
    assert not decide(ACPSGD(rank=4), shape, dtype=torch.float64).dense
    assert not decide(PowerSGD(rank=4, dense_fallback=False), (3, 3)).dense


def test_how_parameters_are_seen_as_matrices():
    def seen(shape, strides=None, kind=None):
        found = matrices_of(describe("w", shape, F32, strides, kind).slot(0))
        return None if found is None else (found.count, found.rows, found.columns, found.strides)

    assert seen((6, 4)) == (1, 6, 4, (24, 4, 1))
    assert seen((6, 4), strides=(1, 6)) == (1, 6, 4, (24, 1, 6))
    assert seen((6, 4, 3, 3)) == (1, 6, 36, (216, 36, 1))
    assert seen((6, 4, 3, 3), strides=(36, 1, 12, 4)) == (1, 6, 36, (216, 36, 1))
    assert seen((5, 6, 4), kind=SlotKind.OTHER) == (5, 6, 4, (24, 4, 1))
    assert seen((5, 6, 4), kind=SlotKind.CONV) == (1, 5, 24, (120, 24, 1))
    # Dimension 0 between the others.
    assert seen((6, 4, 3), strides=(3, 18, 1), kind=SlotKind.CONV) is None


def test_columns_keep_their_logical_order_in_state():
    shape = matrices_of(describe("w", (6, 4, 3, 2), F32, strides=(24, 1, 8, 4)).slot(0))
    logical = torch.arange(24.0).view(1, 24, 1)
    memory = shape.to_memory(logical)
    assert memory[0, :3, 0].tolist() == [0.0, 6.0, 12.0]
    assert torch.equal(shape.to_logical(memory), logical)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("rank", 1.5),
        ("rank", True),
        ("min_compression_rate", 0),
        ("min_compression_rate", float("inf")),
        ("wire", "fp8"),
        ("dense_fallback", 1),
        ("subspace_refresh_every", 0),
        ("scale", tw.memory.Residual(storage="bf16")),
    ],
)
def test_bad_settings_name_the_field(field, value):
    with pytest.raises(UsageError, match=f"^{field} is "):
        PowerSGD(**{field: value})


def test_the_plan_says_why_and_what():
    assert decide(Dense(), (64, 64)).dense
    row = decide(PowerSGD(rank=4), (64, 3, 3, 3))
    assert row.action == "PowerSGD: rank 4 of 64 x 27"
    small = decide(PowerSGD(rank=4), (8, 8))
    assert small.reason == "rank 4 needs 1 of the dense bytes, not less than the 1/2 asked for"
    experts = decide(ACPSGD(rank=4), (3, 64, 64), kind=SlotKind.OTHER)
    assert experts.action == "ACPSGD: rank 4 of 3 x 64 x 64"
    assert PowerSGD(rank=4).host_sync_free and ACPSGD(rank=4).host_sync_free
