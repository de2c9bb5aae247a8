"""Trials: plans that are used for a few steps each, and what is worth one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.plan.candidates import DENSE
from thinwire.plan.decision import KEPT_WITHIN, Decision, Plan, find_deadline

WORTH_SWITCHING = 0.05
TOO_NEAR = 1.10
"""A few steps do not tell apart what differs by less."""
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
        """The one that keeps most among those that are fast enough, where a step without communication takes so long."""
        # A trial that was resumed in mid-switch began under what had been in force, which is no plan.
        seconds = {plan.labels: self.seconds[plan.labels] for plan in self.plans}
        deadline = find_deadline(silent_s, min(seconds.values()), KEPT_WITHIN)
        fitting = [plan for plan in self.plans if seconds[plan.labels] <= deadline]
        return max(fitting, key=lambda plan: (plan.kept, -seconds[plan.labels])).labels


@dataclass(frozen=True)
class Proposal:
    """What is worth a trial; if nothing is, what is used."""

    why: str
    finalists: Sequence[Labels] = ()
    labels: Labels = ()


def propose(decision: Decision, now: Plan | None, silent_s: float, count: int) -> Proposal:
    """At most `count` plans that are worth a trial, and `now`, the one in force, which needs none; None before the first decision."""
    chosen, dense = decision.chosen, decision.dense
    if now is not None:
        # A plan is in force: it has to be worth while to leave it.
        gain = 1 - chosen.prediction.step_s / now.prediction.step_s
        less = chosen.kept > now.kept and gain > -WORTH_SWITCHING / 2
        if chosen.labels == now.labels or not (gain >= WORTH_SWITCHING or less):
            return Proposal(f"stays with {now.name}", labels=now.labels)
    elif set(chosen.labels) == {DENSE}:
        why = (
            f"dense is predicted {1e3 * dense.prediction.exposed_s:.1f} ms slower than no communication "
            f"({1e3 * silent_s:.1f} ms), and nothing is faster in a way that counts: not compressed"
        )
        return Proposal(why, labels=dense.labels)
    why = f"{chosen.name} is predicted to take {1e3 * chosen.prediction.step_s:.1f} ms"
    worth_it = (chosen, now, *decision.finalists(count))
    labels = dict.fromkeys(plan.labels for plan in worth_it if plan is not None)
    return Proposal(why, list(labels)[: count + (now is not None)])
