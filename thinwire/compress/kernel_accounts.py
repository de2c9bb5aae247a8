"""TakeBackAccount: what kernels have sent comes back by a kernel, and only if it has to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from thinwire.kernels.cuda.joint import Joint
from thinwire.memory.account import Account
from thinwire.memory.store import Binding


class StepFlags(Protocol):
    """What kernels tell of the last step, on the device."""

    every_slot: Tensor
    """uint8 [slots], all up."""
    used: Tensor
    """uint8 [slots]: a rank had a gradient."""
    unused: Tensor
    """bool []: no rank had one for some slot."""
    never: Tensor
    """bool []: a flag that is never up."""


class TakeBackAccount(Account):
    """What was sent is known by its codes alone; taking it back costs a look at two flags unless it has to be done.

    What was sent of slots that no rank had a gradient for returns at `settle` with the rest that may have to. A narrow memory is
    packed as soon as the exchange has ended, so that it returns before, and again after what was taken back.
    """

    def __init__(
        self,
        c: Tensor,
        bindings: Sequence[Binding],
        flags: StepFlags,
        momentum: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(c)
        self.bindings = bindings
        """Of c and, if there is one, of the momentum."""
        self.flags = flags
        self.momentum = momentum
        """What the kernels were told of a momentum, if there is one."""
        self.used: Tensor | None = None
        """uint8 [slots], once the headers of all ranks are there."""
        self._unused: Tensor = flags.never
        """bool []: what was sent of slots without a gradient has to return."""

    @abstractmethod
    def _joint_entry(self, used: Tensor) -> Joint | None:
        """How what was sent is taken back together with that of other accounts; None if it cannot be."""

    @abstractmethod
    def _give_back(self, used: Tensor, bad: Tensor) -> None:
        """Return to c what was sent: of used slots if `bad` is up, of the others if `self._unused` is."""

    def arrive(self) -> None:
        """The headers of all ranks have been read, and the exchange has ended."""
        self.used, self._unused = self.flags.used, self.flags.unused
        if self.c is not self.bindings[0].flat:
            self._return_unused()
            self.rest()

    def settle_jointly(self, bad: Tensor) -> Joint | None:
        plain = self.c is self.bindings[0].flat and self.c.numel()
        if not plain or self._verdict is not None or self._rounding is not None:
            return None
        used = self.flags.every_slot if self.used is None else self.used
        joint = self._joint_entry(used)
        if joint is not None:
            self._verdict, self._unused = bad, self.flags.never
        return joint

    def settle(self, bad: Tensor) -> None:
        turned = bad if self._verdict is None else bad & ~self._verdict
        # If the exchange broke off, nothing was given back yet.
        used = self.flags.every_slot if self.used is None else self.used
        resting = self.c is self.bindings[0].flat
        flag = turned if resting and self._rounding is None else None
        if resting:
            self._take([binding.lift(flag) for binding in self.bindings])
        # First what came last, so that every sum on the way is one that c has held before.
        if self._rounding is None:
            self._verdict = bad
        else:
            super().settle(bad)
        self._give_back(used, turned)
        self._unused = self.flags.never
        self.rest(flag)

    def rest(self, flag: Tensor | None = None) -> None:
        for binding, flat in zip(self.bindings, (self.c, *self.momentum[1:2]), strict=True):
            binding.rest(flat, flag)
        self._take([binding.flat for binding in self.bindings])

    def _take(self, flats: Sequence[Tensor]) -> None:
        """Go on in these buffers."""
        self.c = flats[0]
        # What the kernels read of a momentum before the step is of no use any more.
        self.momentum = [*flats[1:], *flats[1:], *self.momentum[2:]]

    def _return_unused(self) -> None:
        self._give_back(self.flags.used, self.flags.never)
        self._unused = self.flags.never
