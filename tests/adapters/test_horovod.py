from __future__ import annotations

import re
from functools import reduce

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
import thinwire.horovod as hvd
from tests.launch import launch_forks
from tests.models import batches, fingerprint, make_cnn
from thinwire.adapters.horovod.adasum import combine


def check_training(output: str) -> None:
    found = re.search(r"first ([\d.]+) last ([\d.]+) identical (\w+)", output)
    assert found, output
    assert float(found[2]) < 0.5 * float(found[1])
    assert found[3] == "True"


def test_a_horovod_script_runs_with_one_line_changed():
    output = launch_forks("horovod_mnist.py", 2)[0]
    check_training(output)
    assert "ranks 2" in output and "{'classes': 10}" in output


def test_an_acpsgd_script_runs_with_one_line_changed():
    check_training(launch_forks("acpsgd_loop.py", 2)[0])


def test_horovods_own_examples_run_with_one_line_changed(tmp_path):
    for output in launch_forks("horovod_examples.py", 2, str(tmp_path)):
        assert "examples done" in output


def collectives_job(rank: int, world: int) -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, world)
    assert hvd.allreduce(torch.tensor([float(rank)])).item() == (world - 1) / 2
    assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item() == sum(range(world))
    gathered = hvd.allgather(torch.full((rank, 2), rank))
    assert gathered[:, 0].tolist() == [r for r in range(world) for _ in range(r)]
    assert hvd.broadcast_object(rank, root_rank=1) == 1
    parameters = {"b": torch.full((2,), rank), "a": torch.full((3,), rank)}
    hvd.broadcast_parameters(parameters, root_rank=2)
    assert parameters["a"].tolist() == [2, 2, 2]
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    model(torch.ones(1, 4)).sum().backward()
    if rank == 0:
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 2
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(world)]
    assert hvd.broadcast_object_fn(1)(rank) == 1


def test_collectives_have_horovods_meaning(pools):
    pools(3).run(collectives_job)


def sum_job(rank: int, world: int) -> float:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Sum
    )
    model(torch.tensor([[float(rank + 1)]])).sum().backward()
    gradient = float(model.weight.grad)
    optimizer.close()
    return gradient


def test_sum_adds_instead_of_averaging(pools):
    assert pools(3).run(sum_job) == [6.0, 6.0, 6.0]


def operations_job(rank: int, world: int) -> None:
    own = torch.arange(6.0).view(3, 2) + rank
    all_own = torch.stack([torch.arange(6.0).view(3, 2) + r for r in range(world)])
    for op, expected in {
        hvd.Average: all_own.mean(0),
        hvd.Sum: all_own.sum(0),
        hvd.Min: all_own.amin(0),
        hvd.Max: all_own.amax(0),
        hvd.Product: all_own.prod(0),
    }.items():
        torch.testing.assert_close(hvd.allreduce(own, op=op), expected)
        in_place = own.clone()
        assert hvd.allreduce_(in_place, op=op) is in_place
        torch.testing.assert_close(in_place, expected)
    assert torch.equal(own, all_own[rank]), "what is not in place leaves its input alone"
    # Asynchronous: two on their way at once, waited for in the other order.
    first, second = hvd.allreduce_async(own), hvd.broadcast_async(own, root_rank=world - 1)
    assert torch.equal(hvd.synchronize(second), all_own[-1])
    torch.testing.assert_close(hvd.synchronize(first), all_own.mean(0))
    assert hvd.poll(first) and hvd.synchronize(first) is hvd.synchronize(first)
    target = torch.empty(2, 3).t().copy_(own)
    assert hvd.synchronize(hvd.allreduce_async_(target, op=hvd.Sum)) is target
    torch.testing.assert_close(target, all_own.sum(0))
    assert not target.is_contiguous()
    group = [own.clone(), own.half()]
    for results in (
        hvd.grouped_allreduce(group, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(group, op=hvd.Sum)),
        hvd.grouped_allreduce_(group, op=hvd.Sum),
    ):
        torch.testing.assert_close(results[0], all_own.sum(0))
        assert results[1].dtype == torch.float16
    scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    torch.testing.assert_close(scaled, 2 * all_own.sum(0))
    narrow = hvd.allreduce(own, compression=hvd.Compression.fp16)
    torch.testing.assert_close(narrow, all_own.mean(0), rtol=1e-3, atol=1e-3)
    assert narrow.dtype == torch.float32
    assert hvd.allreduce(own, average=False).equal(all_own.sum(0))
    with pytest.raises(tw.UsageError, match="give one of them"):
        hvd.allreduce(own, average=True, op=hvd.Sum)
    with pytest.raises(tw.UsageError, match="compression is ADTopK"):
        hvd.allreduce(own, compression=tw.ADTopK())


def test_every_operation_blocking_asynchronous_and_in_place(pools):
    pools(3).run(operations_job)


def moving_job(rank: int, world: int) -> None:
    own = torch.full((2, 2), float(rank))
    assert torch.equal(hvd.broadcast(own, root_rank=1), torch.ones(2, 2))
    assert hvd.broadcast_(own.clone(), 2)[0, 0] == 2
    gathered = hvd.grouped_allgather([own, own[:rank]])
    assert [len(one) for one in gathered] == [2 * world, sum(range(world))]
    again = hvd.synchronize(hvd.grouped_allgather_async([own, own[:rank]]))
    assert all(map(torch.equal, gathered, again))
    # Row p of rank r goes to rank p; then p + 1 rows go to rank p.
    rows = torch.arange(world) + 10 * rank
    assert hvd.alltoall(rows).tolist() == [10 * r + rank for r in range(world)]
    splits = torch.arange(world) + 1
    rows = torch.full((int(splits.sum()),), rank)
    arrived, counts = hvd.alltoall(rows, splits=splits)
    assert counts.tolist() == [rank + 1] * world
    assert arrived.tolist() == [r for r in range(world) for _ in range(rank + 1)]
    with pytest.raises(tw.UsageError, match="splits is"):
        hvd.alltoall(rows, splits=[1] * world)
    # 4 rows among 3 ranks: the first has two.
    scattered = hvd.reducescatter(torch.arange(8.0).view(4, 2), op=hvd.Sum)
    first = [0, 2, 3][rank]
    assert torch.equal(scattered, world * torch.arange(8.0).view(4, 2)[first : [2, 3, 4][rank]])
    mean = hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(world, 3)]))[0]
    assert torch.equal(mean, torch.ones(1, 3))
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.ccl_built() or hvd.ddl_built())
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert hvd.join() in range(world)


def test_gathering_and_moving_rows(pools):
    pools(3).run(moving_job)


def gradients_job(rank: int, world: int) -> None:
    """The derivative of what all ranks compute together."""

    def derivative(call, weight) -> Tensor:
        x = torch.full((world, 2), rank + 1.0, requires_grad=True)
        (call(x) * weight).sum().backward()
        return x.grad

    total = sum(range(1, world + 1))
    ones = torch.ones(world, 2)
    weight = float(rank + 1)
    assert torch.equal(derivative(lambda x: hvd.allreduce(x, op=hvd.Sum), weight), total * ones)
    torch.testing.assert_close(derivative(hvd.allreduce, weight), total / world * ones)
    assert torch.equal(derivative(hvd.allgather, weight), total * ones)
    held = derivative(lambda x: hvd.broadcast(x, 1), weight)
    assert torch.equal(held, ones * (total if rank == 1 else 0))
    crossed = derivative(hvd.alltoall, weight)
    assert crossed[:, 0].tolist() == [r + 1.0 for r in range(world)]
    scattered = derivative(lambda x: hvd.reducescatter(x, op=hvd.Sum), weight)
    assert scattered[:, 0].tolist() == [r + 1.0 for r in range(world)]


def test_blocking_collectives_can_be_differentiated(pools):
    pools(3).run(gradients_job)


def adasum_job(rank: int, world: int) -> tuple[list, list]:
    tensors = adasum_inputs(rank)
    reduced = [hvd.allreduce(tensor, op=hvd.Adasum) for tensor in tensors]
    grouped = hvd.grouped_allreduce(tensors, op=hvd.Adasum)
    assert all(map(torch.equal, reduced, grouped))
    return [one.tolist() for one in reduced], [one.tolist() for one in tensors]


def adasum_inputs(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    own = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    # All alike, nothing in common, and zeros.
    return [*own, torch.ones(4), torch.eye(4)[rank], torch.zeros(3)]


def tree(tensors: list[Tensor]) -> Tensor:
    """As the paper says it: of both halves' Adasums."""
    if len(tensors) == 1:
        return tensors[0]
    half = len(tensors) // 2
    return reduce(formula, (tree(tensors[:half]), tree(tensors[half:])))


def formula(a: Tensor, b: Tensor) -> Tensor:
    dot = float((a * b).sum())
    share_a = 1 - dot / (2 * float((a * a).sum())) if a.any() else 1.0
    share_b = 1 - dot / (2 * float((b * b).sum())) if b.any() else 1.0
    return share_a * a + share_b * b


def test_adasum_adds_what_differs_and_averages_what_agrees(pools):
    results = pools(4).run(adasum_job)
    assert all(result[0] == results[0][0] for result in results), "bit-identical on all ranks"
    inputs = [adasum_inputs(rank) for rank in range(4)]
    for index, got in enumerate(results[0][0]):
        expected = tree([one[index].double() for one in inputs])
        torch.testing.assert_close(torch.tensor(got), expected.float())
    assert results[0][0][2:] == [[1.0] * 4, [1.0] * 4, [0.0] * 3]
    assert combine(torch.ones(2), torch.zeros(2)).tolist() == [1.0, 1.0]


def refusals_job(rank: int, world: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, match in [
        ({"op": "max"}, "op is 'max'"),
        ({"op": hvd.Max}, "op is hvd.Max"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "must be 1.0"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor is 0.0"),
        ({"sparse_as_dense": True}, "sparse=False"),
        ({"compression": "fp16"}, "compression is 'fp16'"),
        ({"op": hvd.Adasum, "compression": tw.TopK()}, "compression is TopK"),
    ]:
        with pytest.raises(tw.UsageError, match=match):
            hvd.DistributedOptimizer(optimizer, **options)
    with pytest.raises(tw.UsageError, match="a power of 2"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    with pytest.raises(tw.UsageError, match="the other operations"):
        hvd.reducescatter(torch.ones(3), op=hvd.Adasum)


def test_what_does_not_fit_is_refused_before_anything_is_sent(pools):
    pools(3).run(refusals_job)


def test_names_that_are_left_out_say_what_to_do_instead():
    with pytest.raises(
        tw.UsageError, match=r"hvd.elastic is not covered .* torchrun --max-restarts"
    ):
        hvd.elastic  # noqa: B018
    assert not hasattr(hvd, "ProcessSet") and not hasattr(hvd, "no_such_name")


def passes_job(rank: int, world: int) -> bytes:
    """Steps after 3, 3 and 1 backwards where 3 were announced, against the same gradients summed in one."""
    prints = []
    for apart in (True, False):
        model = make_cnn()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=3 if apart else 1,
        )
        data = iter(batches(rank, 7))
        for count in (3, 3, 1):
            optimizer.zero_grad()
            losses = [
                nn.functional.cross_entropy(model(x), y)
                for x, y in [next(data) for _ in range(count)]
            ]
            if apart:
                for loss in losses:
                    loss.backward()
            else:
                sum(losses).backward()
            optimizer.step()
        optimizer.close()
        prints.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(prints[0], prints[1], rtol=1e-4, atol=1e-5)
    return fingerprint(model)


def test_a_step_after_fewer_backwards_than_announced_exchanges_what_there_is(pools):
    assert len(set(pools(3).run(passes_job))) == 1


def join_job(rank: int, world: int, method) -> tuple[int, bytes, float]:
    model = make_cnn()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model=model, compression=method
    )
    steps = {0: 2, 1: 5, 2: 3}[rank]
    for images, labels in batches(rank, steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    # Afterwards everything goes on.
    for images, labels in batches(rank, 2, seed=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    done = optimizer.handle.stats().steps
    optimizer.close()
    return last, fingerprint(model), done


@pytest.mark.parametrize("method", [tw.Dense(), tw.ADTopK(density=0.05)], ids=["dense", "adtopk"])
def test_ranks_that_run_out_of_data_join(pools, method):
    results = pools(3).run(join_job, method)
    assert {last for last, _, _ in results} == {1}
    assert len({prints for _, prints, _ in results}) == 1
    # Five of rank 1, one in which nobody had a gradient, two afterwards.
    assert {done for _, _, done in results} == {8}


def batch_norm_job(rank: int, world: int) -> None:
    """Against torch's own batch norm over the whole batch."""
    torch.manual_seed(0)
    whole = torch.randn(2 * world + 1, 4, 5, requires_grad=True)
    sizes = [2] * (world - 1) + [3]
    weight = torch.randn(2 * world + 1, 4, 5)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    mine = whole.detach()[own].clone().requires_grad_()
    ours, theirs = hvd.SyncBatchNorm(4), nn.BatchNorm1d(4)
    (ours(mine) * weight[own]).sum().backward()
    (theirs(whole) * weight).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[own])
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert hvd.allreduce(ours.weight.grad, op=hvd.Sum).allclose(theirs.weight.grad, atol=1e-4)
    torch.testing.assert_close(ours.eval()(mine), theirs.eval()(whole)[own])


def test_sync_batch_norm_is_batch_norm_over_all_ranks(pools):
    pools(3).run(batch_norm_job)
