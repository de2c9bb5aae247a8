"""Which optimizers are known: by their class, and by its heirs only where that was said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.optim.known import KnownOptimizers, evidence_of
from thinwire.optim.momentum import MomentumTakeover, VelocityTakeover
from thinwire.optim.takeover import take_over

PARAMETERS = {"weight": nn.Parameter(torch.zeros(4, 4))}


class OwnSGD(torch.optim.SGD):
    pass


class OwnAdam(torch.optim.AdamW):
    pass


class OwnDGCSGD(tw.optim.DGCSGD):
    pass


def test_heirs_are_known_only_where_it_was_said():
    table: KnownOptimizers[str] = KnownOptimizers()
    table.register(torch.optim.SGD, "sgd")
    table.register(torch.optim.Adam, "adam", heirs=True)
    weights = PARAMETERS.values()
    assert table.find(torch.optim.SGD(weights, lr=1)) == "sgd"
    assert table.find(OwnSGD(weights, lr=1)) is None
    assert table.find(OwnAdam(weights)) == "adam"
    assert table.find(torch.optim.RMSprop(weights)) is None
    assert table.find(None) is None


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (torch.optim.SGD(PARAMETERS.values(), lr=1, momentum=0.9), "sgd"),
        (torch.optim.SGD(PARAMETERS.values(), lr=1), "unknown"),
        (OwnSGD(PARAMETERS.values(), lr=1, momentum=0.9), "unknown"),
        (OwnAdam(PARAMETERS.values()), "adam"),
        (torch.optim.RAdam(PARAMETERS.values()), "adam"),
        (None, "unknown"),
    ],
)
def test_evidence_is_about_kinds_of_optimizers(optimizer, kind):
    assert evidence_of(optimizer) == kind


def test_a_takeover_is_found_by_the_optimizers_it_has_registered():
    sgd = torch.optim.SGD(PARAMETERS.values(), lr=1, momentum=0.9)
    assert type(take_over(tw.DGC(), sgd, PARAMETERS)) is MomentumTakeover
    made_for_it = OwnDGCSGD(PARAMETERS.values(), lr=1)
    assert type(take_over(tw.DGC(), made_for_it, PARAMETERS)) is VelocityTakeover
    with pytest.raises(UsageError, match="optimizer is OwnSGD; DGC can take momentum over from"):
        take_over(tw.DGC(), OwnSGD(PARAMETERS.values(), lr=1), PARAMETERS)
    method = tw.AdamScale(method=tw.TopK(density=0.1))
    with pytest.raises(UsageError, match="optimizer is OwnAdam; AdamScale can take over from"):
        take_over(method, OwnAdam(PARAMETERS.values()), PARAMETERS)
