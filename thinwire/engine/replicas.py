"""ReplicaWatch: do all ranks still hold the same parameters?

A bit that flips in one rank's memory, or on its way to one receiver, changes one replica, and nothing that follows changes it
back. So now and then every rank sends 64 bits of its parameters, and 64 of the last update, with a payload; the ranks whose
bits are not those of the others are named, and mended if that was asked for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.engine.drivers import Driver
from thinwire.engine.repair import Follower, repair
from thinwire.errors import ExchangeError
from thinwire.exchange.requests import Gather, Program
from thinwire.kernels.fingerprint import fingerprint
from thinwire.kernels.hostcopy import HostCopy
from thinwire.memory.store import let_go
from thinwire.validate import check_choice, check_positive_int

logger = logging.getLogger(__name__)

SALT = 0x5DEECE66D
"""Makes the word that checks the others differ from their sum."""


@dataclass(frozen=True)
class Sighting:
    """What one rank said of itself."""

    rank: int
    parameters: int
    update: int
    present: bool
    """False for a rank that only keeps the others company, as one that has joined does: its parameters stand still."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Words that were gathered in a step, on their way to the host."""

    step: int
    words: HostCopy
    """int64 [world, 4]"""

    def read(self) -> list[Sighting]:
        """Of all ranks whose words arrived as they were sent."""
        found = []
        for rank, (parameters, update, present, check) in enumerate(self.words.read().tolist()):
            if check == parameters ^ update ^ present ^ SALT:
                found.append(Sighting(rank, parameters, update, bool(present)))
            else:
                logger.warning("the fingerprint of rank %d was damaged on its way here", rank)
        return found


@dataclass(frozen=True)
class Difference:
    """Replicas that are not the same."""

    ranks: tuple[int, ...]
    """Those that are not like most others; all of them if no more than half are alike."""
    majority: tuple[int, ...]
    """More than half of the ranks, which are alike; empty if there are not so many."""
    everybody: bool
    """Whether every rank has said something, so that all of them know of this."""


def compare(sightings: Sequence[Sighting], world: int) -> Difference | None:
    """What differs; None if nothing does."""
    there = [one for one in sightings if one.present]
    groups = Counter((one.parameters, one.update) for one in there)
    if len(groups) <= 1:
        return None
    (most, count), *_ = groups.most_common()
    alike = tuple(one.rank for one in there if (one.parameters, one.update) == most)
    majority = alike if 2 * count > world else ()
    ranks = tuple(one.rank for one in there if one.rank not in majority)
    return Difference(ranks, majority, len(there) == world)


class ReplicaWatch:
    """Compares the replicas of some parameters.

    Args:
        parameters: By name, as they are trained.
        every: Steps between two comparisons; None to compare only when asked.
        on_difference: "raise", or "repair" to mend replicas that differ where that can be done.
        optimizer: Whose state is mended too. Nothing can be mended without it.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        every: int | None = None,
        on_difference: str = "raise",
        optimizer: Optimizer | None = None,
    ) -> None:
        if every is not None:
            check_positive_int("watch", every)
        check_choice("on_difference", on_difference, ("raise", "repair"))
        self.parameters = dict(parameters)
        self.every = every
        self.on_difference = on_difference
        self.optimizer = optimizer
        self.followers: list[Follower] = []
        """Whose state is mended with the parameters."""
        self.aside = False
        """Set by a rank that takes part in exchanges without stepping: the others' parameters move on."""
        self._updates: list[Tensor] = []
        """Fingerprints of the buckets of the last update."""
        self._comparisons: list[Comparison] = []
        """Those that nobody has read yet, in the order of their steps."""

    @property
    def settings(self) -> dict[str, str]:
        """What has to be the same on all ranks."""
        mended = self.optimizer is not None
        return {
            "watch": str(self.every),
            "on_difference": f"{self.on_difference}, optimizer {mended}",
        }

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    @torch.no_grad()
    def note_update(self, flats: Sequence[Tensor]) -> None:
        """These buckets of the step before a comparison hold its update."""
        self._updates.append(fingerprint(flats))

    @torch.no_grad()
    def look(self, step: int) -> Program[None]:
        """Compare all ranks' parameters as they are now; `find` has the answer."""
        updates, self._updates = self._updates, []
        tensors = list(self.parameters.values())
        device = tensors[0].device
        own = fingerprint(tensors).to(device)
        # Buckets may come in another order on another rank's streams.
        update = sum(updates, torch.zeros_like(own))
        for one in updates:
            let_go(one)
        present = torch.full_like(own, int(not self.aside))
        self.aside = False
        words = torch.stack([own, update, present, own ^ update ^ present ^ SALT])
        payload = words.view(torch.uint8)
        request = Gather(payload, "replicas", control_bytes=payload.numel(), apart=True)
        (gathered,) = yield (request,)
        rows = gathered.clone(memory_format=torch.contiguous_format).view(torch.int64)
        self._comparisons.append(Comparison(step, HostCopy(rows)))

    @property
    def waiting(self) -> bool:
        """Whether there are comparisons that nobody has read yet."""
        return bool(self._comparisons)

    def find(self, step: int, world: int) -> Difference | None:
        """What the oldest comparison found: on an accelerator a step later, when its words have long come to the host."""
        waiting = self._comparisons
        if not waiting or (waiting[0].step == step and waiting[0].words.on_device):
            return None
        return compare(waiting.pop(0).read(), world)

    # -- what to do about it -----------------------------------------------------------------------------------

    def act(self, found: Difference, driver: Driver) -> None:
        """Mend the replicas that differ, or raise. Every rank does the same, since all have read the same words."""
        ranks = ", ".join(map(str, found.ranks))
        if not found.everybody:
            raise ExchangeError(f"the replicas differ: {_whose(ranks)}; {ADVICE}")
        names = driver.run(self._find_names(found))
        where = f"{_whose(ranks)} from {_first(names)} on" if names else _whose(ranks)
        if self.on_difference == "raise":
            raise ExchangeError(f"the replicas differ: {where}; {ADVICE}")
        if not found.majority:
            raise ExchangeError(
                f"the replicas differ: {where}, and no more than half of them are alike, so that nothing says which are right; {ADVICE}"
            )
        if self.optimizer is None:
            raise ExchangeError(
                f"the replicas differ: {where}; to have them repaired pass optimizer=, whose state differs too; {ADVICE}"
            )
        repair(driver, self.parameters, self.optimizer, self.followers, source=found.majority[0])
        logger.warning(
            "the replicas differed: %s; they were repaired with what rank %d holds",
            where,
            found.majority[0],
        )

    @torch.no_grad()
    def _find_names(self, found: Difference) -> Program[list[str]]:
        """The parameters that differ, by a fingerprint of each."""
        prints = torch.stack([fingerprint([one]) for one in self.parameters.values()])
        device = next(iter(self.parameters.values())).device
        request = Gather(prints.to(device), "replicas", control_bytes=prints.nbytes)
        (gathered,) = yield (request,)
        differs = (gathered != gathered[:1]).any(0).tolist()
        return [name for name, one in zip(self.parameters, differs, strict=True) if one]


ADVICE = "go back to a checkpoint, and suspect the memory, the links or the cooling of that machine"


def _whose(ranks: str) -> str:
    return (
        f"rank {ranks} is not like the others"
        if "," not in ranks
        else f"ranks {ranks} are not alike"
    )


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more parameters"
