"""Whatever DDP is set to, replicas stay identical and nothing is lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.cluster import sparse
from tests.models import fingerprint
from thinwire.wire.codec import Codec


class Net(nn.Module):
    """A convolution, two linear layers of one shape that may be tied, a normalisation; a branch that can be skipped."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.inner = nn.Linear(128, 128)
        self.outer = nn.Linear(128, 128)
        self.branch = nn.Linear(128, 64)
        self.head = nn.Linear(128, 10)
        if tied:
            self.outer.weight = self.inner.weight

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean(-2).flatten(1)
        x = self.outer(self.inner(x).relu())
        extra = self.branch(x).mean() if branch else 0.0
        return self.head(x) + extra


class Odd(Net):
    """Parameters no layer has: a scalar, an empty one, a transposed one, one with gaps, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.across = nn.Parameter(torch.randn(10, 64).t())
        self.gaps = nn.Parameter(torch.randn(16, 80)[:, ::2])
        self.frozen = nn.Parameter(torch.randn(16, 40), requires_grad=False)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        out = super().forward(x, branch) * self.gain + self.empty.sum()
        return out + out.detach() @ self.across.t() @ self.across / 640 + self.mixed()

    def mixed(self) -> Tensor:
        return (self.gaps * self.frozen).square().mean()


class Mixed(Net):
    """Its head computes in float64: DDP never puts parameters of two dtypes into one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.head.double()

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean(-2).flatten(1)
        x = self.outer(self.inner(x).relu())
        extra = self.branch(x).mean() if branch else 0.0
        return self.head(x.double()) + extra


def wrap(rank: int, model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    """A model whose random inputs differ between ranks from here on."""
    ddp = DistributedDataParallel(model or Net(), **options)
    torch.manual_seed(100 + rank)
    return ddp


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 3, 4, 16).to(dtype)


def backward(ddp: nn.Module, branch: bool = True, dtype: torch.dtype = torch.float32) -> None:
    ddp(images(dtype), branch).square().mean().backward()


@dataclass
class Case:
    model: Callable[[], nn.Module] = Net
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    bucket_mb: float = 0.02
    options: dict[str, Any] = field(default_factory=dict)
    unused: Callable[[int, int], bool] = lambda step, rank: False
    world: int = 2
    rebuilds: bool = True
    min_buckets: int = 2


CASES = {
    "bucket rebuild": Case(world=3),
    "static_graph": Case(options={"static_graph": True}),
    "static_graph, all in view": Case(
        options={"static_graph": True, "gradient_as_bucket_view": True}, world=3
    ),
    "find_unused_parameters": Case(options={"find_unused_parameters": True}, rebuilds=False),
    "unused on all ranks": Case(
        options={"find_unused_parameters": True},
        unused=lambda step, rank: step in (1, 2),
        rebuilds=False,
    ),
    "unused on all ranks, in view": Case(
        options={"find_unused_parameters": True, "gradient_as_bucket_view": True},
        unused=lambda step, rank: step in (1, 2),
        rebuilds=False,
    ),
    "unused on some ranks": Case(
        options={"find_unused_parameters": True},
        unused=lambda step, rank: rank == step % 3,
        rebuilds=False,
        world=3,
    ),
    "gradient_as_bucket_view": Case(options={"gradient_as_bucket_view": True}),
    "channels_last": Case(channels_last=True),
    "tied weights": Case(model=lambda: Net(tied=True)),
    "odd parameters": Case(model=Odd, world=3),
    "odd parameters, in view": Case(model=Odd, options={"gradient_as_bucket_view": True}),
    "two dtypes": Case(model=Mixed),
    "two dtypes, static_graph": Case(model=Mixed, options={"static_graph": True}),
    "bfloat16 model": Case(dtype=torch.bfloat16),
    "float16 model": Case(dtype=torch.float16, world=3),
    "float64 model": Case(dtype=torch.float64),
    "more than 10 buckets": Case(bucket_mb=1e-6, min_buckets=11),
}


class Books:
    """Compares, over all ranks, what backward made with what was delivered and what is held back."""

    def __init__(self, ddp: DistributedDataParallel, handle: tw.Handle) -> None:
        self.ddp, self.handle = ddp, handle
        self.names = [row.info.name for row in handle.plan() if not row.dense]
        self.local: dict[str, Tensor] = {}
        for name in self.names:
            parameter = ddp.module.get_parameter(name)
            parameter.register_hook(lambda g, n=name: self.local.update({n: g.double()}))

    def open(self) -> None:
        self.local.clear()
        self.before = {name: self.handle.residual(name).double() for name in self.names}

    def check(self) -> None:
        for name in self.names:
            c = self.before[name] + self.local.get(name, 0.0)
            held = self.handle.residual(name).double()
            assert held.shape == self.ddp.module.get_parameter(name).shape
            parts = torch.stack([c, held])
            dist.all_reduce(parts)
            gradient = self.ddp.module.get_parameter(name).grad
            delivered = 0.0 if gradient is None else gradient.double()
            error = (self.handle.world * delivered + parts[1] - parts[0]).abs().sum()
            assert error <= 1e-6 * parts[0].abs().sum(), f"{name} lost {float(error)}"


def case_job(rank: int, world: int, name: str) -> bytes:
    case = CASES[name]
    model = case.model()
    if case.dtype != torch.float32:
        model = model.to(case.dtype)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    ddp = wrap(rank, model, bucket_cap_mb=case.bucket_mb, **case.options)
    handle = tw.attach(ddp, sparse("bf16"))
    books = Books(ddp, handle)
    assert {"conv.weight", "inner.weight", "head.weight"} <= set(books.names)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    layouts = set()
    for step in range(5):
        books.open()
        optimizer.zero_grad()
        backward(ddp, not case.unused(step, rank), case.dtype)
        books.check()
        optimizer.step()
        layouts.add(tuple(handle.reducer.plans))
    assert (len(layouts) > 1) == case.rebuilds
    assert len(handle.reducer.plans) >= case.min_buckets
    assert "frozen" not in handle.stats().parameters
    handle.close()
    return fingerprint(ddp)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost_and_replicas_agree_under(pools, name):
    prints = pools(CASES[name].world).run(case_job, name)
    assert len(set(prints)) == 1


def unused_comes_back_job(rank: int, world: int) -> None:
    ddp = wrap(rank, find_unused_parameters=True)
    handle = tw.attach(ddp, sparse("bf16"))
    for step in range(3):
        ddp.zero_grad()
        held = handle.residual("branch.weight")
        backward(ddp, step == 0)
        if step:
            assert ddp.module.branch.weight.grad is None
            assert held.any() and torch.equal(handle.residual("branch.weight"), held)
    handle.close()


def test_residual_of_a_parameter_no_rank_used_stays_as_it_is(pools):
    pools(3).run(unused_comes_back_job)


def join_job(rank: int, world: int) -> tuple[bytes, int]:
    ddp = wrap(rank, bucket_cap_mb=0.02)
    handle = tw.attach(ddp, sparse("bf16"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join():
        for _ in range(3 + 2 * rank):
            optimizer.zero_grad()
            backward(ddp)
            optimizer.step()
    steps = handle.stats().steps
    handle.close()
    return fingerprint(ddp), steps


def test_join_with_uneven_inputs_ends_with_equal_replicas(pools):
    results = pools(3).run(join_job)
    assert len(set(results)) == 1
    assert results[0][1] == 3 + 2 * 2


def reattach_job(rank: int, world: int) -> bytes:
    ddp = wrap(rank, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)

    def step() -> Tensor:
        optimizer.zero_grad()
        backward(ddp)
        optimizer.step()
        return ddp.module.inner.weight.grad

    handle = tw.attach(ddp, sparse("bf16"))
    step()
    step()
    assert handle.stats().memory_bytes > 0
    handle.close()
    handle.close()
    assert handle.stats().memory_bytes == 0
    averaged = step()
    assert averaged.count_nonzero() > 0.5 * averaged.numel(), "closed means dense"
    with pytest.raises(tw.UsageError, match="closed"):
        handle.switch(tw.Dense())
    again = tw.attach(ddp, sparse("bf16"))
    for _ in range(3):
        sent = step()
    assert again.stats().steps == 3
    assert sent.count_nonzero() < 0.3 * sent.numel()
    again.close()
    return fingerprint(ddp)


def test_close_makes_it_dense_and_attach_again_starts_afresh(pools):
    assert len(set(pools(2).run(reattach_job))) == 1


def switch_job(rank: int, world: int) -> None:
    ddp = wrap(rank, bucket_cap_mb=0.02)
    handle = tw.attach(ddp, tw.TopK(density=0.02, dense_fallback=False))
    books = Books(ddp, handle)

    def step() -> None:
        books.open()
        ddp.zero_grad()
        backward(ddp)
        books.check()

    step()
    step()
    held = handle.residual("inner.weight")
    handle.switch(sparse("bf16", density=0.05))
    assert torch.equal(handle.residual("inner.weight"), held)
    step()
    handle.switch(tw.Dense())
    assert "sends what is held back once" in str(handle.plan())
    step()
    assert not handle.residual("inner.weight").any()
    step()
    assert handle.stats().memory_bytes == 0
    assert "sends what is held back once" not in str(handle.plan())
    flushes = {k: v.messages for k, v in handle.ledger.rows().items() if k[0].startswith("flush")}
    step()
    after = {k: v.messages for k, v in handle.ledger.rows().items() if k[0].startswith("flush")}
    assert flushes and flushes == after, "flushed more than once"
    handle.close()


def test_switch_keeps_the_residual_and_dense_flushes_it_exactly_once(pools):
    pools(3).run(switch_job)


def discard_job(rank: int, world: int) -> None:
    ddp = wrap(rank)
    handle = tw.attach(ddp, sparse("bf16"), skipped="keep")
    books = Books(ddp, handle)
    for step in range(4):
        books.open()
        ddp.zero_grad()
        backward(ddp)
        if step == 2:
            handle.stats()
            handle.discard_step()
            ddp.zero_grad()
        books.check()
    handle.close()


def test_discarded_step_that_is_kept_loses_nothing(pools):
    pools(2).run(discard_job)


def copies_job(rank: int, world: int) -> None:
    ddp = wrap(rank)
    handle = tw.attach(ddp, sparse())
    backward(ddp)
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        twin.zero_grad()
        backward(twin)
        second = tw.attach(twin, sparse())
        for _ in range(2):
            twin.zero_grad()
            backward(twin)
        assert second.stats().steps == 2
        second.close()
    assert handle.stats().steps == 1
    handle.close()


def test_copied_and_pickled_models_work_and_can_be_attached_again(pools):
    pools(2).run(copies_job)


def compiled_job(rank: int, world: int) -> None:
    ddp = wrap(rank)
    handle = tw.attach(torch.compile(ddp, backend="eager"), sparse())
    assert "inner.weight" in [row.info.name for row in handle.plan()]
    handle.close()


def test_compiled_model_is_unwrapped(pools):
    pools(1).run(compiled_job)


def late_freeze_job(rank: int, world: int) -> bytes:
    model = Net()
    ddp = wrap(rank, model, find_unused_parameters=True)
    model.branch.weight.requires_grad_(False)
    handle = tw.attach(ddp, sparse())
    for _ in range(2):
        ddp.zero_grad()
        backward(ddp)
    assert "branch.weight" not in handle.stats().parameters
    handle.close()
    return fingerprint(ddp)


def test_parameter_frozen_after_wrapping_is_left_alone(pools):
    assert len(set(pools(2).run(late_freeze_job))) == 1


def ignored_job(rank: int, world: int) -> None:
    model = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["branch.weight"])
    handle = tw.attach(DistributedDataParallel(model), sparse())
    assert "branch.weight" not in [row.info.name for row in handle.plan()]
    handle.close()


def test_parameter_ddp_ignores_is_not_in_the_plan(pools):
    pools(1).run(ignored_job)


def subgroup_job(rank: int, world: int) -> bytes | None:
    """Two of three ranks train; attach, close and attach again need nobody else."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    ddp = wrap(rank, process_group=group)
    for _ in range(2):
        handle = tw.attach(ddp, sparse("bf16"))
        assert (handle.rank, handle.world) == (rank // 2, 2)
        for _ in range(2):
            ddp.zero_grad()
            backward(ddp)
        handle.close()
    twin = dist.new_group([0, 2], use_local_synchronization=True)
    handle = tw.attach(ddp, sparse("bf16"), process_group=twin)
    ddp.zero_grad()
    backward(ddp)
    handle.close()
    return ddp.module.inner.weight.grad.numpy().tobytes()


def test_model_on_some_of_the_ranks_needs_only_those(pools):
    first, outside, last = pools(3).run(subgroup_job)
    assert first == last and outside is None


def error_job(rank: int, world: int) -> None:
    """An error in one bucket ends backward, wedges nothing and loses nothing."""
    ddp = wrap(rank, bucket_cap_mb=0.02)
    handle = tw.attach(ddp, sparse("bf16"))
    books = Books(ddp, handle)
    encode = Codec.encode
    for step in range(4):
        books.open()
        ddp.zero_grad()
        if step == 2:
            Codec.encode = broken_encode
            with pytest.raises(OSError, match="no more paper"):
                backward(ddp)
            Codec.encode = encode
            ddp.zero_grad()
        else:
            backward(ddp)
        books.check()
    handle.close()


def broken_encode(self: Codec, picks: Any, flags: Any) -> Any:
    raise OSError("no more paper")


def test_error_inside_the_hook_ends_backward_and_the_next_step_works(pools):
    pools(2).run(error_job)


def frozen_bucket_job(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.001)
    model[1].requires_grad_(False)
    handle = tw.attach(ddp, sparse("fp32"))
    for step in range(4):
        ddp.zero_grad()
        ddp(torch.randn(4, 32)).sum().backward()
        if rank == 0:
            # Reading ends a step; nothing may depend on who reads.
            handle.stats()
        assert handle.reducer.step == step + 1
    handle.close()


def test_a_bucket_of_parameters_frozen_before_attach_is_no_step_of_its_own(pools):
    pools(3).run(frozen_bucket_job)
