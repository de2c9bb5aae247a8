"""Models of the user's own: what they may be, and that rows of a changed one are not taken for today's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.bench.step_rows import fake_row
from thinwire.bench.model_shapes import know_models
from thinwire.bench.models import build_workload
from thinwire.bench.own_models import draw_like, own_loss, to_workload
from thinwire.bench.rows import RowBook
from thinwire.bench.step_cell import plan_cell
from thinwire.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """write(text): what the user's module says from now on."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> None:
        sys.modules.pop("users_model", None)
        (tmp_path / "users_model.py").write_text(f"import torch\nfrom torch import nn\n{text}\n")

    yield write
    sys.modules.pop("users_model", None)


def test_a_bare_module_and_a_batch_train(own) -> None:
    own("def make(device, batch): return nn.Linear(6, 3), torch.randn(batch, 6)")
    built = [build_workload("users_model:make", CPU, 4, None, seed) for seed in (0, 1)]
    losses = [loss(model) for model, loss in built]
    assert torch.equal(built[0][0].weight, built[1][0].weight) and losses[0] != losses[1]
    losses[0].backward()
    assert built[0][0].weight.grad.abs().sum() > 0


class Taking(nn.Module):
    def forward(self, ids, mask=None):
        return {"logits": ids.float() * 2, "mask": mask}


def test_batches_of_every_form_are_drawn_anew() -> None:
    torch.manual_seed(0)
    ids, mask = torch.arange(40), torch.ones(40, dtype=torch.bool)
    drawn = draw_like({"ids": ids, "mask": mask, "scale": 3})
    assert drawn["scale"] == 3 and torch.equal(drawn["mask"], mask)
    assert torch.equal(drawn["ids"].sort().values, ids) and not torch.equal(drawn["ids"], ids)
    numbers = draw_like([5 + torch.randn(5000, dtype=torch.float64)])[0]
    assert numbers.dtype == torch.float64 and abs(float(numbers.mean()) - 5) < 0.1
    expected = (2 * ids.float()).square().mean()
    assert own_loss(Taking(), {"ids": ids}) == expected == own_loss(Taking(), (ids, mask))

    class WithLoss(nn.Module):
        def forward(self, x):
            return type("Output", (), {"loss": x.sum()})()

    assert own_loss(WithLoss(), torch.ones(3)) == 3
    assert own_loss(nn.Identity(), torch.tensor(2.5)) == 2.5


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (nn.ReLU(), "a ReLU without a batch"),
        (3, "a int;"),
        ((nn.ReLU(), "text"), "a tuple;"),
    ],
)
def test_what_is_no_model_costs_a_sentence(made: object, named: str) -> None:
    with pytest.raises(UsageError, match=f"it returned {named}.*it must return .model, batch."):
        to_workload("mine:make", made)


def test_another_shape_or_another_source_is_another_model(own) -> None:
    def look() -> str | None:
        (cell,) = know_models([plan_cell("users_model:make", "ddp")])
        return cell.shapes

    own("def make(device, batch): return nn.Linear(6, 3), torch.randn(batch, 6)")
    first = look()
    assert first is not None and first == look()
    own("def make(device, batch): return nn.Linear(6, 3), torch.randn(batch, 6)  # changed")
    second = look()
    own("def make(device, batch): return nn.Linear(6, 4), torch.randn(batch, 6)  # changed")
    assert len({first, second, look()}) == 3


def test_a_model_of_thinwires_is_looked_at_where_rows_know_it(tmp_path: Path) -> None:
    cell = plan_cell("small", "ddp")
    assert know_models([cell])[0].shapes is None
    book = RowBook(tmp_path)
    book.add(fake_row(cell, 10.0))
    assert know_models([cell], book.rows)[0].shapes is None and book.has(cell)
    book.rows[0]["shapes"] = "of another one"
    (looked,) = know_models([cell], book.rows)
    assert looked.shapes is not None and not book.has(looked)
    book.add({**fake_row(looked, 11.0), "shapes": looked.shapes})
    assert book.has(looked) and len(book.rows) == 1


def test_a_model_that_cannot_be_built_is_said_and_left_to_fail(own) -> None:
    own("def make(device, batch): raise RuntimeError('no such file')")
    said: list[str] = []
    cells = know_models(
        [plan_cell("users_model:make", "ddp"), plan_cell("small", "ddp")], say=said.append
    )
    assert said == ["model users_model:make cannot be built: no such file"] and len(cells) == 2
