"""Settings from files and options, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.recipes.job import Job, build_job
from thinwire.recipes.settings import list_fragments, parse_override, read_settings
from thinwire.recipes.trained_methods import build_trained as build_method
from thinwire.tools.settings.sections import compose, parse_toml, to_toml


def job_of(text: str, command: Any = "train") -> Job:
    return build_job(command, compose([parse_toml(text)]), out=Path())


def test_files_compose_in_order_and_options_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(
        '[task]\nname = "digits"\n[training]\nlr = 0.5\nepochs = 3\n[method]\nname = "topk"\n'
    )
    second.write_text("[training]\nlr = 0.25\n[method]\ndensity = 0.05\n")
    command = ["train", "--config", f"{first},{second}", "--epochs", "4", "--dry-run"]
    assert main([*command, "--set", "training.clip_norm=2", "--set", "method.values=fp16"]) == 0
    resolved = parse_toml(capsys.readouterr().out)
    assert resolved["task"] == {"name": "digits"}
    assert resolved["method"] == {"name": "topk", "density": 0.05, "values": "fp16"}
    chosen = {key: resolved["training"][key] for key in ("lr", "epochs", "clip_norm", "batch_size")}
    assert chosen == {"lr": 0.25, "epochs": 4, "clip_norm": 2, "batch_size": 32}


def test_yaml_says_the_same(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "second.yaml"
    path.write_text("training:\n  lr: 0.25\nmethod:\n  density: 0.05\n")
    assert read_settings(str(path)) == {"training": {"lr": 0.25}, "method": {"density": 0.05}}
    path.write_text("training: [\n")
    with pytest.raises(UsageError, match="which cannot be read: "):
        read_settings(str(path))


def test_a_resolved_job_is_the_same_job_again() -> None:
    job = job_of(
        """
        [task]
        data = "cifar10"
        model = "resnet20"
        data_dir = "my \\"data\\""
        tiny = true
        [method]
        memory = { masking = false }
        density_warmup = [0.25, 0.0625]
        [methods.dgc]
        clip = { norm = 5.0 }
        [training]
        warmup_steps = 7
        [run]
        simulate_workers = 8
        [compare]
        methods = ["dgc", "dense"]
        densities = [0.01, 0.001]
        seeds = [1, 2]
        """,
        "compare",
    )
    again = build_job("compare", parse_toml(to_toml(job.to_settings())), out=Path())
    assert again == job
    assert job.training.warmup_epochs == 0, "one kind of warm-up replaces the preset's other"
    assert [cell.label for cell in job.cells()] == [
        "dgc@0.01#1", "dgc@0.01#2", "dgc@0.001#1", "dgc@0.001#2", "dense#1", "dense#2",
    ]  # fmt: skip


def test_none_in_a_file_takes_away_what_the_task_has() -> None:
    assert job_of('[task]\nname = "squad-bert-base"').training.clip_norm == 1.0
    job = job_of('[task]\nname = "squad-bert-base"\n[training]\nclip_norm = "none"')
    assert job.training.clip_norm is None
    assert build_job("train", parse_toml(to_toml(job.to_settings())), out=Path()) == job


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainig]", r"trainig in .* is no section; .* \(did you mean training\?\)"),
        ("[training]\nlrr = 1", r"training.lrr is no setting \(did you mean lr\?\)"),
        ("[training]\nlr = 'x'", "lr is 'x'; it must be a finite number"),
        ("[training]\nmilestones = 3", "milestones is 3; it must be a list of numbers"),
        ("[run]\nworker = 1", r"run.worker is no setting \(did you mean workers\?\)"),
        ("[task]\nname = 'digits'\ndata_dri = 'x'", r"did you mean data_dir\?"),
        ("[task]\ndata = 'cifr10'\nmodel = 'vgg16'", r"data is 'cifr10'; .* mean cifar10\?"),
        ("[task]\ndata = 'cifar10'", "data is 'cifar10' and model is None; name both, or a task"),
        ("[task]\nname = 'digits'\nmodel = 'vgg16'", "name the task or both parts"),
        ("[method]\ndensty = 1", r"densty is 1, but adtopk has no .* \(did you mean density\?\)"),
        ("[method]\nname = 'dgc'\nmemory = { maskin = true }", r"memory.maskin is no setting of"),
        ("[method]\nexchange = { kind = 'Pigeon' }", "exchange.kind is 'Pigeon'; it must be"),
        ("[method]\ndensity_warmup = 0.5", "density_warmup is 0.5; it must be a list"),
        ("[method]\ndense_epochs = 0", "dense_epochs is 0; it must be a whole number"),
        ("[method]\nname = 'dense'\ndense_epochs = 1", "dense_epochs is 1, but dense has no such"),
        ("[methods.topk]\nrank = 2", "rank is 2, but topk has no such setting"),
        ("[run]\ngraph = true", "graph is True, which goes only with simulate_workers"),
        ("[task]\nname = 'digits'\nsynthetic = 'no'", "synthetic is 'no'; it must be True or"),
        ("[task]\nname = 'digits'\ndata_dir = 5", "data_dir is 5; it must be the path of a"),
        ("[task]\nname = 5", "task.name is 5; it must be a name of --list"),
        ("[method]\nname = ['topk']", r"method is \['topk'\]; it must be one of dense, topk"),
        ("[methods]\ntopk = 5", "methods.topk is 5; it must be a section of settings"),
        ("[training]\nseed = 1.5", "seed is 1.5; it must be a whole number of at least 0"),
        ("[training]\nwarmup_steps = 0.1", "warmup_steps is 0.1; it must be a whole number"),
        ("[training]\nbetas = [2, 0.9]", r"betas is \(2, 0.9\); both must be in \[0, 1\)"),
        ("[training]\nnesterov = true\nmomentum = 0", "nesterov is True, which needs a momentum"),
    ],
)
def test_a_typo_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        base = {} if "[task]" in text else {"task": {"name": "digits"}}
        build_job("train", compose([base, read_settings(str(path))]), out=Path())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--config wm6", "config is 'wm6', which is neither a file nor one of cosine, fp16"),
        ("--set lr=1", "set is 'lr=1'; it must be section.name=value"),
        ("--set trainin.lr=1", "trainin is no section, there are task, method"),
        ("--resume", "resume and evaluate work on a run folder; use --resume --out FOLDER"),
        ("--evaluate --out x", "resume and evaluate work on a run folder"),
        ("--device cuda9", "device is 'cuda9'; it must be one of 'auto', 'cpu', 'cuda'"),
    ],
)
def test_an_option_that_cannot_be_is_one_sentence(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_folder_without_a_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", "--tiny", "--out", str(tmp_path)]) == 2
    assert "which holds no run to resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = [0, 1, 0]", "seeds names 0 twice; name each once"),
        ("densities = [0.01, 0.01]", "densities names 0.01 twice; name each once"),
        ("seeds = [0.5]", "seeds is 0.5; it must be a whole number"),
    ],
)
def test_nothing_is_counted_twice(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job_of(f"[task]\nname = 'digits'\n[compare]\n{text}", "compare")


def test_momentum_that_cannot_be_taken_over_is_refused_before_anything_is_trained() -> None:
    text = "[task]\nname = 'chars'\n[compare]\nmethods = ['dense', 'dgc']"
    with pytest.raises(UsageError, match="optimizer is 'adamw', from which momentum correction"):
        job_of(text, "compare")
    job_of(f"{text}\n[methods.dgc]\nmemory = {{ kind = 'Residual' }}", "compare")
    scaled = f"{text}\n[methods.dgc]\ndense_epochs = 1\nadam_scale = {{ limit = 3.0 }}"
    with pytest.raises(UsageError, match="clip_norm is 1"):
        job_of(scaled, "compare")
    scaled += "\n[training]\nclip_norm = 'none'"
    job_of(scaled, "compare")
    with pytest.raises(UsageError, match="adam_scale takes over from Adam"):
        job_of(f"{scaled}\noptimizer = 'sgd'", "compare")
    with pytest.raises(UsageError, match=r"weight_decay is 0\.1 with optimizer 'adam'"):
        job_of(f"{scaled}\noptimizer = 'adam'\nweight_decay = 0.1", "compare")


def test_overrides_are_plain_values_or_text() -> None:
    texts = ("training.betas=[0.9,0.95]", "method.axis=0", "run.device=cpu", "run.graph=true")
    assert parse_override("run.graph=True") == parse_override(texts[-1])
    values = [parse_override(text) for text in texts]
    assert values == [
        {"training": {"betas": [0.9, 0.95]}},
        {"method": {"axis": 0}},
        {"run": {"device": "cpu"}},
        {"run": {"graph": True}},
    ]
    as_in_a_file = parse_override('method.memory={kind = "Residual"}')
    assert as_in_a_file == parse_override("method.memory.kind=Residual")


def test_dense_epochs_come_before_everything_else() -> None:
    settings = {"density_warmup": [0.25], "dense_epochs": 2}
    method = build_method("topk", settings, steps_per_epoch=10)
    later = build_method("topk", {"density_warmup": [0.25]}, steps_per_epoch=10)
    assert method == tw.Timeline(phases=((0, tw.Dense()), (20, later)))
    assert [type(method.at(step)) for step in (19, 20)] == [tw.Dense, tw.TopK]
    assert method.at(29) == tw.TopK(density=0.25)


def test_the_fragments_of_dgc() -> None:
    assert list_fragments() == ["cosine", "fp16", "int32", "no-masking", "wm0", "wm5", "wm5o"]

    def built(*names: str) -> tw.DGC:
        task = {"task": {"name": "imagenet-resnet50"}, "method": {"name": "dgc"}}
        job = build_job("train", compose([task, *map(read_settings, names)]), out=Path())
        method = job.cells()[0].build_method(steps_per_epoch=10)
        assert isinstance(method, tw.DGC)
        return method

    assert built("wm0") == tw.DGC()
    densities = [0.25, 0.063, 0.015, 0.004, 0.001]
    assert built("wm5").density == tw.warmup(densities, final=0.001, every=10)
    assert built("wm5o").density == tw.warmup([1.0] * 5, final=0.001, every=10)
    assert built("fp16", "int32") == tw.DGC(values="fp16", indices="int32")
    assert built("no-masking") == tw.DGC(memory=tw.memory.MomentumCorrection(masking=False))
    job = build_job(
        "train",
        compose([{"task": {"name": "imagenet-resnet50"}}, read_settings("cosine")]),
        out=Path(),
    )
    assert job.training.schedule == "cosine"


def test_parts_of_methods_and_where_clipping_goes() -> None:
    exchange = {"kind": "Hierarchical", "per_host": 2}
    built = build_method("topk", {"exchange": exchange, "memory": {"storage": "bf16"}})
    assert built == tw.TopK(
        exchange=tw.exchange.Hierarchical(per_host=2), memory=tw.memory.Residual(storage="bf16")
    )
    clip = tw.memory.Clip(norm=0.5, by_workers=True)
    assert build_method("dgc", {}, clip_norm=0.5) == tw.DGC(clip=clip)
    assert build_method("dgc", {"clip": {"value": 1.0}}, clip_norm=0.5) == tw.DGC(
        clip=tw.memory.Clip(value=1.0)
    )
    assert build_method("topk", {}, clip_norm=0.5) == tw.TopK()
    with pytest.raises(UsageError, match=r"clip_norm is 0\.5, but topk accumulates momentum"):
        build_method("topk", {"memory": {"kind": "MomentumCorrection"}}, clip_norm=0.5)
