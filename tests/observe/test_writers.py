"""Statistics where people look at them: trackers, the prompt, notebooks."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.observe.writers import write_values


def train_a_little() -> tw.Handle:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    simulation = tw.simulate(model, tw.TopK(density=0.05), workers=2)
    for _ in range(3):
        for rank in simulation.ranks:
            with simulation.worker(rank):
                model(torch.randn(8, 64)).square().mean().backward()
        simulation.exchange()
    return simulation.handles[0]


@pytest.fixture(scope="module")
def handle() -> tw.Handle:
    return train_a_little()


class Board:
    """What TensorBoard's writer looks like."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, int]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen[name] = value, step


class Run:
    """What a W&B run looks like; under another name MLflow."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, int]] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        self.seen = {name: (value, step) for name, value in values.items()}


class Mlflow(Run):
    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.log(values, step)


@pytest.mark.parametrize("writer", [Board(), Run(), Mlflow()], ids=lambda one: type(one).__name__)
def test_every_tracker_gets_the_same(handle, writer):
    handle.log(writer, 7)
    assert writer.seen == {
        f"thinwire/{name}": (value, 7) for name, value in handle.stats().as_dict().items()
    }


def test_a_function_will_do_and_the_step_is_known(handle):
    seen = []
    handle.log(lambda values, step: seen.append((values["thinwire/steps"], step)))
    assert seen == [(3, 3)]


def test_tensorboard_itself_reads_it(handle, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        handle.log(writer, 5)
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Scalars("thinwire/ratio")
    assert event.step == 5 and event.value == pytest.approx(handle.stats().ratio)


def test_anything_else_gets_a_sentence():
    with pytest.raises(tw.UsageError, match="writer is a int"):
        write_values(3, {}, 0)


def test_the_numbers_are_plain_and_consistent(handle):
    values = handle.stats().as_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["ratio"] == pytest.approx(
        values["dense_bytes_per_step"] / values["wire_bytes_per_step"]
    )


def test_the_prompt_shows_sentences(handle):
    assert repr(handle) == "<Handle: rank 0 of 2, 3 steps, 1 of 4 parameters compressed>"
    assert repr(handle.plan()).startswith(
        "<PlanReport: 4096 of 4420 elements (92.7%) are compressed;"
    )
    assert repr(handle.stats()).startswith("Stats(steps=3, ")


def test_the_plan_says_who_does_the_work(handle):
    *_, kernels, dense = str(handle.plan()).splitlines()
    why = "the kernels for exact top-k do not run on cpu"
    assert kernels == f"work on 0.weight is done by torch: {why}"
    assert dense == "work on 0.bias, 1.weight and 1 more is done by torch"
    assert f"<p>{kernels}</p><p>{dense}</p>" in handle.plan()._repr_html_()


def test_notebooks_show_tables(handle):
    assert "<td>0.weight</td><td>64x64</td>" in handle.plan()._repr_html_()
    assert "<td>MB per step sent</td>" in handle.stats()._repr_html_()
    assert str(handle.stats()).splitlines()[1].startswith("MB per step sent ")
    assert "rank 0 of 2" in handle._repr_html_()


def test_names_cannot_break_a_table():
    from thinwire.observe.notebook import html_table

    assert "&lt;b&gt;" in html_table(("a",), [("<b>",)])
