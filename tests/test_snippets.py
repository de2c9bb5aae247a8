"""The Python of the documentation runs: every block of every page, on two real workers, but for those that say where they run.

A block is run statement by statement among the names that a reader would have: a model, its DDP, an optimizer, a handle. A name is
made when it is first used.
"""

from __future__ import annotations

import ast
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.pages import ROOT, is_python, split_page

ELSEWHERE = {
    "accelerate import compress": "examples/accelerate_loop.py",
    "transformers import compress": "examples/trainer_finetune.py",
    "lightning import Compression": "examples/lightning_module.py",
    "init_device_mesh": "examples/hsdp_loop.py",
    "dcp.save(": "tests/engine/test_checkpoint.py",
    "handle.regroup(": "tests/test_elastic.py",
    "from sparsifier import METHOD": "tests/test_own_method.py",
    "# sparsifier.py": "tests/test_own_method.py",
    "# mine.py": "tests/test_docs.py",
    "workers=8)\nfor step": "tests/test_docs.py",
    "from thinwire.lab import Lab": "tests/lab/test_lab.py",
    "import horovod.torch as hvd  ": "tests/scripts/horovod_mnist.py",
    "import acpsgd  ": "tests/scripts/acpsgd_loop.py",
}
"""Blocks that need another framework, root, a mesh or files of their own, by what is in them, and what runs that code."""
SMALLER = {"per_host=8": "per_host=2", "(8, 32, 256)": "(2, 3)"}
"""What two workers cannot be, and what would take long."""


def blocks(page: Path) -> list[str]:
    found, _ = split_page(page.read_text())
    return [
        block.text
        for block in found
        if block.language == "python" or (not block.language and is_python(block.text))
    ]


def runnable(page: Path) -> Iterator[str]:
    """Of a before and an after, the after."""
    for text in blocks(page):
        if not any(mark in text for mark in ELSEWHERE):
            for there, here in SMALLER.items():
                text = text.replace(there, here)
            yield text.rpartition("\n# after\n")[2]


PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if list(runnable(page))
]


class Reader(dict[str, Any]):
    """The names that a page takes for granted."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(
            torch=torch,
            nn=nn,
            tw=tw,
            thinwire=tw,
            DistributedDataParallel=DistributedDataParallel,
            step=3,
            steps=2,
            steps_per_epoch=10,
            folder="states",
            method=tw.TopK(density=0.05),
            writer=lambda values, step: None,
            loss_function=lambda out: out.square().mean(),
            train_one_step=lambda step: None,
        )
        self.rank = rank
        self.chooses = "advise()" in text

    def __missing__(self, name: str) -> Any:
        make = getattr(self, f"make_{name}", None)
        if make is None:
            raise KeyError(name)
        self[name] = value = make()
        return value

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = OrderedDict(fc=nn.Linear(64, 64), classifier=nn.Linear(64, 8))
        return nn.Sequential(layers)

    def make_ddp(self) -> DistributedDataParallel:
        return DistributedDataParallel(self["model"])

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self["model"].parameters(), lr=0.01, momentum=0.9)

    def make_opt(self) -> torch.optim.Optimizer:
        return self["optimizer"]

    def make_handle(self) -> tw.Handle:
        method = tw.Auto() if self.chooses else tw.ADTopK(density=0.05)
        handle = tw.attach(self["ddp"], method, optimizer=self["optimizer"])
        self["loss"].backward()
        return handle

    def make_state(self) -> dict[str, Any]:
        return self["handle"].state_dict()

    def make_states(self) -> list[dict[str, Any]]:
        return [self["state"]]

    def make_batch(self) -> torch.Tensor:
        return torch.randn(4, 64, generator=torch.Generator().manual_seed(self.rank))

    def make_data(self) -> list[torch.Tensor]:
        return [self["batch"]] * 2

    def make_loss(self) -> torch.Tensor:
        return self["ddp"](self["batch"]).square().mean()

    def make_inside(self) -> dist.ProcessGroup:
        return [dist.new_group([rank]) for rank in range(dist.get_world_size())][self.rank]

    def make_between(self) -> dist.ProcessGroup:
        return dist.new_group(list(range(dist.get_world_size())))

    def make_models(self) -> list[nn.Module]:
        return [self.make_model() for _ in range(2)]

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.01) for model in self["models"]]

    def make_batches(self) -> list[torch.Tensor]:
        return [torch.randn(4, 64) for _ in range(2)]

    def make_hvd(self) -> Any:
        import thinwire.horovod as hvd

        hvd.init()
        return hvd

    def renew(self) -> None:
        """Another model, where the next statement is an alternative to what was attached."""
        for name in ("model", "ddp", "optimizer", "handle", "loss"):
            self.pop(name, None)

    def close(self) -> None:
        handle = self.get("handle")
        if isinstance(handle, tw.Handle) and not handle.closed:
            handle.close()


def read_page(rank: int, world: int, texts: list[str]) -> int:
    """Run the blocks, each for a new reader, in a folder of their own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return sum(run_block(text, Reader(rank, text)) for text in texts)
        finally:
            os.chdir(before)


def run_block(text: str, reader: Reader) -> int:
    tree = ast.parse(text)
    attached = False
    for statement in tree.body:
        source = ast.unparse(statement)
        if "attach(ddp" in source:
            if attached:
                reader.renew()
            attached = True
        try:
            exec(compile(ast.Module([statement], []), "a page", "exec"), reader)
        except Exception as error:
            raise AssertionError(f"{source}\n{error}") from error
    reader.close()
    return len(tree.body)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, pools: Callable[[int], Any]) -> None:
    texts = list(runnable(page))
    counts = pools(2).run(read_page, texts)
    assert counts[0] == counts[1] > 0


def test_what_runs_elsewhere_is_there_and_still_needed() -> None:
    everything = "\n".join(
        text for page in (ROOT / "docs").glob("*.md") for text in [page.read_text()]
    )
    for mark, place in ELSEWHERE.items():
        assert mark in everything, f"no page has {mark!r} any more"
        assert (ROOT / place).exists(), place
