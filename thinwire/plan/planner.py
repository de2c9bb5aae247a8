"""Planner: the plan in force in every step, for methods and densities that change with time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from thinwire.layout import ParameterInfo
from thinwire.methods.base import Method
from thinwire.plan.policy import Rule, SlotPlan, make_plan

# Beyond every schedule.
FAR = 1 << 62


class Planner:
    """Knows the parameters, the method and the rules of a handle; a function of the step alone."""

    def __init__(
        self, infos: Iterable[ParameterInfo], method: Method, policy: Sequence[Rule], world: int
    ) -> None:
        self._infos = list(infos)
        self._method = method
        self._policy = list(policy)
        self._world = world
        self._in_force: Hashable = None
        ruled = [rule.method for rule in policy if rule.method is not None]
        self.host_sizes = {size for one in (method, *ruled) for size in one.host_sizes}
        """What all methods that may come to work say of their hosts."""
        # What cannot work later had better be refused now, outside of any backward.
        for step in (*method.turns, FAR):
            if self._key(step) != self._key(0):
                make_plan(self._infos, method, self._policy, world, step, quiet=True)

    def plan(self, step: int) -> dict[str, SlotPlan]:
        """The plan of a step, which is in force from now on."""
        quiet = self._in_force is not None
        plan = make_plan(self._infos, self._method, self._policy, self._world, step, quiet)
        self._in_force = self._key(step)
        return plan

    def change(self, step: int) -> dict[str, SlotPlan] | None:
        """The plan of a step if it differs from the one in force."""
        return None if self._key(step) == self._in_force else self.plan(step)

    def _key(self, step: int) -> Hashable:
        ruled = [rule.method.at(step) for rule in self._policy if rule.method is not None]
        return (self._method.at(step), *ruled)
