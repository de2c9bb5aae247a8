"""Simulated workers: data-parallel training with N workers in one process, on one device.

Every worker has a pipeline, a memory and random generators of its own, as N processes have; the exchange runs on
virtual ranks. The model and its parameters exist once, because replicas are identical anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.adapters.checks import check_bucket_mb, check_parameters
from thinwire.adapters.fusion import fuse
from thinwire.adapters.gradient_stack import GradientStack
from thinwire.adapters.handles import make_handle
from thinwire.adapters.simulate_graph import Compute, Graphs, loss_of, run_pass
from thinwire.adapters.simulate_report import SimulationReport
from thinwire.adapters.simulate_state import BufferStates, RandomStates
from thinwire.engine.moving import refuse_to_move
from thinwire.engine.opaque import opaque
from thinwire.engine.virtual import VirtualCluster
from thinwire.errors import UsageError
from thinwire.handle import Handle
from thinwire.layout import describe_module
from thinwire.methods.base import Method
from thinwire.observe.stats import Stats
from thinwire.optim.takeover import take_over
from thinwire.plan.policy import Rule, check_settings
from thinwire.plan.report import PlanReport
from thinwire.validate import check_bool, check_instance, check_positive_int


def simulate(
    model: nn.Module,
    method: Method,
    *,
    workers: int,
    optimizer: Optimizer | None = None,
    policy: Sequence[Rule] | None = None,
    grad_scaler: Any = None,
    deterministic: bool = False,
    skippable: bool = False,
    skipped: str = "forget",
    bucket_mb: float = 25,
    graph: bool = False,
) -> Simulation:
    """Train a plain model as `workers` data-parallel workers would, in this process.

    With `deterministic` and one thread, parameters are bit for bit those of as many gloo processes under DDP; without it
    only dense sums are added in another order.

    Args:
        model: A plain module on one device.
        method: How gradients are sent, such as tw.ADTopK(density=0.01).
        workers: How many workers.
        optimizer: Needed by methods that take momentum over.
        policy: Rules for single parameters; the first match wins.
        grad_scaler: The GradScaler of the loss, if there is one; what is held back is then stored without the loss scale.
        deterministic: Add dense parts in rank order.
        skippable: You may call `handle.discard_step()`: a step that is not applied then leaves no trace in what is held
            back. That takes 4 bytes more per compressed parameter; with a `grad_scaler` it is always on.
        skipped: What a skipped step leaves: with "forget" nothing. With "keep" what it sent is held back again, with the
            finite part of its gradient, and no extra bytes are needed.
        bucket_mb: Megabytes of a bucket; 0 for a bucket per parameter.
        graph: Capture forward and backward as CUDA graphs where `run` or `step` is used. Where that cannot work a message
            says so.

    >>> sim = tw.simulate(model, tw.ADTopK(density=0.01), workers=8)
    >>> for rank in sim.ranks:
    ...     with sim.worker(rank):
    ...         loss_function(model(inputs[rank]), targets[rank]).backward()
    >>> sim.exchange()
    >>> optimizer.step()
    """
    check_positive_int("workers", workers)
    check_settings(method, policy, deterministic)
    check_bool("graph", graph)
    check_bucket_mb(bucket_mb)
    check_model(model)
    described = describe_module(model)
    parameters = {name: pair[0] for name, pair in described.items()}
    check_parameters(model, parameters)
    device = find_device(parameters)
    cluster = VirtualCluster(workers)
    takeover = take_over(method, optimizer, parameters)
    infos = {name: pair[1] for name, pair in described.items()}
    # Nobody waits for anybody: buckets are exchanged one by one.
    handles = [
        make_handle(
            infos,
            method,
            lambda driver=driver: driver,  # type: ignore[misc]
            device=device,
            policy=policy,
            grad_scaler=grad_scaler,
            deterministic=deterministic,
            skippable=skippable,
            skipped=skipped,
            takeover=takeover,
            coalesce_bytes=0,
        )
        for driver in cluster.drivers
    ]
    for handle in handles:
        handle.movable(refuse_to_move)
    if takeover is not None:
        takeover.commit(handles)
    buffers = fuse(list(described.values()), int(bucket_mb * 2**20))
    stacks = [GradientStack(buffer, workers) for buffer in buffers]
    return Simulation(
        model, cluster, handles, stacks, Graphs(model, list(parameters.values())) if graph else None
    )


def check_model(model: Any) -> None:
    check_instance("model", model, nn.Module, "a torch.nn.Module")
    if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        raise UsageError("model is a DistributedDataParallel; pass the plain model inside it")


def find_device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) != 1:
        raise UsageError(
            f"the model's parameters are on {', '.join(sorted(map(str, devices)))}; they must be on one device"
        )
    return devices.pop()


class Simulation:
    """N workers that share a model. Made by `tw.simulate`, which hands it the `cluster` of virtual ranks, the workers' `handles`,
    their gradients in `stacks`, and the CUDA `graphs` if it uses any.

    A step: every worker computes its gradient (`worker`, or `run`), `exchange` puts the averaged update into `p.grad`,
    the optimizer steps. Gradients of earlier steps need no `zero_grad`: a worker starts from none.
    """

    def __init__(
        self,
        model: nn.Module,
        cluster: VirtualCluster,
        handles: Sequence[Handle],
        stacks: Sequence[GradientStack],
        graphs: Graphs | None,
    ) -> None:
        self.model = model
        self.handles: list[Handle] = list(handles)
        """Of every worker, what `tw.attach` would have returned to it; change them all at once, by `switch`."""
        self.ranks = range(len(handles))
        self._cluster = cluster
        self.stacks = list(stacks)
        """The gradients of all workers, a stack per bucket."""
        self._graphs = graphs
        self._random = RandomStates(len(handles), stacks[0].rows.device)
        self._buffers = BufferStates(list(model.buffers()))
        self._computed: set[int] = set()
        """Workers that have a gradient in this step."""
        self._working: int | None = None
        self._steps = 0
        """Exchanged since this was made; what was restored is not among them."""
        self._worker_seconds = self._exchange_seconds = 0.0

    @property
    def workers(self) -> int:
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        return self.stacks[0].rows.device

    @property
    def graphed(self) -> bool:
        """Whether `run` replays CUDA graphs: they were asked for, and have worked so far."""
        return self._graphs is not None and self._graphs.enabled

    # -- one step ----------------------------------------------------------------------------------------------

    @contextmanager
    def worker(self, rank: int) -> Iterator[None]:
        """Be one worker: what `backward()` computes inside is its gradient; several of them, also in several blocks, add
        up until `exchange`.

        Torch's global generators are the worker's own inside and the caller's again afterwards.
        """
        self._check_rank(rank)
        if self._working is not None:
            raise UsageError(f"worker {rank} begins inside the block of worker {self._working}")
        began = time.perf_counter()
        callers = self._random.read()
        self._random.write(self._random.states[rank])
        self._buffers.load(rank)
        self._working = rank
        self._lend()
        try:
            yield
        except BaseException:
            for stack in self.stacks:
                stack.drop()
            raise
        else:
            self._collect()
            self._computed.add(rank)
        finally:
            self._working = None
            self._random.states[rank] = self._random.read()
            self._random.write(callers)
            self._worker_seconds += time.perf_counter() - began

    def run(self, compute: Compute, *inputs: Any) -> Any:
        """Forward and backward of one micro-batch, inside a worker's block: `compute(*inputs)` returns the loss, or a
        tuple that begins with it. Returns the same, detached.

        With `graph=True` hand over the same function every time, and everything that changes as an input; what the
        function does beside computing happens only when it is captured.
        """
        if self._working is None:
            raise UsageError(
                "run was called outside of a block; call it under `with sim.worker(rank)`"
            )
        if self._graphs is not None and self._graphs.enabled:
            key = self._graphs.key(compute, inputs)
            if self._graphs.has(key) or self._capture(key, compute, inputs):
                result = self._graphs.replay(key, inputs)
                # Out of the graph's own tensors, which the next replay overwrites.
                self._collect()
                self._lend()
                return result
        return run_pass(compute, inputs)

    @torch.no_grad()
    def put_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Take gradients that were computed for all workers at once, in place of `worker` blocks.

        Computing them together needs far fewer launches than one worker after another.

        Args:
            gradients: For every trainable parameter, by its name, a tensor of [workers, *its shape].

        >>> compute = torch.func.vmap(torch.func.grad(loss_of_weights), in_dims=(None, 0))
        >>> sim.put_gradients(compute(dict(model.named_parameters()), batches))
        >>> sim.exchange()
        """
        shapes = {
            slot.name: (self.workers, *slot.shape)
            for stack in self.stacks
            for slot in stack.buckets[0].layout.slots
        }
        if odd := sorted(shapes.keys() ^ gradients.keys()):
            kind = "not given" if odd[0] in shapes else "not a trainable parameter"
            raise UsageError(f"gradients: {odd[0]!r} is {kind}; name every trainable parameter")
        for name, shape in shapes.items():
            if tuple(gradients[name].shape) != shape:
                raise UsageError(
                    f"the gradient of {name!r} has the shape {tuple(gradients[name].shape)}; it must be {shape}, "
                    "workers first"
                )
        for stack in self.stacks:
            stack.put(gradients)
        self._computed.update(self.ranks)

    def _capture(self, key: Any, compute: Compute, inputs: Sequence[Any]) -> bool:
        assert self._graphs is not None
        self._collect()
        random, buffers = self._random.read(), self._buffers.copy()
        done = self._graphs.capture(key, compute, inputs)
        self._random.write(random)
        self._buffers.put(buffers)
        self._lend()
        return done

    def _lend(self) -> None:
        assert self._working is not None
        for stack in self.stacks:
            stack.lend(self._working)

    def _collect(self) -> None:
        assert self._working is not None
        for stack in self.stacks:
            stack.collect(self._working)

    @torch.no_grad()
    @opaque
    def exchange(self) -> None:
        """Exchange the workers' gradients; afterwards `p.grad` is the update that every worker would have."""
        if missing := [rank for rank in self.ranks if rank not in self._computed]:
            raise UsageError(
                f"workers {missing} have no gradient in this step; every worker must run backward before exchange()"
            )
        began = time.perf_counter()
        self._computed.clear()
        self._buffers.end_step()
        for stack in self.stacks:
            started = [
                handle.reducer.reduce(bucket)
                for handle, bucket in zip(self.handles, stack.buckets, strict=True)
            ]
            for future in started:
                if future.done():
                    # A rank that could not start says why.
                    future.value()
            self._cluster.run()
            stack.deliver()
        for handle in self.handles:
            handle.reducer.end_backward()
        self._steps += 1
        self._exchange_seconds += time.perf_counter() - began

    def step(self, compute: Compute, batches: Sequence[Sequence[Any]]) -> Tensor:
        """`run` once for every worker, with its inputs, then `exchange`; returns the workers' losses."""
        if len(batches) != self.workers:
            raise UsageError(
                f"batches has {len(batches)} entries; it must have one for each of the {self.workers} workers"
            )
        losses = []
        for rank in self.ranks:
            with self.worker(rank):
                losses.append(loss_of(self.run(compute, *batches[rank])))
        self.exchange()
        return torch.stack(losses)

    # -- the handles, all at once ------------------------------------------------------------------------------

    def stats(self, *, dimensions: bool = False) -> Stats:
        """What worker 0 sent so far; `handles[rank].stats()` for another."""
        return self.handles[0].stats(dimensions=dimensions)

    def plan(self) -> PlanReport:
        """What happens to every parameter and why; print it."""
        return self.handles[0].plan()

    def gradient(self, name: str, rank: int) -> Tensor:
        """What a worker has computed of a parameter's gradient in this step; after `exchange`, the update."""
        self._check_rank(rank)
        for stack in self.stacks:
            for slot in stack.buckets[rank].layout.slots:
                if slot.name == name:
                    return slot.view(stack.buckets[rank].flat).clone()
        raise UsageError(f"name is {name!r}; the model has no such trainable parameter")

    def residual(self, name: str, rank: int) -> Tensor:
        """What a worker holds back of a parameter."""
        self._check_rank(rank)
        return self.handles[rank].residual(name)

    def switch(self, method: Method, *, policy: Sequence[Rule] | None = None) -> None:
        """Use another method from the next step on."""
        for handle in self.handles:
            handle.switch(method, policy=policy)

    def discard_step(self) -> None:
        """Say that the last step was not applied: it leaves no trace in any worker's memory."""
        for handle in self.handles:
            handle.discard_step()

    def report(self) -> SimulationReport:
        """Memory and time so far; print it."""
        return SimulationReport(
            workers=self.workers,
            steps=self._steps,
            parameter_bytes=sum(p.nbytes for p in self.model.parameters()),
            gradient_bytes=sum(stack.rows.nbytes for stack in self.stacks),
            memory_bytes=sum(handle.stats().memory_bytes for handle in self.handles),
            buffer_bytes=self._buffers.nbytes(),
            worker_seconds=self._worker_seconds,
            exchange_seconds=self._exchange_seconds,
        )

    def close(self) -> None:
        """Free what the workers hold and give the optimizer its momentum back."""
        for handle in self.handles[1:]:
            # One warning about what is dropped is enough.
            handle.reducer.release()
            handle.close()
        self.handles[0].close()

    # -- saving ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All workers' states in one, each under its rank, and their random generators: plain tensors and numbers.

        A real worker loads its own part of it, and a simulation loads the list of real workers' states.
        """
        states = [handle.state_dict() for handle in self.handles]
        ranks = {key: content for state in states for key, content in state["ranks"].items()}
        return {**states[0], "ranks": ranks, "random": self._random.state_dict()}

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        on_world_change: str | None = None,
    ) -> None:
        """Restore all workers, or, from another number of them, their mean or nothing."""
        states = [state] if isinstance(state, Mapping) else list(state)
        for handle in self.handles:
            handle.load_state_dict(states, on_world_change=on_world_change)
        for one in states:
            self._random.load_state_dict(one.get("random", {}))

    def _check_rank(self, rank: int) -> None:
        if rank not in self.ranks:
            raise UsageError(
                f"rank is {rank!r}; it must be a whole number from 0 to {self.workers - 1}"
            )
