"""Lightning: the callback, the one checkpoint file, logs, a second fit, closures."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.integrations.common import METHOD, are_identical, as_launched, flat, make_model
from tests.logs import catch_warnings_of

pytest.importorskip("lightning")


def make_module(rank: int, **options: Any) -> Any:
    """Its data depend on the step alone, because Lightning's own resume in mid-epoch is not exact."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(10 * self.global_step + rank)
            inputs = torch.randn(8, 64, generator=generator)
            return nn.functional.cross_entropy(self.net(inputs), inputs[:, :8].argmax(dim=1))

        def validation_step(self, batch: Any, index: int) -> None:
            self.net(torch.zeros(1, 64))

        def configure_optimizers(self) -> Any:
            settings = {"lr": 0.1, "momentum": 0.9, **options}
            return torch.optim.SGD(self.parameters(), **settings)

    return Module()


def fit(module: Any, callbacks: list[Any], folder: Path, checkpoint: Path | None = None) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(),
        max_steps=8,
        callbacks=callbacks,
        logger=CSVLogger(str(folder)),
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    data = torch.utils.data.DataLoader(torch.zeros(64, 1))
    trainer.fit(module, data, ckpt_path=None if checkpoint is None else str(checkpoint))
    return trainer


def make_saver(path: Path) -> Any:
    import lightning.pytorch as pl

    class Saver(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(str(path))

    return Saver()


def resume_job(
    rank: int, world: int, folder: Path, method: tw.Method, options: dict[str, Any]
) -> dict[str, Any]:
    from thinwire.integrations.lightning import Compression

    as_launched(rank, world)
    path = folder / "five.ckpt"
    compression = Compression(method, deterministic=True)
    module = make_module(rank, **options)
    trainer = fit(module, [compression, make_saver(path)], folder)
    wanted = flat(module)
    trainer.save_checkpoint(str(folder / "end.ckpt"))
    states = torch.load(folder / "end.ckpt", weights_only=False)["thinwire"]
    result = {
        "steps": compression.handle.stats().steps,
        "identical": are_identical(wanted),
        "states": [list(state["ranks"]) for state in states],
        "metrics": sorted(name for name in trainer.logged_metrics if "thinwire" in name),
    }
    ends = []
    for restored in (True, False):
        module = make_module(rank, **options)
        compression = Compression(method, deterministic=True)
        if not restored:
            torch.distributed.barrier()
            content = torch.load(path, weights_only=False)
            torch.distributed.barrier()
            del content["thinwire"]
            torch.save(content, path)
            torch.distributed.barrier()
        fit(module, [compression], folder, path)
        ends.append(torch.equal(flat(module), wanted))
    return {**result, "ends": ends}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param(METHOD, {}, id="topk"),
        pytest.param(tw.DGC(density=0.05), {}, id="dgc", marks=pytest.mark.slow),
        pytest.param(tw.DGC(density=0.05), {"weight_decay": 0.01}, id="dgc-decay"),
    ],
)
def test_resuming_is_bit_exact_with_its_state_only(workers, tmp_path, method, options):
    for result in workers.run(resume_job, tmp_path, method, options):
        assert result["steps"] == 8
        assert result["identical"]
        assert result["states"] == [["rank0"], ["rank1"]]
        assert "thinwire/ratio" in result["metrics"]
        assert result["ends"] == [True, False]
    (log,) = tmp_path.glob("lightning_logs/version_0/metrics.csv")
    assert "thinwire/ratio" in log.read_text()


def second_fit_job(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from thinwire.integrations.lightning import Compression

    as_launched(rank, world)
    compression = Compression(METHOD)
    module = make_module(rank)
    trainer = fit(module, [compression], folder)
    first = compression.handle
    # Between them a checkpoint is looked at, which must not be taken for a resume.
    path = str(folder / "end.ckpt")
    trainer.save_checkpoint(path)
    data = torch.utils.data.DataLoader(torch.zeros(2, 1))
    trainer.validate(module, data, ckpt_path=path, verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 12
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(64, 1)))
    return {
        "closed": first.closed,
        "steps": (trainer.global_step, compression.handle.stats().steps),
        "identical": are_identical(flat(module)),
    }


def test_a_second_fit_works(workers, tmp_path):
    for result in workers.run(second_fit_job, tmp_path):
        assert result == {"closed": True, "steps": (12, 4), "identical": True}


def auto_job(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from thinwire.integrations.lightning import Compression

    as_launched(rank, world)
    compression = Compression(tw.Auto())
    module = make_module(rank)
    fit(module, [compression], folder)
    pilot = compression.handle.steering.pilot
    return {"int8": "int8" in pilot.candidates, "identical": are_identical(flat(module))}


def test_auto_is_told_the_optimizer(workers, tmp_path):
    for result in workers.run(auto_job, tmp_path):
        assert result == {"int8": True, "identical": True}


def switch_job(rank: int, world: int, folder: Path) -> dict[str, Any]:
    import lightning.pytorch as pl

    from thinwire.integrations.lightning import Compression

    class Switch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            if trainer.global_step == 3:
                compression.handle.switch(tw.DGC(density=0.05))

    as_launched(rank, world)
    compression = Compression(tw.Quantized(bits=4))
    module = make_module(rank)
    fit(module, [compression, Switch()], folder)
    taken = compression.handle.steering.takeover is not None
    return {"taken": taken, "identical": are_identical(flat(module))}


def test_every_method_is_told_the_optimizer(workers, tmp_path):
    for result in workers.run(switch_job, tmp_path):
        assert result == {"taken": True, "identical": True}


def found_rate_job(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Lightning saves before its search for a learning rate, and loads behind it."""
    from lightning.pytorch.callbacks import LearningRateFinder

    from thinwire.integrations.lightning import Compression

    as_launched(rank, world)
    compression = Compression(METHOD)
    module = make_module(rank)
    module.lr = 0.1
    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    with catch_warnings_of("thinwire.integrations.lightning") as said:
        fit(module, [compression, finder], folder)
    steps = compression.handle.stats().steps
    return {"said": said, "steps": steps, "identical": are_identical(flat(module))}


def test_a_search_for_a_learning_rate_is_no_resume(workers, tmp_path):
    for result in workers.run(found_rate_job, tmp_path):
        assert result == {"said": [], "steps": 8, "identical": True}


def other_strategy_job(rank: int, world: int) -> str:
    from types import SimpleNamespace

    from thinwire.integrations.lightning import Compression

    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(model=make_model()))
    with pytest.raises(tw.UsageError) as caught:
        Compression(METHOD).on_fit_start(trainer, None)
    return str(caught.value)


def test_another_strategy_gets_a_sentence(workers):
    assert all("such as 'ddp'" in text for text in workers.run(other_strategy_job))
