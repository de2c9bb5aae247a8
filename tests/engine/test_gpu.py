"""Exchanges on a GPU: the same bits as on the CPU, no host waits, and NCCL against gloo."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.exchange.ranks import Ranks, gradients
from thinwire.bench.exchange_cases import ExchangePlan, Worker, make_gradient, make_group
from thinwire.engine.drivers import run_inline
from thinwire.engine.network import Network
from thinwire.engine.stalls import StallWatch
from thinwire.engine.streams import StreamDriver
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.dsa import SplitGather
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.requests import Place, Sum
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.tree import TreeMerge
from thinwire.observe import watch
from thinwire.observe.ledger import Ledger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXCHANGES = {
    "split": SplitReduce(),
    "full": SplitReduce(contribution="full"),
    "exclusive": Exclusive(),
    "leader": CyclicLeader(),
    "dsa": SplitGather(),
    "reused": ReusedThresholds(),
    "tree": TreeMerge(),
}
SHAPES = [(64, 96), (3000,), (150, 90)]


@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EXCHANGES)
def test_same_bits_as_on_the_cpu(name, values):
    cpu = Ranks(EXCHANGES[name], 3, SHAPES, 0.05, values)
    gpu = Ranks(EXCHANGES[name], 3, SHAPES, 0.05, values, device="cuda")
    for seed in range(3):
        inputs = gradients("heavy tail", 3, cpu.numel, seed)
        expected = cpu.step(inputs)
        got = gpu.step([g.cuda() for g in inputs])
        assert torch.equal(got.update.cpu(), expected.update)
        for rank in range(3):
            assert torch.equal(got.after[rank].cpu(), expected.after[rank])


@pytest.mark.parametrize("name", ["split", "full", "exclusive", "leader", "tree", "dsa"])
def test_the_host_never_waits(name):
    assert EXCHANGES[name].host_sync_free
    ranks = Ranks(EXCHANGES[name], 3, SHAPES, 0.05, "bf16", device="cuda")
    inputs = [g.cuda() for g in gradients("normal", 3, ranks.numel)]
    had = torch.ones(3, len(SHAPES), dtype=torch.bool, device="cuda")
    for _ in range(3):
        # A full round of parts, so that every table has been made.
        ranks.step(inputs, had=had)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ranks.step(inputs, had=had)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class SlowNetwork(Network):
    """Answers at once on the host and late on the device."""

    def __init__(self) -> None:
        self.place, self.ledger = Place(0, 2), Ledger(2)
        self.groups, self.stalls = {}, StallWatch(60.0)

    def perform(self, batch, what=""):
        torch.cuda._sleep(200_000_000)
        return [request.tensor for request in batch]


def test_what_was_made_before_the_first_request_is_there_after_it():
    """The host is done with the program, and has freed its tensors, long before the side stream reads them."""

    def program():
        made = torch.arange(1000, device="cuda")
        yield (Sum(torch.zeros(1, device="cuda")),)
        return made + 1

    driver = StreamDriver(SlowNetwork(), torch.device("cuda", torch.cuda.current_device()))
    future = driver.start(program())
    for _ in range(100):
        torch.full((1000,), -1, device="cuda")
    assert future.wait().tolist() == list(range(1, 1001))
    driver.close()


def test_all_that_the_thread_of_the_exchange_does_is_a_station():
    driver = StreamDriver(SlowNetwork(), torch.device("cuda", torch.cuda.current_device()))
    seen: list[tuple[str, str]] = []

    def note(name: str) -> AbstractContextManager[None]:
        seen.append((name, threading.current_thread().name))
        return nullcontext()

    with watch(note):
        driver.hand_over(lambda: None, print)
        driver.catch_up()
    assert set(seen) == {("thinwire::driver", "thinwire-exchange")}
    driver.close()


def test_in_turn_the_caller_does_the_host_work_behind_its_own_stream():
    driver = StreamDriver(SlowNetwork(), torch.device("cuda", torch.cuda.current_device()))
    driver.in_turn = True
    seen: list[Any] = []
    counter = torch.zeros(1000, device="cuda")
    torch.cuda._sleep(20_000_000)
    counter += 1
    driver.hand_over(lambda: seen.append((threading.current_thread(), counter + 1)), print)
    thread, result = seen[0]
    assert thread is threading.current_thread()
    driver.catch_up()
    assert bool((result == 2).all())
    driver.hand_over(lambda: 1 / 0, seen.append)
    assert isinstance(seen[1], ZeroDivisionError)
    driver.close()


def nccl_rank(rank: int, world: int, folder: str) -> None:
    # Several ranks share the GPU when each claims a host of its own.
    os.environ["NCCL_HOSTID"] = f"host{rank}"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/s", rank=rank, world_size=world)
    gloo = dist.new_group(backend="gloo")
    assert dist.group.WORLD is not None
    measured = ExchangePlan(methods="oktopk,oktopk-full,exclusive,leader,topkdsa,gtopk,topka")
    for case in measured.cases():
        updates = []
        for group, device in ((dist.group.WORLD, "cuda"), (gloo, "cpu")):
            network = Network(group, Ledger(world))
            numel = 1 << 16
            worker = Worker(
                case.make(measured), make_group(numel, torch.device(device)), network.place
            )
            gradient = make_gradient(numel, rank, 0, torch.device("cpu")).to(device)
            updates.append(run_inline(worker.open(gradient).program, network).update.cpu())
        scale = updates[1].abs().max()
        bound = 4 * world * torch.finfo(torch.float32).eps * scale
        assert float((updates[0] - updates[1]).abs().max()) <= bound, case.name
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(240)
def test_nccl_agrees_with_gloo_on_four_ranks():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(nccl_rank, (4, folder), nprocs=4)
