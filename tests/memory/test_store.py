"""FlatStore: values follow their names through every grouping."""

from __future__ import annotations

import torch

from tests.contracts.cluster import parameter
from thinwire.layout import BucketLayout, Group
from thinwire.memory.residual import NoMemory, Residual
from thinwire.memory.store import FlatStore

SHAPES = {"a": (2, 3), "b": (5,), "c": (3, 3)}


def group_of(*names: str) -> Group:
    slots, offset = [], 0
    for name in names:
        strides = (1, 2) if name == "a" else None
        info = parameter(name, SHAPES[name], strides=strides)
        slots.append(info.slot(offset))
        offset += info.numel
    layout = BucketLayout(tuple(slots), offset, torch.float32, torch.device("cpu"))
    return Group.of(layout, slots, torch.float32)


def test_values_follow_their_names_through_regrouping():
    store = FlatStore()
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for name, value in values.items():
        store.write(name, value)
    for names in (("a", "b", "c"), ("c", "a"), ("b",), ("b", "c"), ("a",)):
        store.bind(group_of(*names))
        for name, value in values.items():
            assert torch.equal(store.read(name), value)
    assert store.names() == set(SHAPES)


def test_binding_is_kept_while_the_group_lives():
    store = FlatStore()
    group = group_of("a", "b")
    assert store.bind(group) is store.bind(group)
    assert store.nbytes() == group.numel * 4


def test_memory_is_freed_name_by_name():
    store = FlatStore()
    store.bind(group_of("a", "b"))
    store.release(["a"])
    assert store.read("a") is None and store.read("b") is not None
    assert store.nbytes() == 5 * 4
    store.release(["b", "never held"])
    assert store.nbytes() == 0 and not store.names()


def test_what_is_read_is_a_copy_in_the_parameters_shape():
    store = FlatStore()
    binding = store.bind(group_of("a"))
    read = store.read("a")
    binding.flat.add_(1.0)
    assert read.shape == (2, 3) and not read.any()


def test_values_are_kept_in_plain_units_across_scales_and_groupings():
    store = FlatStore()
    value = torch.randn(3, 3)
    store.write("c", value)
    for scale, names in ((1024.0, ("a", "c")), (2048.0, ("a", "c")), (512.0, ("c",))):
        binding = store.bind(group_of(*names))
        binding.begin(torch.tensor(scale)).brought()
        assert torch.equal(store.read("c"), value)
        assert torch.equal(binding.group.slots[-1].view(binding.flat), value * scale)
    store.write("c", 2 * value)
    assert torch.equal(store.read("c"), 2 * value)


def test_beta_and_gamma_weigh_residual_and_gradient():
    memory = Residual(beta=0.5, gamma=2.0).start()
    group = group_of("b")
    memory.stores["residual"].write("b", torch.full((5,), 4.0))
    account = memory.compensate(group, [torch.full((5,), 3.0)], None)
    assert account.c[:5].tolist() == [0.5 * 4 + 2 * 3] * 5


def test_no_memory_starts_from_the_gradient_alone():
    memory = NoMemory().start()
    group = group_of("b")
    for _ in range(2):
        account = memory.compensate(group, [torch.ones(5)], None)
        assert account.c[:5].tolist() == [1.0] * 5
    assert memory.nbytes() == 0
