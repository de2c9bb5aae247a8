from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench.compress import CompressSettings, measure_compress, plan_cases
from thinwire.bench.compress_anchors import ANCHORS, AnchorSpec, GlobalTopK, PerTensor, RowTopK
from thinwire.bench.compress_fleet import DECODE, ENCODE, Fleet
from thinwire.bench.compress_layout import describe_model, keep_compressible, lay_out_buckets
from thinwire.bench.compress_plots import draw_selection
from thinwire.bench.compress_rows import FLOOR, read_rows
from thinwire.bench.compress_timing import Stopwatch, time_laps
from thinwire.bench.models import Workload
from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.layout import describe_module
from thinwire.tools.books import FAILED, OK
from thinwire.tools.methods import METHODS, build_method, keep_taken

CPU = torch.device("cpu")
QUICK = CompressSettings(repeats=3, seconds=0.05, tensors=False)
MODEL = "tests.bench.test_compress:mixed"


def mixed(device: torch.device, batch: int) -> Workload:
    """A convolution, an embedding and a linear layer: every kind of row."""
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(8, 16, 3),
            "embedding": nn.Embedding(200, 32),
            "linear": nn.Linear(96, 64),
        }
    )
    return Workload(model, draw=lambda: None, loss=lambda wrapped, data: torch.zeros(()))


def ddp_sizes_job(rank: int, world: int, bucket_mb: float | None) -> list[int]:
    """What DDP itself makes of the small model, in its second step."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_mb)
    sizes: list[int] = []

    def hook(state, bucket):
        sizes.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        sizes.clear()
        ddp(torch.randn(2, 512)).sum().backward()
    return sizes


@pytest.mark.parametrize("bucket_mb", [None, 0.5, 3.0, 1000.0])
def test_buckets_are_those_of_ddp(pools, bucket_mb):
    (sizes,) = pools(1).run(ddp_sizes_job, bucket_mb)
    layouts = lay_out_buckets(describe_model("small"), CPU, bucket_mb)
    assert [layout.numel for layout in layouts] == sizes


@pytest.mark.parametrize("name", METHODS)
def test_a_lap_is_a_whole_exchange_of_every_method(name):
    infos = [info for _, info in describe_module(mixed(CPU, 1).model).values()]
    method = build_method(name, keep_taken(name, density=0.05))
    fleet = Fleet(infos, method, world=3, device=CPU, bucket_mb=0.02)
    watch = Stopwatch(CPU)
    for _ in range(3):
        fleet.lap(watch)
        watch.end_lap(keep=True)
    assert len(fleet.buckets[0]) > 1 and fleet.payload_bytes > 0
    updates = [torch.cat([bucket.flat for bucket in buckets]) for buckets in fleet.buckets]
    assert updates[0].any() and all(torch.equal(update, updates[0]) for update in updates)
    assert not any(reducer.verdict() for reducer in fleet.reducers), "a lap is a step that counts"
    timings = watch.timings()
    assert set(timings) == {ENCODE, DECODE} and all(t.ms > 0 for t in timings.values())


@pytest.mark.parametrize("name", [n for n, spec in ANCHORS.items() if spec.takes_density])
def test_anchors_send_what_they_take_out_of_the_residual(name):
    infos = keep_compressible([i for _, i in describe_module(mixed(CPU, 1).model).values()])
    anchor = ANCHORS[name].make(infos, 0.05, CPU)
    assert isinstance(anchor, PerTensor)
    for _ in range(3):
        before = [residual.clone() for residual in anchor.residuals]
        anchor.lap(Stopwatch(CPU))
        # The lap is over and the gradients are still there, so c can be made again.
        for old, gradient, left in zip(before, anchor.gradients, anchor.residuals, strict=True):
            c = old + gradient
            sent = c - left
            assert torch.equal(left[sent == 0], c[sent == 0]) and not left[sent != 0].any()
            assert 0.02 < (sent != 0).float().mean() < 0.15


def test_the_anchors_select_the_largest():
    c = torch.randn(4, 50)
    values, indices = GlobalTopK([], 0.1, CPU).select(c.clone())
    assert sorted(values.abs()) == sorted(c.abs().view(-1).topk(20).values)
    assert torch.equal(c.view(-1)[indices], values)
    values, indices = RowTopK([], 0.1, CPU).select(c.clone())
    assert indices.shape == (4, 5) and torch.equal(c.gather(1, indices), values)


def test_the_powersgd_anchor_keeps_what_the_factors_miss():
    infos = keep_compressible(describe_model("small"))
    anchor = ANCHORS["torch-powersgd"].make(infos, 1.0, CPU)
    anchor.lap(Stopwatch(CPU))
    first = [residual.clone() for residual in anchor.residuals]
    anchor.lap(Stopwatch(CPU))
    for old, sent, left in zip(first, anchor.gradients, anchor.residuals, strict=True):
        assert old.any() and left.isfinite().all()
        assert torch.linalg.matrix_rank(sent) <= 4


def test_laps_are_counted_in_repeats_and_seconds():
    laps = []

    def lap(watch: Stopwatch) -> None:
        laps.append(1)
        with watch.span("work"):
            time.sleep(0.002)
        with watch.span("work"):
            time.sleep(0.001)

    timing = time_laps(lap, CPU, repeats=6, seconds=60.0)["work"]
    assert (len(laps), timing.laps) == (9, 6)
    assert 3.0 <= timing.ms_p20 <= timing.ms <= timing.ms_p80
    laps.clear()
    assert time_laps(lap, CPU, repeats=100, seconds=0.001)["work"].laps == 3
    assert len(laps) == 4


def test_rows_are_saved_and_not_measured_again(tmp_path: Path):
    said: list[str] = []
    again = {"methods": ["topk", "acpsgd"], "settings": QUICK, "out": tmp_path, "say": said.append}
    rows = measure_compress([MODEL], [0.05, 0.01], "cpu", anchors=["torch-topk"], **again)
    assert [(row.name, row.density, row.work) for row in rows] == [
        ("copy", None, "copy"),
        ("topk", 0.05, "encode"),
        ("topk", 0.05, "decode"),
        ("acpsgd", None, "encode"),
        ("acpsgd", None, "decode"),
        ("torch-topk", 0.05, "encode"),
        ("topk", 0.01, "encode"),
        ("topk", 0.01, "decode"),
        ("torch-topk", 0.01, "encode"),
    ]
    assert rows == read_rows(tmp_path) and len(said) == 6
    floor = rows[0]
    assert floor.kind == FLOOR and floor.elements == 1152 + 6400 + 6144 and floor.tensors == 3
    for row in rows:
        assert row.status == OK and row.ms_p20 <= row.ms <= row.ms_p80
        assert row.ratio == row.ms / floor.ms and row.hardware and row.date and row.versions
    assert (tmp_path / "rows.csv").read_text().count("\n") == 10
    said.clear()
    more = measure_compress([MODEL], [0.05, 0.01], "cpu", anchors=["torch-topk"], **again)
    assert len(more) == 9 and len(said) == 1 and "copy" in said[0]


def test_what_fails_is_a_row_and_the_rest_goes_on(tmp_path: Path, monkeypatch):
    class Refusing(GlobalTopK):
        def lap(self, watch):
            raise RuntimeError("no room\nat all")

    monkeypatch.setitem(ANCHORS, "refusing", AnchorSpec(Refusing))
    rows = measure_compress(
        [MODEL],
        [0.05],
        "cpu",
        methods=[],
        anchors=["refusing", "torch-row-topk"],
        settings=QUICK,
        out=tmp_path,
        say=lambda text: None,
    )
    assert [row.status for row in rows] == [OK, FAILED, OK]
    assert rows[1].note == "RuntimeError: no room"


def test_a_deadline_leaves_the_rest_for_later():
    said: list[str] = []
    rows = measure_compress(
        [MODEL], [0.05], "cpu", settings=QUICK, deadline=time.monotonic() - 1, say=said.append
    )
    assert rows == [] and said == ["[1/12] time is up; the rest is left for the next run"]


def test_tensors_come_last_and_what_has_no_density_once():
    shapes = {"small": describe_model("small")}
    cases = plan_cases(
        shapes, [0.01, 0.001], ["topk", "acpsgd"], ["torch-topk", "torch-row-topk"], tensors=True
    )
    whole = [case for case in cases if case.tensor is None]
    assert cases[: len(whole)] == whole and len(whole) == 1 + 2 + 1 + 4
    assert [case.name for case in whole].count("acpsgd") == 1
    assert len(cases) - len(whole) == 3 * 3 and cases[-1].density == 0.01


def test_the_command_prints_a_table_and_draws(tmp_path: Path, capsys):
    arguments = f"bench compress --model {MODEL} --density 0.05 --methods adtopk,topk --repeats 3"
    assert main([*arguments.split(), "--seconds", "0.02", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "x floor" in shown and "torch-powersgd" in shown
    assert (tmp_path / "selection_time.png").stat().st_size > 10_000
    rows = read_rows(tmp_path)
    assert {row.tensor for row in rows} == {None, "16x8x3x3", "200x32", "64x96"}
    assert draw_selection([row for row in rows if row.tensor is None], tmp_path) is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--model smal", "model is 'smal'; it must be one of"),
        ("--density 2", "density is 2.0; it must be a number in (0, 1]"),
        ("--density ,", "density is empty; name at least one"),
        ("--model ,", "model is empty; name at least one"),
        ("--density x", "density is 'x'; it must be numbers"),
        ("--device tpu", "--device is 'tpu'; it must be cpu or cuda"),
        ("--methods topkk", "method is 'topkk'; it must be one of"),
        ("--world 0", "world is 0; it must be a whole number"),
        ("--seconds 0", "seconds is 0.0; it must be"),
    ],
)
def test_wrong_options_get_one_sentence(options: str, sentence: str, capsys, tmp_path: Path):
    arguments = [*f"bench compress {options}".split(), "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_unknown_anchors_are_named():
    with pytest.raises(UsageError, match="anchor is 'torch'; it must be one of torch-topk"):
        measure_compress(["small"], [0.01], "cpu", anchors=["torch"])
