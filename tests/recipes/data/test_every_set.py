"""What every data set owes the loop: batches of its kind, the same again from the same seed, every test example once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.recipes.data.official import NEED_TOKENIZERS, WRITERS
from thinwire.recipes.data import DATASETS
from thinwire.recipes.examples import Batch, Data, DataOptions
from thinwire.tools.settings.names import look_up

BATCH = 4


def load(name: str, options: DataOptions) -> Data:
    data = look_up("data", name, DATASETS)(options)
    assert isinstance(data, Data)
    return data


def load_official(name: str, folder: Path, tiny: bool = True) -> Data:
    if name in NEED_TOKENIZERS:
        pytest.importorskip("tokenizers")
    if name in WRITERS:
        WRITERS[name](folder)
    return load(name, DataOptions(data_dir=folder, tiny=tiny))


def equal(one: Batch, other: Batch) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def seeded(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def check(data: Data) -> None:
    dealt = [
        data.train.deal(seed=1, epoch=0, rank=rank, world=2, batch_size=BATCH) for rank in range(2)
    ]
    together = data.train.batches([places[1] for places in dealt], seeded(2))
    for batch, places, generator in zip(together, dealt, seeded(2), strict=True):
        assert equal(batch, data.train.batch(places[1], generator))
    for rank in range(2):
        places = dealt[rank]
        assert len(places) >= 3
        same = [torch.Generator().manual_seed(5) for _ in range(2)]
        first, again = (data.train.batch(places[2], generator) for generator in same)
        assert len(first[0]) == BATCH
        assert equal(first, again)
    shares = [data.test.deal_test(rank=rank, world=2, batch_size=BATCH) for rank in range(2)]
    for places in (place for share in shares for place in share):
        assert equal(data.test.batch(places, None), data.test.batch(places, None))
    placed = torch.cat([place for share in shares for place in share])
    assert len(placed.unique()) == len(placed)


@pytest.mark.parametrize("name", DATASETS)
def test_official_files_give_repeatable_batches(name: str, tmp_path: Path) -> None:
    data = load_official(name, tmp_path)
    check(data)
    there = data.train.to(torch.device("cpu"))
    places = there.deal(seed=0, epoch=0, rank=0, world=1, batch_size=BATCH)[0]
    same = [torch.Generator().manual_seed(7) for _ in range(2)]
    assert equal(there.batch(places, same[0]), data.train.batch(places, same[1]))


@pytest.mark.parametrize("tiny", [True, False])
@pytest.mark.parametrize("name", DATASETS)
def test_synthetic_needs_nothing_and_is_the_same_again(
    name: str, tiny: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    one, other = (load(name, DataOptions(synthetic=True, tiny=tiny)) for _ in range(2))
    check(one)
    assert one.kind == other.kind
    places = one.train.deal(seed=0, epoch=0, rank=0, world=1, batch_size=BATCH)[0]
    assert equal(
        *(data.train.batch(places, torch.Generator().manual_seed(0)) for data in (one, other))
    )


@pytest.mark.parametrize("name", WRITERS)
def test_tiny_synthetic_and_official_data_are_of_one_kind(name: str, tmp_path: Path) -> None:
    """Only sizes that come from the files differ."""
    official = load_official(name, tmp_path).kind
    synthetic = load(name, DataOptions(synthetic=True, tiny=True)).kind
    assert type(official) is type(synthetic)
    for field in ("channels", "height", "width", "length", "alphabet"):
        assert getattr(official, field, None) == getattr(synthetic, field, None)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "chars"])
def test_missing_files_are_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not complete in .* missing; .* or use --synthetic$"):
        load(name, DataOptions(data_dir=tmp_path))
