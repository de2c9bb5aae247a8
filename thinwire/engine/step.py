"""StepRecord: what one step has done so far and may have to take back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.kernels.inspection import any_of
from thinwire.layout import Group
from thinwire.memory.account import Account


@dataclass
class StepRecord:
    seen: set[str] = field(default_factory=set)
    """Parameters whose buckets have come."""
    accounts: list[Account] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    """The group of each account."""
    buckets: int = 0
    bad: list[Tensor] = field(default_factory=list)
    """One verdict per bucket that came to its end."""
    scale: Tensor | None = None
    """The loss scale of the step's gradients; None where there is none."""
    unscalable: Tensor | None = None
    """bool []: the loss scale is none that gradients could be divided by."""
    overruled: Tensor | None = None
    """What somebody else says of the step: bad if this is, too."""
    ended: bool = False
    """Whether its backward came to its end; one that did not has nothing that was used."""
    goes_on: bool = False
    """Whether the next backward adds to its gradients: a verdict then takes back both."""
    settled: bool = False
    """Whether the verdict has been applied; the next bucket then begins a new step."""

    def add_account(self, account: Account, group: Group) -> None:
        self.accounts.append(account)
        self.groups.append(group)

    def accepted(self) -> dict[str, Tensor]:
        """What this rank has sent so far and not been given back, by parameter name; for tests and studies."""
        found: dict[str, Tensor] = {}
        for group, account in zip(self.groups, self.accounts, strict=True):
            dense = account.accepted()
            found.update({slot.name: slot.view(dense).clone() for slot in group.slots})
        return found

    @property
    def complete(self) -> bool:
        """Whether the backward ended, and all its buckets: an update that was never used counts for nothing."""
        return self.ended and len(self.bad) == self.buckets

    def verdict(self, device: torch.device) -> Tensor:
        """bool []: the step is bad, so that nothing of it counts."""
        if not self.complete:
            return torch.ones((), dtype=torch.bool, device=device)
        verdicts = self.bad if self.overruled is None else [*self.bad, self.overruled]
        return any_of(verdicts) if verdicts else torch.zeros((), dtype=torch.bool, device=device)
