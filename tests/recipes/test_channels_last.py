"""Images in torch.channels_last: another order in memory, the same training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.methods.base import Method
from thinwire.recipes.checkpoints import Checkpoints
from thinwire.recipes.examples import DataOptions
from thinwire.recipes.loop import Run, Trainer
from thinwire.recipes.simulated import SimulatedWorkers
from thinwire.recipes.tasks import find_task
from thinwire.tools.metrics import MetricsLog, NoMetrics, Record
from thinwire.tools.settings.sections import parse_toml

CPU = torch.device("cpu")


class Losses(NoMetrics):
    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, records: list[Record]) -> None:
        self.values += [record["loss"] for record in records if record["event"] == "step"]


def make_trainer(name: str, method: Method, log: MetricsLog, *, channels_last: bool) -> Trainer:
    task = find_task(name)
    data = task.load(DataOptions(synthetic=True, tiny=True))
    training = replace(task.training, batch_size=8, lr=0.01, channels_last=channels_last)
    run = Run(label=name, method_name="x", method=method, training=training, stop_after=8)
    workers = SimulatedWorkers(2, CPU)
    torch.manual_seed(0)
    model = task.build(data.kind, True)
    return Trainer(run, model, data, workers, log, Checkpoints(Path(), workers, None))


@pytest.mark.parametrize("method", [tw.Dense(), tw.TopK(density=0.05), tw.ACPSGD(rank=2)])
def test_losses_are_the_same_but_for_rounding(method: Method) -> None:
    found = []
    for channels_last in (False, True):
        log = Losses()
        trainer = make_trainer("cifar10-resnet20", method, log, channels_last=channels_last)
        trainer.train()
        found.append(torch.tensor(log.values))
        formats = {
            p.is_contiguous(memory_format=torch.channels_last)
            for p in trainer.model.parameters()
            if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1
        }
        assert formats == {channels_last}
        trainer.replica.close()
    assert len(found[0]) == 8 and found[0][0] != found[0][-1]
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)


def test_a_model_without_convolutions_is_refused() -> None:
    with pytest.raises(UsageError, match="channels_last is True, but the model has no convolution"):
        make_trainer("wikitext2-transformer", tw.Dense(), NoMetrics(), channels_last=True)


def test_the_option_wins_over_a_file_both_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "on.toml").write_text("[training]\nchannels_last = true\n")
    common = f"train cifar10-resnet20 --dry-run --config {tmp_path / 'on.toml'}".split()
    found = []
    for more in ([], ["--no-channels-last"], ["--channels-last"]):
        assert main([*common, *more]) == 0
        found.append(parse_toml(capsys.readouterr().out)["training"]["channels_last"])
    assert found == [True, False, True]
