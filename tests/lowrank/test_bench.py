"""The communication-time table: sizes are those of the paper's models, times are measured."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from thinwire.bench.lowrank import PAPER_RANKS, measure_lowrank, sent_sizes, shapes_of
from thinwire.bench.lowrank_command import bench_lowrank, show
from thinwire.errors import UsageError

MEGABYTES = {
    # Dense, P without vectors, Q without vectors, vectors: MB of fp32, two digits.
    "resnet50": (97.5, 0.42, 0.84, 0.21),
    "resnet152": (229.6, 1.17, 2.59, 0.58),
    "bert-base": (420.0, 14.1, 10.5, 0.59),
    "bert-large": (1282.6, 31.0, 27.5, 1.4),
}


@pytest.mark.parametrize("model", MEGABYTES)
def test_the_papers_models_send_what_they_should(model):
    shapes, rank = shapes_of(model), PAPER_RANKS[model]
    vectors = sum(math.prod(shape) for shape in shapes if len(shape) < 2)
    sent = [sum(sent_sizes(shapes, rank, kind)) for kind in ("dense", "P", "Q")]
    found = [sent[0], sent[1] - vectors, sent[2] - vectors, vectors]
    for elements, expected in zip(found, MEGABYTES[model], strict=True):
        assert 4 * elements / 2**20 == pytest.approx(expected, rel=0.03)


def rows_job(rank: int, world: int) -> list[dict]:
    shapes = [(64, 32), (64,), (32, 16, 3, 3)]
    group = dist.group.WORLD
    assert group is not None
    rows = measure_lowrank(
        "toy", rank=4, group=group, device=torch.device("cpu"), repeats=2, shapes=shapes
    )
    assert {row.workers for row in rows} == {world}
    assert [row.sends for row in rows] == ["dense", "P", "Q"]
    assert [row.bytes for row in rows] == [4 * 6720, 4 * (256 + 64 + 128), 4 * (128 + 64 + 576)]
    assert all(row.per_tensor_ms > 0 and row.fused_ms > 0 for row in rows)
    return [asdict(row) for row in rows]


def test_the_rows_are_the_same_on_all_ranks(pools):
    first, *others = pools(3).run(rows_job)
    assert all(rows == first for rows in others)


def command(*options: str):
    app = typer.Typer()
    app.command()(bench_lowrank)
    return CliRunner().invoke(app, list(options))


def test_rows_are_printed_and_written(tmp_path, capsys):
    row = {"model": "bert-base", "workers": 3, "sends": "P", "tensors": 3, "rank": 32}
    show([{**row, "bytes": 2**20, "per_tensor_ms": 7.0, "fused_ms": 2.0}], tmp_path)
    printed = capsys.readouterr().out
    assert "tensor by tensor ms" in printed
    line = printed.splitlines()[1].split()
    assert line == ["bert-base", "3", "32", "P", "3", "1.00", "7.00", "2.00"]
    assert (tmp_path / "rows.csv").read_text().startswith("model,workers,sends")
    assert (tmp_path / "rows.json").exists()


def test_the_command_takes_the_papers_ranks_and_refuses_what_it_does_not_know():
    result = command("--models", "bert-base", "--ranks", "3", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "bert-base, rank 32" in result.output and "3 processes" in result.output
    assert isinstance(command("--models", "vgg").exception, UsageError)
    assert isinstance(command("--rank", "0").exception, UsageError)


def test_unknown_models_are_refused():
    with pytest.raises(UsageError, match=r"^model is 'vgg'; it must be one of resnet50"):
        shapes_of("vgg")
