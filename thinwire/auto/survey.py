"""Survey: real steps of one job, the link and the candidates' work, measured on all ranks at the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from thinwire.auto.clock import EnergyMeter, MeasuredSteps, StepClock
from thinwire.auto.council import Council
from thinwire.auto.measuring import cut_units, make_profile, measure_prices, measure_work
from thinwire.auto.rehearsal import Traffic
from thinwire.engine.reducer import Reducer
from thinwire.layout import Bucket
from thinwire.observe.clock import Mark
from thinwire.plan.candidates import DENSE, Candidate
from thinwire.plan.decision import Predictor
from thinwire.plan.profile import Profile, WorkCost
from thinwire.plan.step_model import find_dearness

WARM_STEPS = 2
"""Not measured: DDP changes its buckets after the first step, and first steps compile and flush."""
QUIET_STEPS = 2
"""In which nothing is sent before the last gradient is there. Beside an exchange gradients may take many times as long, so that a step
would look as if it took as long without."""
LEAD_STEPS = WARM_STEPS + QUIET_STEPS
"""Before steps are timed as they are."""


class Survey:
    """What is known of one reducer's steps so far; whoever installs it on the reducer says when a step begins."""

    def __init__(self, reducer: Reducer, council: Council, candidates: Sequence[Candidate]) -> None:
        self.reducer = reducer
        self.candidates = {one.label: one for one in candidates}
        self.clock = StepClock(reducer.device)
        self.work: dict[str, WorkCost] = {}
        """What encoding and decoding take by candidate; measured once."""
        self.council = council
        self._meter = EnergyMeter()
        self._looks = False
        """Whether magnitudes of gradients are counted in this step."""
        self._traffic = Traffic(council.place.world)
        self._quiet: MeasuredSteps | None = None
        """What was seen of the last quiet steps."""

    def ready(self, bucket: Bucket, at: Mark) -> Callable[[], None]:
        """A bucket, ready at this mark, is about to be encoded."""
        if self._looks:
            self._meter.look(bucket.layout, bucket.flat)
        return self.clock.ready(bucket.layout, at)

    def lead_in(self, turn: int) -> None:
        """A step begins; `turn` is its number, from 0 on. Steps from LEAD_STEPS on are timed as they are."""
        self._looks = turn == WARM_STEPS
        if turn == WARM_STEPS - 1:
            self.reducer.keep_quiet(QUIET_STEPS)
        elif turn == WARM_STEPS:
            self.restart()
        elif turn == LEAD_STEPS:
            self._quiet = self.clock.measured(typical=min)
            self.restart()

    def restart(self) -> None:
        """What has just been done takes no part in the time of a step."""
        self.clock.clear()
        self.clock.begin_step()

    def period_s(self) -> float:
        """Of the slowest rank, the median over the steps since the last restart."""
        return self.council.largest([median(self.clock.periods())])[0]

    def take_profile(self, in_force: tuple[str, ...], period_s: float) -> Profile | None:
        """Measure what is left to measure and put everything together; the same on all ranks.

        `in_force` are the candidates by which the units have been encoded, one that stands for all, or none for dense; steps
        under them took `period_s`, by which the prices of the link are corrected. None if the units of the last steps differ,
        as of models that use other parameters in every step.
        """
        steps = self.clock.measured()
        if self.council.largest([0.0 if steps is not None else 1.0])[0] or steps is None:
            return None
        device, parameters = self.reducer.device, self.reducer.parameters
        network = self.reducer.driver.network
        assert network is not None, "there is a council, so there is a link"
        prices = measure_prices(network, self.council, device)
        if not self.work:
            dtype = next(iter(parameters.values())).dtype
            candidates = list(self.candidates.values())
            self.work = measure_work(candidates, self.council, device, dtype)
        units = cut_units(steps, parameters)
        labels = spread(in_force, sum(map(len, units)))
        if self._quiet is not None and self._quiet.units == steps.units:
            # A pause only ever adds. So the earliest moment counts, in whichever kind of step.
            earliest = tuple(map(min, self._quiet.ready_s, steps.ready_s))
            steps = replace(steps, ready_s=earliest)
        profile = make_profile(
            steps,
            self._meter,
            parameters,
            council=self.council,
            device=device,
            work=self.work,
            prices=prices,
            coalesce_bytes=self.reducer.coalesce_bytes,
        )
        # The same figures on every rank; of the energy curves rank 0's count.
        said = self.council.decide(lambda: self._correct(profile, labels, period_s).to_json())
        return Profile.from_json(said)

    def _correct(self, profile: Profile, labels: Sequence[str], period_s: float) -> Profile:
        """With prices by which a step under the candidates in force takes as long as it did."""
        assert profile.prices is not None
        in_force = [self.candidates[label] for label in dict.fromkeys([*labels, DENSE])]
        predictor = self.predictor(profile, in_force)
        costs = predictor.costs(predictor.plan(labels))
        factor = find_dearness(profile.conditions, costs, period_s)
        return replace(profile, prices=profile.prices.times(factor))

    def predictor(
        self, profile: Profile, candidates: Sequence[Candidate] | None = None
    ) -> Predictor:
        """Of all candidates or some, on the link and among the workers that were measured."""
        assert profile.prices is not None
        chosen = list(self.candidates.values()) if candidates is None else candidates
        return Predictor(profile, chosen, profile.prices, self._traffic.rounds)


def spread(labels: tuple[str, ...], count: int) -> tuple[str, ...]:
    """A label for each of so many units, of which those in force may have been others."""
    if len(labels) == count:
        return labels
    return (max(labels, key=labels.count) if labels else DENSE,) * count
