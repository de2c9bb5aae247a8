from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import thinwire as tw
import thinwire.horovod as hvd

SCRIPTS = Path(__file__).parents[1] / "scripts"


def launch(script: str, world: int) -> str:
    """Run a script once per rank with torchrun's variables; the first rank's output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(world):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        env.update(LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        workers.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPTS / script)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [worker.communicate(timeout=90)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), outputs
    return outputs[0]


def check_training(output: str) -> None:
    found = re.search(r"first ([\d.]+) last ([\d.]+) identical (\w+)", output)
    assert found, output
    assert float(found[2]) < 0.5 * float(found[1])
    assert found[3] == "True"


def test_a_horovod_script_runs_with_one_line_changed():
    output = launch("horovod_mnist.py", 2)
    check_training(output)
    assert "ranks 2" in output and "{'classes': 10}" in output


def test_an_acpsgd_script_runs_with_one_line_changed():
    check_training(launch("acpsgd_loop.py", 2))


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
    with pytest.raises(tw.UsageError, match="op is 'max'"):
        hvd.DistributedOptimizer(optimizer, op="max")


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
