"""Names, kinds and memory order of parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from thinwire.layout import (
    BucketLayout,
    Group,
    SlotKind,
    canonical_name,
    describe_module,
    describe_parameters,
    memory_strides,
)


class Conv1D(nn.Module):
    """GPT-2's linear layer: [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


def test_kinds_come_from_the_owning_module():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 3),
            "conv": nn.Conv1d(4, 3, 2),
            "up": nn.ConvTranspose2d(4, 3, 2),
            "words": nn.Embedding(9, 4),
            "norm": nn.BatchNorm2d(3),
            "gpt": Conv1D(8, 4),
            "mix": nn.Bilinear(2, 3, 4),
        }
    )
    kinds = {name: info.kind for name, (_, info) in describe_module(model).items()}
    assert kinds["linear.weight"] is SlotKind.LINEAR
    assert kinds["conv.weight"] is kinds["up.weight"] is SlotKind.CONV
    assert kinds["words.weight"] is SlotKind.EMBEDDING
    assert kinds["gpt.weight"] is SlotKind.TRANSPOSED_LINEAR
    assert kinds["mix.weight"] is SlotKind.OTHER
    vectors = {name for name, kind in kinds.items() if kind is SlotKind.VECTOR}
    assert {"linear.bias", "norm.weight", "norm.bias", "gpt.bias"} <= vectors


def test_names_are_canonical_whatever_wraps_the_model():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = list(describe_module(plain))
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert list(describe_module(wrapped)) == names
    assert list(describe_module(torch.compile(plain))) == names
    assert canonical_name("_orig_mod.a._fsdp_wrapped_module.b") == "a.b"
    assert canonical_name("module.weight") == "module.weight", "a submodule may be called module"


def test_tied_weights_appear_once_under_their_first_name_and_frozen_ones_not_at_all():
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["words"].weight
    model["frozen"] = nn.Linear(2, 2).requires_grad_(False)
    described = describe_module(model)
    assert list(described) == ["words.weight"]
    assert described["words.weight"][1].kind is SlotKind.EMBEDDING


def test_without_modules_kinds_are_guessed_from_shapes():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Conv2d(4, 3, 2))
    kinds = [info.kind for _, info in describe_parameters(model.named_parameters()).values()]
    assert kinds == [SlotKind.LINEAR, SlotKind.CONV, SlotKind.VECTOR]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.zeros(0, 3),
        torch.randn(1, 1),
    ],
    ids=lambda t: str(tuple(t.shape)),
)
def test_view_of_the_memory_is_the_logical_tensor(tensor):
    """A dense tensor's bytes, copied as they lie, and seen through its slot are the tensor."""
    flat = torch.zeros(tensor.numel() + 5)
    ((_, info),) = describe_parameters([("p", nn.Parameter(tensor))]).values()
    slot = info.slot(2)
    flat[2 : 2 + tensor.numel()] = tensor.as_strided((tensor.numel(),), (1,))
    assert torch.equal(slot.view(flat), tensor)
    assert slot.span(flat).numel() == tensor.numel()


def test_tensor_with_gaps_has_a_contiguous_gradient():
    assert memory_strides(torch.randn(4, 8)[:, ::2]) == (4, 1)
    assert memory_strides(torch.randn(4, 1).expand(4, 3)) == (3, 1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
@settings(max_examples=40, deadline=None)
def test_groups_of_a_bucket_carry_every_element_there_and_back(sizes, data):
    named = [(str(n), nn.Parameter(torch.empty(size, 3))) for n, size in enumerate(sizes)]
    slots, offset = [], 0
    for _, info in describe_parameters(named).values():
        slots.append(info.slot(offset))
        offset += info.numel
    layout = BucketLayout(tuple(slots), offset, torch.bfloat16, torch.device("cpu"))
    members = data.draw(st.lists(st.sampled_from(slots), unique=True, min_size=1))
    group = Group.of(layout, members, torch.float32)
    assert all(slot.offset % 4 == 0 for slot in group.slots)
    bucket, update = torch.zeros(offset).bfloat16(), torch.randn(group.numel)
    group.deliver(update, bucket)
    lost = group.rounding(update, bucket)
    for source, slot in zip(group.sources, group.slots, strict=True):
        assert torch.equal(source.span(bucket).float() + slot.span(lost), slot.span(update))
    untouched = set(slots) - set(members)
    assert not any(slot.span(bucket).any() for slot in untouched)
