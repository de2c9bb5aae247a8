"""Onlooker: measures some steps of a handle whose method is fixed, and tells what would be better. It switches nothing."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.auto.council import Council
from thinwire.auto.survey import LEAD_STEPS, Survey
from thinwire.engine.reducer import Reducer
from thinwire.plan.advice import Advice, advise_fixed
from thinwire.plan.candidates import Candidate


class Onlooker:
    """One handle's, for so many steps from the next one on; all ranks make it at the same step."""

    def __init__(
        self,
        reducer: Reducer,
        council: Council,
        candidates: Sequence[Candidate],
        present: Candidate,
        steps: int,
    ) -> None:
        """`candidates` are what may be advised, `present` is what is in force."""
        self._reducer = reducer
        self._allowed = list(candidates)
        self._present = present
        self._survey = Survey(reducer, council, [*candidates, present])
        self._until = LEAD_STEPS + steps
        self._turn = 0
        self._advice = Advice((), (), settled=False)
        if council.place.world == 1:
            alone = "There is one worker: nothing is sent, do not compress."
            self._advice = Advice((), (alone,))
        else:
            reducer.before_step.append(self.begin_step)
            reducer.on_ready = self._survey.ready

    def begin_step(self, step: int) -> None:
        self._survey.clock.begin_step()
        self._survey.lead_in(self._turn)
        if self._turn == self._until:
            self.retire()
            self._advice = self._find_advice()
        self._turn += 1

    def retire(self) -> None:
        """Stop measuring."""
        if self.begin_step in self._reducer.before_step:
            self._reducer.before_step.remove(self.begin_step)
            self._reducer.on_ready = None

    def _find_advice(self) -> Advice:
        period = self._survey.period_s()
        profile = self._survey.take_profile((self._present.label,), period)
        if profile is None:
            differ = "The buckets of the last steps differ, so that nothing can be predicted."
            return Advice((), (differ,))
        present = self._survey.predictor(profile, [self._present, *self._allowed])
        plan = present.plan([self._present.label] * len(profile.units))
        decision = self._survey.predictor(profile, self._allowed).decide()
        return advise_fixed(profile, decision, plan, period)

    def advise(self) -> Advice:
        """What was found; one sentence before that."""
        if self._advice.settled:
            return self._advice
        so_far = f"Measuring: step {self._turn} of {self._until}; ask again afterwards."
        return Advice((), (so_far,), settled=False)
