"""The FSDP adapter: sharded models on 4 gloo processes, mostly as 2 replicas x 2 shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.sharded import (
    ACCUMULATIONS,
    Block,
    are_replicas_equal,
    batch,
    local,
    loss_of,
    make_mesh,
    make_model,
    place_columns,
    train,
    weights,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
HALF = MixedPrecisionPolicy(reduce_dtype=torch.float16)
EVERYTHING = tw.TopK(density=1.0, values="fp32", dense_fallback=False)


def differ(options: dict[str, Any], accumulation: str, method: Any, mesh: Any = None) -> float:
    """The largest difference to plain training."""
    mesh = mesh or make_mesh(2, 2)
    plain, model = make_model(mesh, **options), make_model(mesh, **options)
    handle = tw.attach(model, method)
    for one in (plain, model):
        train(one, accumulation=accumulation)
    handle.close()
    return float((weights(plain) - weights(model)).abs().max())


def equality_job(rank: int, world: int, method: Any) -> None:
    for policy in (MixedPrecisionPolicy(), BF16):
        for accumulation in ACCUMULATIONS:
            assert differ({"mp_policy": policy}, accumulation, method) == 0.0, accumulation


def test_dense_is_bit_equal_to_plain_training(sharded):
    sharded.run(equality_job, tw.Dense())


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [EVERYTHING, sparse(density=1.0)], ids=lambda method: type(method).__name__
)
def test_what_selects_everything_is_bit_equal_to_plain_training(sharded, method):
    sharded.run(equality_job, method)


def forms_job(rank: int, world: int) -> None:
    """Shards of many forms, dtypes and divisions."""
    checkpointed = {
        "change": lambda model: apply_activation_checkpointing(
            model, check_fn=lambda one: isinstance(one, Block)
        )
    }
    compiled = {"change": lambda model: [b.compile(backend="eager") for b in model.blocks]}
    assert differ({"shard_placement_fn": place_columns}, "one backward", EVERYTHING) == 0.0
    assert differ(checkpointed, "no sync", EVERYTHING) == 0.0
    assert differ(compiled, "one backward", EVERYTHING) == 0.0
    assert differ({"reshard_after_forward": False}, "one backward", EVERYTHING) == 0.0
    for accumulation in ("one backward", "every backward"):
        assert differ({"mp_policy": NARROW}, accumulation, tw.Dense()) == 0.0
        assert differ({"mp_policy": HALF}, accumulation, tw.Dense()) < 1e-5
    assert differ({}, "one backward", EVERYTHING, make_mesh(1, 4)) == 0.0
    assert differ({}, "one backward", EVERYTHING, make_mesh(4, 1)) < 1e-6


def test_uneven_empty_and_column_shards_checkpointing_compiled_blocks_and_narrow_dtypes(sharded):
    sharded.run(forms_job)


def settings_job(rank: int, world: int) -> None:
    """What changes how FSDP divides."""
    mesh = make_mesh(2, 2)
    for change in (
        lambda model: model.set_force_sum_reduction_for_comms(True),
        lambda model: model.set_gradient_divide_factor(2.0),
    ):
        found = []
        for attached in (False, True):
            model = make_model(mesh)
            for module in (model, *model.blocks):
                change(module)
            handle = tw.attach(model, EVERYTHING) if attached else None
            train(model)
            found.append(weights(model))
            if handle is not None:
                handle.close()
        assert (found[0] - found[1]).abs().max() < 1e-6


def test_divisions_of_the_users_own(sharded):
    sharded.run(settings_job)


def one_dimension_job(rank: int, world: int) -> None:
    """A 1-D mesh with the replicas handed over, and `replicate`: against the 2-D mesh."""
    mesh = make_mesh(2, 2)
    plain = make_model(mesh)
    train(plain)
    model = make_model(mesh["shard"])
    with pytest.raises(tw.UsageError, match="process_group is None and the model is sharded over"):
        tw.attach(model, tw.Dense())
    handle = tw.attach(model, EVERYTHING, process_group=mesh.get_group("replicate"))
    assert handle.world == 2
    train(model, 2)
    handle.close()
    train(model, [2], optimizer=None)
    copies = make_model(make_mesh(4, 1)["replicate"], apply=replicate)
    handle = tw.attach(copies, EVERYTHING)
    assert handle.world == 4 and handle.shard("head.weight").whole
    train(copies)
    full = [p.full_tensor() for p in plain.parameters()]
    assert all(
        torch.allclose(f, local(p), atol=1e-6)
        for f, p in zip(full, copies.parameters(), strict=True)
    )
    state = handle.state_dict()
    train(copies, [3])
    handle.load_state_dict(state)
    assert handle.stats().steps == 3
    handle.close()


def test_one_dimension_and_replicate(sharded):
    sharded.run(one_dimension_job)


def mesh_dims_job(rank: int, world: int) -> None:
    """Parameters that are DTensors over the whole mesh already, of which `fully_shard` is told what to cut."""
    mesh, found = make_mesh(2, 2), []
    dims = fsdp.DataParallelMeshDims(shard="shard", replicate="replicate")
    for method in (None, tw.Dense(), EVERYTHING, sparse()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 51), nn.Tanh(), nn.Linear(51, 40))
        distribute_module(model, mesh)
        fully_shard(model[0], mesh=mesh, dp_mesh_dims=dims)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        handle = tw.attach(model, method) if method is not None else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            values = torch.randn(8, 33, generator=torch.Generator().manual_seed(10 * step + rank))
            inputs = DTensor.from_local(values, mesh, [Replicate()] * 2, run_check=False)
            model(inputs).to_local().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
        if handle is not None:
            assert are_replicas_equal(model, mesh.get_group("replicate"))
            handle.load_state_dict(handle.state_dict())
            handle.close()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])


def test_a_mesh_whose_dimensions_are_named(sharded):
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("this torch has no DataParallelMeshDims")
    sharded.run(mesh_dims_job)


class Open(nn.Module):
    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        return inner.new_ones(1)


def tensor_parallel_job(rank: int, world: int) -> None:
    mesh = make_mesh(2, 1, 2)

    def cut(model: Any) -> None:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)

    def shape(model: Any) -> None:
        # 51 columns cannot be cut in two.
        for block in model.blocks:
            block.up, block.down = nn.Linear(32, 64), nn.Linear(64, 32)
            # What is between the two is cut too: a gate would see other columns on every rank.
            block.gate = Open()
        cut(model)

    found = []
    for method in (None, EVERYTHING, sparse()):
        model = make_model(mesh["replicate", "shard"], change=shape)
        handle = tw.attach(model, method) if method is not None else None
        train(model, data_rank=rank // 2)
        found.append(weights(model))
        if handle is not None:
            state = handle.state_dict()["ranks"][f"rank{handle.rank}"]["memory"]["residual"]
            assert state["blocks.0.up.weight"].shape == (64, 32)
            assert are_replicas_equal(model, mesh.get_group("replicate"))
            handle.close()
        whole = nn.ModuleList([model.tokens, *(block.norm for block in model.blocks), model.head])
        assert are_replicas_equal(whole, mesh.get_group("tensor")), "what is not cut"
    assert torch.equal(found[0], found[1])


@pytest.mark.filterwarnings("ignore")
def test_tensor_parallel_beside_it(sharded):
    sharded.run(tensor_parallel_job)


def in_backward_job(rank: int, world: int) -> None:
    """Every parameter is stepped as soon as its gradient is there."""
    found = []
    for method in (None, EVERYTHING):
        model = make_model(make_mesh(2, 2))
        handle = tw.attach(model, method) if method is not None else None
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: Any, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(3):
            loss_of(model, batch(rank, number)).backward()
        found.append(weights(model))
        if handle is not None:
            handle.close()
    assert torch.equal(*found)


def test_optimizer_in_backward(sharded):
    sharded.run(in_backward_job)


def takeover_job(rank: int, world: int) -> None:
    """DGC takes momentum buffers over that are DTensors, and saves and loads what it took."""
    mesh = make_mesh(2, 2)
    model = make_model(mesh)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = train(model, 2, optimizer=torch.optim.SGD(model.parameters(), **options))
    momentum = local(optimizer.state[model.head.weight]["momentum_buffer"]).clone()
    handle = tw.attach(model, tw.DGC(density=0.1), optimizer=optimizer)
    assert torch.equal(handle.reducer.assignments.held("head.weight", "momentum"), momentum)
    train(model, [2, 3], optimizer=optimizer)
    assert are_replicas_equal(model, mesh.get_group("replicate"))
    saved, plain = handle.state_dict(), optimizer.state_dict()
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, [4, 5], optimizer=optimizer)
    through = weights(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    optimizer.load_state_dict(plain)
    handle.load_state_dict(saved)
    train(model, [4, 5], optimizer=optimizer)
    assert torch.equal(weights(model), through)
    handle.switch(tw.Dense())
    train(model, [6], optimizer=optimizer)
    handle.close()
    # A dense step comes first, and then the optimizer goes on from what it gets back.
    assert local(optimizer.state[model.head.weight]["momentum_buffer"]).any()
    train(model, [7], optimizer=optimizer)
    assert are_replicas_equal(model, mesh.get_group("replicate"))


def test_momentum_of_sharded_parameters_is_taken_over(sharded):
    sharded.run(takeover_job)


def switch_job(rank: int, world: int) -> None:
    mesh = make_mesh(2, 2)
    model = make_model(mesh)
    handle = tw.attach(model, sparse(), policy=[tw.rule(max_numel=1000, dense=True)])
    plan = {row.info.name: row.dense for row in handle.plan()}
    # 51 x 32 elements, of which a rank has half: rules see the whole.
    assert not plan["blocks.0.up.weight"] and plan["blocks.0.gate.weight"]
    assert handle.shard("blocks.0.up.weight").offset == (26 if rank % 2 else 0)
    assert handle.shard("blocks.0.up.weight").shape == handle.residual("blocks.0.up.weight").shape
    train(model, 2)
    assert handle.residual("blocks.0.up.weight").any()
    handle.switch(tw.Dense())
    train(model, [2])
    assert not handle.residual("blocks.0.up.weight").any()
    with pytest.raises(tw.UsageError, match="attach was called twice"):
        tw.attach(model, tw.Dense())
    with pytest.raises(tw.UsageError, match="FSDP cannot change the mesh of a model"):
        handle.regroup(mesh.get_group("replicate"))
    handle.close()
    train(model, [3])
    tw.attach(model, tw.Dense()).close()
    assert are_replicas_equal(model, mesh.get_group("replicate"))


def test_plans_are_by_full_shapes_and_handles_come_and_go(sharded):
    sharded.run(switch_job)


def refusals_job(rank: int, world: int) -> None:
    mesh = make_mesh(2, 2)
    model = make_model(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(tw.UsageError, match="is offloaded to the CPU"):
        tw.attach(model, tw.Dense())
    with pytest.raises(tw.UsageError, match="process_group has the ranks"):
        tw.attach(make_model(mesh), tw.Dense(), process_group=mesh.get_group("shard"))
    other = make_mesh(4, 1)
    both = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(both[0], mesh=mesh)
    fully_shard(both, mesh=other)
    with pytest.raises(tw.UsageError, match="copied over 2 different groups"):
        tw.attach(both, tw.Dense())
    partly = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(partly[0], mesh=make_mesh(1, 4)["shard"])
    fully_shard(partly, mesh=mesh)
    with pytest.raises(
        tw.UsageError, match=r"'0.weight' is sharded over a 1-D mesh, so that it has"
    ):
        tw.attach(partly, tw.Dense())
    with pytest.raises(tw.UsageError, match="checksum is True, but the ranks of other shards"):
        tw.attach(make_model(make_mesh(2, 2)), tw.Dense(), checksum=True)
    with pytest.raises(tw.UsageError, match="watch is 5 and on_difference is 'raise'; replicas of"):
        tw.attach(make_model(make_mesh(2, 2)), tw.Dense(), watch=5)
    with pytest.raises(tw.UsageError, match="model is a Linear"):
        tw.attach(nn.Linear(2, 2), tw.Dense())
    with pytest.raises(tw.ExchangeError, match="method differs between ranks"):
        tw.attach(make_model(mesh), tw.TopK(density=0.1 if rank % 2 else 0.2))
    in_scale = tw.AdamScale(method=tw.TopK(density=0.1), start=1)
    model = make_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(tw.UsageError, match="method is AdamScale with Adam's moments taken over"):
        tw.attach(model, in_scale, optimizer=optimizer)
    handle = tw.attach(model, tw.Quantized(bits=8), optimizer=optimizer)
    with pytest.raises(tw.UsageError, match="method is AdamScale with Adam's moments taken over"):
        handle.switch(in_scale)
    handle.close()


def test_what_cannot_work_is_refused_in_a_sentence(sharded):
    sharded.run(refusals_job)


def several_meshes_job(rank: int, world: int) -> None:
    """Refused before anything is changed, so that the next attach says the same."""
    mesh = make_mesh(2, 2)
    other = _fsdp_common.FSDPMeshInfo(mesh=mesh["replicate"], shard_mesh_dim=0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    apart = set(model[1].parameters())
    place = {True: _fsdp_common.ShardPlacementResult(Shard(0), other), False: None}
    fully_shard(model, mesh=mesh["shard"], shard_placement_fn=lambda p: place[p in apart])
    for _ in range(2):
        with pytest.raises(tw.UsageError, match="module '' has parameters sharded over 2 meshes"):
            tw.attach(model, tw.Dense(), process_group=mesh.get_group("replicate"))
    model(torch.ones(2, 4)).sum().backward()


def test_a_module_with_several_meshes_is_refused(sharded):
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        pytest.skip("a module has one mesh before torch 2.13")
    sharded.run(several_meshes_job)


def unused_job(rank: int, world: int) -> None:
    """A parameter that gets no gradient shifts all others in what FSDP reduces."""
    model = make_model(make_mesh(2, 2))
    handle = tw.attach(model, sparse())
    model.tokens.weight.requires_grad_(False)
    with pytest.raises(tw.UsageError, match="was frozen or thawed since attach"):
        train(model, 1)
    handle.close()
    model = make_model(make_mesh(2, 2), change=add_unused)
    handle = tw.attach(model, sparse())
    with pytest.raises(tw.UsageError, match=r"got no gradient in this backward"):
        train(model, 1)
    handle.close()
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        return
    model = make_model(make_mesh(2, 2), change=add_unused)
    for module in (model, *model.blocks):
        module.set_reduce_scatter_unused_params(True)
    handle = tw.attach(model, sparse())
    train(model, 2)
    handle.close()


def add_unused(model: Any) -> None:
    for block in model.blocks:
        block.unused = nn.Linear(8, 8)


def test_a_parameter_without_a_gradient_is_named(sharded):
    sharded.run(unused_job)
