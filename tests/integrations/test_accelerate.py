"""Accelerate: prepared models, accumulation, save_state and load_state, trackers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.integrations.common import (
    METHOD,
    are_identical,
    as_launched,
    flat,
    make_data,
    make_model,
)
from tests.lanes import slow

pytest.importorskip("accelerate")


def start(momentum: float = 0.9, **options: Any) -> tuple[Any, ...]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    return accelerator, *prepare(accelerator, momentum)


def prepare(accelerator: Any, momentum: float = 0.9) -> tuple[Any, ...]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-3)
    loader = torch.utils.data.DataLoader(make_data(), batch_size=8)
    return tuple(accelerator.prepare(model, optimizer, loader))


def train(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, batches: int) -> None:
    for _, (inputs, labels) in zip(range(batches), loader, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def resume_job(rank: int, world: int, folder: Path, method: tw.Method) -> dict[str, Any]:
    from thinwire.integrations.accelerate import compress

    as_launched(rank, world)
    accelerator, model, optimizer, loader = start()
    handle = compress(accelerator, model, method, optimizer=optimizer, deterministic=True)
    train(accelerator, model, optimizer, loader, 8)
    steps = handle.stats().steps
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    files = sorted(path.name for path in folder.glob("thinwire*"))
    train(accelerator, model, optimizer, loader, 8)
    wanted = flat(model)

    ends = []
    for restored in (True, False):
        accelerator, model, optimizer, loader = start()
        if not restored:
            # Its state is not asked for.
            handle = tw.attach(model, method, optimizer=optimizer.optimizer, deterministic=True)
        else:
            handle = compress(accelerator, model, method, optimizer=optimizer, deterministic=True)
        accelerator.load_state(str(folder))
        train(accelerator, model, optimizer, loader, 8)
        ends.append(torch.equal(flat(model), wanted))
    logged: list[Any] = []
    handle.log(lambda values, step: logged.append((values["thinwire/ratio"], step)))
    return {
        "steps": steps,
        "files": files,
        "ends": ends,
        "identical": are_identical(wanted),
        "logged": logged,
    }


@pytest.mark.parametrize("method", [slow(METHOD), tw.DGC(density=0.05)], ids=["topk", "dgc"])
def test_resuming_is_bit_exact_with_its_state_only(workers, tmp_path, method):
    for result in workers.run(resume_job, tmp_path, method):
        assert result["steps"] == 4, "8 micro-batches are 4 exchanges"
        assert result["files"] == ["thinwire_0.pt", "thinwire_1.pt"]
        assert result["ends"] == [True, False]
        assert result["identical"]
        ((ratio, step),) = result["logged"]
        assert ratio > 5 and step == 4


def two_models_job(rank: int, world: int, folder: Path) -> tuple[list[str], bool]:
    from thinwire.integrations.accelerate import compress

    as_launched(rank, world)
    accelerator, first, *_ = start()
    second = accelerator.prepare(nn.Linear(64, 64))
    handles = [compress(accelerator, model, METHOD) for model in (first, second)]
    accelerator.save_state(str(folder / "both"))
    accelerator.load_state(str(folder / "both"))
    handles[0].close()
    # What is closed is saved no more.
    accelerator.save_state(str(folder / "one"))
    accelerator.wait_for_everyone()
    return sorted(path.name for path in folder.glob("*/thinwire*_0.pt")), handles[0].closed


def test_two_models_of_one_accelerator_have_files_of_their_own(workers, tmp_path):
    for names, closed in workers.run(two_models_job, tmp_path):
        assert names == ["thinwire2_0.pt", "thinwire2_0.pt", "thinwire_0.pt"]
        assert closed


def anew_job(rank: int, world: int, folder: Path) -> bool:
    """A second model in place of the first, as where a job begins anew in one process."""
    from thinwire.integrations.accelerate import compress

    as_launched(rank, world)
    accelerator, model, optimizer, loader = start()
    handle = compress(accelerator, model, METHOD)
    train(accelerator, model, optimizer, loader, 4)
    accelerator.save_state(str(folder))
    held = [handle.residual("0.weight")]
    handle.close()
    accelerator.free_memory()

    model, *_ = prepare(accelerator)
    handle = compress(accelerator, model, METHOD)
    accelerator.load_state(str(folder))
    held.append(handle.residual("0.weight"))
    handle.close()
    return bool(held[0].any()) and torch.equal(*held)


def test_a_handle_in_place_of_a_closed_one_finds_its_files(workers, tmp_path):
    assert workers.run(anew_job, tmp_path) == [True, True]


@pytest.mark.slow
def test_what_accelerate_shards_resumes_as_if_nothing_had_happened(tmp_path):
    """Accelerate shards models on accelerators only; the script tells it that the CPU is one."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
            *("-m", "tests.scripts.accelerate_on_cpu", "topk", "adtopk", "dense"),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("resumed, differs by 0") == 3


def test_one_process_gets_a_sentence():
    from accelerate.state import AcceleratorState

    from thinwire.integrations.accelerate import compress

    accelerator, model, *_ = start()
    try:
        with pytest.raises(tw.UsageError, match="accelerator has 1 process"):
            compress(accelerator, model, METHOD)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
