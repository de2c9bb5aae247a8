"""The decision: every candidate predicted, and the least compression that costs no time.

1. Find the fastest step T_min that any combination of candidates gives.
2. Among the combinations within 1.10 x the step without communication, but no less than 1.02 x and no more than 1.03 x T_min, keep the
   most energy.
Rounding keeps nearly all of it and selection less, so that ties go dense > bf16 > int8 > int4 > sparse by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.layout import ParameterInfo
from thinwire.methods.base import Method
from thinwire.plan.candidates import DENSE, Candidate, families
from thinwire.plan.layerwise import escape
from thinwire.plan.policy import Rule
from thinwire.plan.prices import Prices, Rounds, sent_bytes
from thinwire.plan.profile import Profile, Unit
from thinwire.plan.search import Level, find_best, find_fastest
from thinwire.plan.step_model import Conditions, Cost, StepPrediction, predict_step

NEAR_SILENT = 1.10
"""A step this near to one without communication is fast enough."""
NEAR_FASTEST = 1.02
"""So is one this near to the fastest that can be had."""
KEPT_WITHIN = 1.05
"""What is kept for good takes no more than this many times the fastest that was tried, however near to no communication it is."""
SOUGHT_WITHIN = 1.03
"""Less, because what is sought may take longer than predicted."""
WORTH_A_TRIAL = 1.5
"""What is predicted to take this many times the fastest does not win, and trying it may take minutes on a slow link."""


def find_deadline(silent_s: float, fastest_s: float, within: float) -> float:
    """How long a step may take: up to 10 % more than one without communication, but not above `within` times the fastest, nor below
    1.02 times the fastest."""
    return min(max(NEAR_SILENT * silent_s, NEAR_FASTEST * fastest_s), within * fastest_s)


FindRounds = Callable[[Sequence[ParameterInfo], Method], Rounds]
"""The collectives that a bucket of these parameters asks for under a method."""


def describe(labels: Sequence[str]) -> str:
    """For people: one label, or how many units have which."""
    counts = {label: list(labels).count(label) for label in dict.fromkeys(labels)}
    if len(counts) == 1:
        return labels[0]
    return " + ".join(f"{count} x {label}" for label, count in counts.items())


@dataclass(frozen=True)
class Plan:
    """A candidate for every unit, and what it is predicted to take."""

    labels: tuple[str, ...]
    prediction: StepPrediction
    kept: float
    """Share of the gradient's squared sum that arrives at once; each unit counts by its elements."""
    sent_bytes: float
    """What a rank sends in a step."""

    @property
    def name(self) -> str:
        return describe(self.labels)


@dataclass(frozen=True)
class Decision:
    """What was chosen, and what else there was."""

    chosen: Plan
    fastest: Plan
    uniform: tuple[Plan, ...]
    """Every candidate for all units alike."""
    deadline_s: float

    @property
    def dense(self) -> Plan:
        return next(plan for plan in self.uniform if plan.name == DENSE)

    def finalists(self, count: int) -> list[Plan]:
        """What is worth a trial: the choice, then by predicted time whatever else is near, each once."""
        limit = WORTH_A_TRIAL * self.fastest.prediction.step_s
        near = [p for p in (self.fastest, *self.uniform) if p.prediction.step_s <= limit]
        others = sorted(near, key=lambda plan: plan.prediction.step_s)
        found = {plan.labels: plan for plan in (self.chosen, *others)}
        return list(found.values())[:count]


class Predictor:
    """Prices every candidate on every unit of a profile, on one link among so many workers."""

    def __init__(
        self,
        profile: Profile,
        candidates: Sequence[Candidate],
        prices: Prices,
        find_rounds: FindRounds,
        world: int | None = None,
    ) -> None:
        self.profile = profile
        self.conditions: Conditions = profile.conditions
        self.candidates = {one.label: one for one in candidates if one.label in profile.work}
        self._prices = prices
        self._find_rounds = find_rounds
        self._world = profile.world if world is None else world
        self._sizes = [sum(i.numel for i in profile.infos(unit)) for unit in profile.units]
        self._mates = [len(unit) for unit in self.conditions.units for _ in unit]
        """How many are encoded as one with every unit, itself included."""
        self._kinds = {label: number for number, label in enumerate(self.candidates)}
        self._levels = {
            label: [self._level(index, candidate) for index in range(len(self._sizes))]
            for label, candidate in self.candidates.items()
        }

    def _level(self, index: int, candidate: Candidate) -> tuple[Level, float]:
        unit, numel = self.profile.units[index], self._sizes[index]
        rounds = self._find_rounds(self.profile.infos(unit), candidate.method)
        plain = self.candidates[DENSE]
        if rounds == self._find_rounds(self.profile.infos(unit), plain.method):
            # Among so many workers it would send everything dense by itself.
            candidate = plain
        seconds, sent = self._prices.seconds(rounds), sent_bytes(rounds)
        if candidate.method.seldom is not None:
            # A step costs its share of what is sent in some steps only.
            every, fuller = candidate.method.seldom
            more = self._find_rounds(self.profile.infos(unit), fuller)
            seconds += (self._prices.seconds(more) - seconds) / every
            sent += (sent_bytes(more) - sent) / every
        work = self.profile.work[candidate.label]
        encode, decode = work.per_element(
            numel, self._world, self.profile.world, self.profile.sharing
        )
        cost = Cost(
            encode,
            seconds,
            decode + work.decode.latency_s / self._mates[index],
            self._prices.latencies(rounds),
            sent,
            work.encode.latency_s,
            self._kinds[candidate.label],
        )
        weight = numel / max(1, sum(self._sizes))
        return Level(cost, weight * candidate.kept(unit.curve)), sent

    def plan(self, labels: Sequence[str]) -> Plan:
        levels = [self._levels[label][index] for index, label in enumerate(labels)]
        prediction = predict_step(self.conditions, [level.cost for level, _ in levels])
        kept = sum(level.kept for level, _ in levels)
        return Plan(tuple(labels), prediction, kept, sum(sent for _, sent in levels))

    def costs(self, plan: Plan) -> list[Cost]:
        return [self._levels[label][i][0].cost for i, label in enumerate(plan.labels)]

    def decide(self) -> Decision:
        """Of every family the best, and of these the one that keeps most."""
        groups = [
            [one.label for one in family] for family in families(list(self.candidates.values()))
        ]
        fastest = min(
            (self._found(group, None) for group in groups), key=lambda p: p.prediction.step_s
        )
        deadline = self._deadline(fastest.prediction.step_s)
        fitting = [self._found(group, deadline) for group in groups]
        in_time = [p for p in fitting if p.prediction.step_s <= deadline * (1 + 1e-9)]
        chosen = min(in_time or [fastest], key=lambda p: (-p.kept, p.prediction.step_s))
        uniform = tuple(self.plan([label] * len(self._sizes)) for label in self.candidates)
        return Decision(chosen, fastest, uniform, deadline)

    def decide_alike(self) -> Plan:
        """The same decision, if all units have to be alike."""
        plans = [self.plan([label] * len(self._sizes)) for label in self.candidates]
        deadline = self._deadline(min(plan.prediction.step_s for plan in plans))
        fitting = [plan for plan in plans if plan.prediction.step_s <= deadline]
        return max(fitting, key=lambda plan: (plan.kept, -plan.prediction.step_s))

    def _deadline(self, fastest_s: float) -> float:
        return find_deadline(self.conditions.silent_s, fastest_s, SOUGHT_WITHIN)

    def _found(self, labels: Sequence[str], deadline_s: float | None) -> Plan:
        levels = [
            [self._levels[label][index][0] for label in labels] for index in range(len(self._sizes))
        ]
        found = (
            find_fastest(self.conditions, levels)
            if deadline_s is None
            else find_best(self.conditions, levels, deadline_s)
        )
        return self.plan([labels[number] for number in found.choice])


def as_settings(
    labels: Sequence[str],
    units: Sequence[Unit],
    parameters: Mapping[str, ParameterInfo],
    candidates: Mapping[str, Candidate],
) -> tuple[Method, list[Rule]]:
    """The plan as a method for most elements, and rules by parameter name for the rest."""
    elements: dict[str, int] = {}
    for label, unit in zip(labels, units, strict=True):
        numel = sum(parameters[name].numel for name in unit.names)
        elements[label] = elements.get(label, 0) + numel
    most = max(elements, key=lambda label: elements[label])
    rules = []
    for label, unit in zip(labels, units, strict=True):
        method = candidates[label].method
        for name in unit.names if label != most else ():
            # A rule that names a method would have vectors compressed too.
            vector = len(parameters[name].full_shape) < 2
            dense = label == DENSE or (vector and not method.is_dense)
            pattern = escape(name)
            rules.append(Rule(pattern, dense=True) if dense else Rule(pattern, method=method))
    return candidates[most].method, rules
