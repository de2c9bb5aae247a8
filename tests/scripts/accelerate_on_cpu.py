"""FSDP2 under Accelerate without a GPU: the check of `tests/gpu/hsdp.py` on gloo.

    torchrun --nproc-per-node 4 -m tests.scripts.accelerate_on_cpu topk adtopk

Accelerate shards models on accelerators only. Here two methods of ITS state are replaced, so that it takes gloo for a backend
of several GPUs and the CPU for this process's GPU. Nothing of thinwire is.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from tests.gpu.hsdp import resume_under_accelerate
from tests.gpu.seats import VerdictBook, run_checks, take_seat


def take_the_cpu(state: Any) -> None:
    state.device = torch.device("cpu")


if __name__ == "__main__":
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = take_the_cpu
    book = VerdictBook(None, writes=False)
    code = run_checks(take_seat("cpu"), book, sys.argv[1:], {"accelerate": resume_under_accelerate})
    os._exit(code)
