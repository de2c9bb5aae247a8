"""The Trainer: attaching, logs, checkpoints, resuming, a second train()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.integrations.common import are_identical, as_launched, flat
from tests.logs import catch_warnings_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

METHOD = tw.ADTopK(density=0.05)


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(50, (16,), generator=generator)
        return {"input_ids": words, "labels": words}


def make_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )


def make_trainer(folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
    }
    return Trainer(
        make_gpt2(),
        TrainingArguments(str(folder), **{**settings, **options}),
        train_dataset=Sentences(),
    )


def resume_job(rank: int, world: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    from thinwire.integrations.transformers import compress

    as_launched(rank, world)
    trainer = make_trainer(folder, **options)
    callback = compress(trainer, METHOD, deterministic=True)
    trainer.train()
    handle = callback.handle
    result = {
        "steps": handle.stats().steps,
        "identical": are_identical(flat(trainer.model)),
        "files": sorted(path.name for path in folder.glob("checkpoint-2/thinwire*")),
        "logs": [row for row in trainer.state.log_history if "loss" in row],
    }
    trainer.train()
    result["second"] = (callback.handle is handle, handle.stats().steps)
    wanted = flat(trainer.model)

    ends = []
    for restored in (True, False):
        trainer = make_trainer(folder, save_strategy="no", **options)
        callback = compress(trainer, METHOD, deterministic=True)
        checkpoint = folder / "checkpoint-2"
        if not restored:
            torch.distributed.barrier()
            (checkpoint / f"thinwire_{rank}.pt").unlink()
            torch.distributed.barrier()
        trainer.train(resume_from_checkpoint=str(checkpoint))
        ends.append(torch.equal(flat(trainer.model), wanted))
    return {**result, "ends": ends}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"bf16": True}, id="bf16", marks=pytest.mark.slow),
        pytest.param({"ddp_find_unused_parameters": None}, id="unused", marks=pytest.mark.slow),
    ],
)
def test_resuming_is_bit_exact_with_its_state_only(workers, tmp_path, options):
    for result in workers.run(resume_job, tmp_path, options):
        assert result["steps"] == 4
        assert result["identical"]
        assert result["files"] == ["thinwire_0.pt", "thinwire_1.pt"]
        assert all(row["thinwire/ratio"] > 1 for row in result["logs"]) and result["logs"]
        assert result["second"] == (True, 8), "a second train() goes on with the same handle"
        assert result["ends"] == [True, False]


def momentum_job(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from thinwire.integrations.transformers import compress

    as_launched(rank, world)
    settings = {"optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 1e-3}
    trainer = make_trainer(folder, **settings)
    callback = compress(trainer, tw.DGC(density=0.05), deterministic=True)
    trainer.train()
    wanted = flat(trainer.model)
    callback.handle.close()
    trainer = make_trainer(folder, save_strategy="no", **settings)
    compress(trainer, tw.DGC(density=0.05), deterministic=True)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {"equal": torch.equal(flat(trainer.model), wanted), "identical": are_identical(wanted)}


def test_momentum_is_found_and_resumes(workers, tmp_path):
    for result in workers.run(momentum_job, tmp_path):
        assert result == {"equal": True, "identical": True}


def auto_job(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from thinwire.integrations.transformers import compress

    as_launched(rank, world)
    trainer = make_trainer(folder, save_strategy="no")
    callback = compress(trainer, tw.Auto())
    trainer.train()
    pilot = callback.handle.steering.pilot
    return {"int8": "int8" in pilot.candidates, "identical": are_identical(flat(trainer.model))}


def test_auto_is_told_the_optimizer(workers, tmp_path):
    for result in workers.run(auto_job, tmp_path):
        assert result == {"int8": True, "identical": True}


def warned_job(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from thinwire.integrations.transformers import compress

    as_launched(rank, world)
    trainer = make_trainer(folder, save_strategy="no")
    callback = compress(trainer, tw.TopK(density=0.05))
    with catch_warnings_of("thinwire.optim.takeover") as said:
        trainer.train()
    callback.handle.switch(tw.AdamScale(method=tw.TopK(density=0.05), start=1))
    trainer.train()
    taken = callback.handle.steering.takeover is not None
    return {"said": said, "taken": taken, "identical": are_identical(flat(trainer.model))}


def test_every_method_is_told_the_optimizer(workers, tmp_path):
    for rank, result in enumerate(workers.run(warned_job, tmp_path)):
        assert len(result["said"]) == (rank == 0)
        assert all(one.startswith("TopK before AdamW learns much less") for one in result["said"])
        assert result["taken"] and result["identical"]


def new_optimizer_job(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from thinwire.integrations.transformers import compress

    as_launched(rank, world)
    trainer = make_trainer(folder, save_strategy="no")
    callback = compress(trainer, tw.AdamScale(method=tw.Quantized(bits=4), start=1))
    trainer.train()
    first = callback.handle
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    stepped = callback.handle.steering.takeover.optimizer is trainer.optimizer.optimizer
    return {
        "closed": first.closed,
        "stepped": stepped,
        "identical": are_identical(flat(trainer.model)),
    }


def test_a_second_train_with_a_new_optimizer_gets_a_new_handle(workers, tmp_path):
    for result in workers.run(new_optimizer_job, tmp_path):
        assert result == {"closed": True, "stepped": True, "identical": True}


def sentences_job(rank: int, world: int, folder: Path) -> list[str]:
    from thinwire.integrations.transformers import compress

    as_launched(rank, world)
    trainer = make_trainer(folder)
    compress(trainer, METHOD)
    texts = []
    for arguments in ((trainer, METHOD), (object(), METHOD), (trainer, "topk")):
        with pytest.raises(tw.UsageError) as caught:
            compress(*arguments)
        texts.append(str(caught.value))
    return texts


def test_wrong_calls_get_a_sentence(workers, tmp_path):
    for texts in workers.run(sentences_job, tmp_path):
        assert "twice" in texts[0] and "trainer is" in texts[1] and "method is" in texts[2]


def test_what_is_used_of_the_trainer_is_there():
    from transformers import Trainer

    assert callable(Trainer._load_optimizer_and_scheduler)
