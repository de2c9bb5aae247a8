"""Trials: plans that are used for a few steps each, and what is worth one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.plan.candidates import DENSE
from thinwire.plan.decision import KEPT_WITHIN, NEAR_FASTEST, NEAR_SILENT, Decision, Plan

WORTH_SWITCHING = 0.05
TOO_NEAR = 1.10
"""A few steps do not tell apart what differs by less."""
SPARED_LINK = 0.25
"""A share of a step. Where another plan would spare the link that much, none is kept without a trial: computing may be slower beside
the exchange, and then a step looks as if it took as long without."""

Labels = tuple[str, ...]
"""A candidate for every unit."""


@dataclass
class Trials:
    """How long a step takes under every plan that has been tried, of those that are to be."""

    plans: Sequence[Plan] = ()
    times: dict[Labels, tuple[float, ...]] = field(default_factory=dict)
    """Seconds, of one trial or two."""

    def note(self, labels: Labels, seconds: float) -> None:
        self.times[labels] = (*self.times.get(labels, ()), seconds)

    @property
    def seconds(self) -> dict[Labels, float]:
        """Of the faster trial: whatever else a machine does only adds to it."""
        return {labels: min(times) for labels, times in self.times.items()}

    def next(self) -> Plan | None:
        """The first that has not been tried; then, once more, those that are too near each other to be told apart."""
        untried = [plan for plan in self.plans if plan.labels not in self.times]
        if untried or not self.plans:
            return next(iter(untried), None)
        first = {plan.labels: self.times[plan.labels][0] for plan in self.plans}
        limit = TOO_NEAR * min(first.values())
        near = [plan for plan in self.plans if first[plan.labels] <= limit]
        again = [plan for plan in near if len(self.times[plan.labels]) < 2]
        return again[0] if again and len(near) > 1 else None

    def winner(self, silent_s: float) -> Labels:
        """The one that keeps most among those that are fast enough, where a step without communication takes so long.

        The search may go up to 10 % over such a step; what was timed is compared with the fastest that was timed, too.
        """
        # A trial that was resumed in mid-switch began under what had been in force, which is no plan.
        seconds = {plan.labels: self.seconds[plan.labels] for plan in self.plans}
        fastest = min(seconds.values())
        deadline = min(max(NEAR_SILENT * silent_s, NEAR_FASTEST * fastest), KEPT_WITHIN * fastest)
        fitting = [plan for plan in self.plans if seconds[plan.labels] <= deadline]
        return max(fitting, key=lambda plan: (plan.kept, -seconds[plan.labels])).labels


@dataclass(frozen=True)
class Proposal:
    """What is worth a trial; if nothing is, what is used."""

    why: str
    finalists: Sequence[Labels] = ()
    labels: Labels = ()


def find_sparing(plan: Plan, others: Sequence[Plan]) -> Plan | None:
    """Of those that would spare the link so much that prediction alone does not decide, the one predicted to be the fastest."""
    limit = plan.prediction.link_s - SPARED_LINK * plan.prediction.step_s
    sparing = [other for other in others if other.prediction.link_s < limit]
    return min(sparing, key=lambda other: other.prediction.step_s, default=None)


def propose(decision: Decision, now: Plan | None, silent_s: float, count: int) -> Proposal:
    """At most `count` plans that are worth a trial, where `now` is the one in force; None before the first decision.

    One more, where prediction alone does not decide.
    """
    chosen, dense = decision.chosen, decision.dense
    near = chosen.prediction.step_s <= KEPT_WITHIN * decision.fastest.prediction.step_s
    finalists = decision.finalists(count)
    why = f"{chosen.name} is predicted to take {1e3 * chosen.prediction.step_s:.1f} ms"
    sparing = find_sparing(chosen if now is None else now, decision.uniform)
    if now is not None:
        # A plan is in force: it has to be worth while to leave it.
        gain = 1 - chosen.prediction.step_s / now.prediction.step_s
        less = chosen.kept > now.kept and gain > -WORTH_SWITCHING / 2
        better = chosen.labels != now.labels and (gain >= WORTH_SWITCHING or less)
        if near and not better and sparing is None:
            return Proposal(f"stays with {now.name}", labels=now.labels)
    elif near and set(chosen.labels) == {DENSE} and sparing is None:
        why = (
            f"dense is predicted {1e3 * dense.prediction.exposed_s:.1f} ms slower than no communication "
            f"({1e3 * silent_s:.1f} ms), and nothing is faster in a way that counts: not compressed"
        )
        return Proposal(why, labels=dense.labels)
    worth_it = (chosen, now, sparing, *finalists)
    labels = dict.fromkeys(plan.labels for plan in worth_it if plan is not None)
    return Proposal(why, list(labels)[: count + (sparing is not None)])
