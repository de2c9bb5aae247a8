"""Pilot: steers a handle whose method chooses for itself. Measure, try, watch; all ranks at the same steps."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

from thinwire.auto.council import Council
from thinwire.auto.measuring import UNIFORM_CURVE
from thinwire.auto.memo import Memo
from thinwire.auto.survey import LEAD_STEPS, WARM_STEPS, Survey, spread
from thinwire.auto.trials import Trials, propose
from thinwire.engine.reducer import Reducer
from thinwire.methods.base import Adaptive, Method
from thinwire.plan.advice import Advice, make_advice
from thinwire.plan.candidates import Candidate
from thinwire.plan.decision import Decision, Predictor, as_settings, describe
from thinwire.plan.policy import Rule
from thinwire.plan.profile import PROFILE_VERSION, Profile, Unit

logger = logging.getLogger(__name__)

LEAST_STEPS = 3
SLOW_START = 5.0
"""A dense step that takes this many times one without communication is too slow to be measured on."""
SLOW_STEP_S = 0.5
"""Shorter steps are soon over, and a first one that takes longer may only have opened connections."""
QUICK_STARTS = {"cpu": "int8", "cuda": "int4"}
"""The candidate that it is measured on instead, if it is one. On a CPU packing 4 bits takes longer than sending 8."""
SURPRISE = 0.15
"""A step time that differs by more from what was expected"""
SURPRISES = 3
"""in so many windows on end makes it plan anew."""
PROFILE_VARIABLE = "THINWIRE_PROFILE"
"""Names a file that rank 0 writes its profile to when it has been measured."""

ONLY_DENSE = (
    "tw.Auto() stays dense, as nothing else is known to be safe without optimizer=, or with one that is neither SGD with momentum nor "
    "of Adam's kind: pass optimizer=, or quality='balanced'."
)
OBJECTED_ELSEWHERE = "another worker's optimizer has to keep its work"
MEASURING, TRYING, WATCHING = "measuring", "trying", "watching"

Switch = Callable[[Method, Sequence[Rule]], bool]
"""Use a method and rules from this step on; False if that takes another step, before which it must be called again."""


class Pilot:
    """One handle's. `begin_step` is called by its reducer."""

    def __init__(
        self,
        adaptive: Adaptive,
        candidates: Sequence[Candidate],
        reducer: Reducer,
        council: Council,
        switch: Switch,
        find_objection: Callable[[], str],
    ) -> None:
        """`find_objection` says why the optimizer's work has to stay with it, if it has to; that may change in mid-training."""
        self.adaptive = adaptive
        self.candidates = {one.label: one for one in candidates}
        self.history: list[tuple[int, str]] = []
        """(step, what was done in it), for people and for tests."""
        self._reducer = reducer
        self.survey = Survey(reducer, council, candidates)
        """What it measures."""
        self._clock = self.survey.clock
        self._switch = switch
        self._find_objection = find_objection
        self._objection = ""
        self._chooses = len(self.candidates) > 1 and council.place.world > 1
        """Whether there is anything to choose from, and a link."""
        self._begin_anew()
        if self._chooses:
            reducer.before_step.append(self.begin_step)

    def _begin_anew(self) -> None:
        """As if nothing had been measured or decided yet."""
        self.phase = WATCHING
        self.profile: Profile | None = None
        self.decision: Decision | None = None
        self.labels: tuple[str, ...] = ()
        """The candidate in force for every unit; empty before the first decision."""
        self._clock.clear()
        self._turn = 0
        """Steps begun in this phase."""
        self._until = LEAD_STEPS + self.adaptive.measure_steps
        self._predictor: Predictor | None = None
        self._excluded: frozenset[str] = frozenset()
        """Candidates that would take over what has to stay with the optimizer for now."""
        self._units: tuple[Unit, ...] = ()
        self._trials = Trials()
        self._expected_s = math.nan
        self._surprises = 0
        self._has_chosen = False
        """Whether what is in force is what came out of a decision, and no makeshift to measure on."""
        self._wanted: tuple[str, ...] | None = None
        """Labels that a switch under way will bring."""
        if self._chooses:
            self._enter(MEASURING)

    @property
    def _council(self) -> Council:
        return self.survey.council

    # -- called in every step ------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """What this step is for. Everything here depends on counts and agreed figures only."""
        self._clock.begin_step()
        if self._wanted is not None:
            if self._use(self._wanted, step):
                self.survey.restart()
            return
        {MEASURING: self._measure, TRYING: self._try, WATCHING: self._watch}[self.phase](step)
        self._turn += 1

    def retire(self) -> None:
        """Somebody else steers from now on."""
        if self.begin_step in self._reducer.before_step:
            self._reducer.before_step.remove(self.begin_step)
            self._reducer.on_ready = None

    def _enter(self, phase: str) -> None:
        self.phase, self._turn = phase, 0
        self._has_chosen |= phase == WATCHING
        # Elsewhere only whole steps are timed.
        self._reducer.on_ready = self.survey.ready if phase == MEASURING else None

    # -- measuring -----------------------------------------------------------------------------------------------

    def _measure(self, step: int) -> None:
        if 0 < self._turn <= WARM_STEPS and not self.labels and self._leave_slow_start(step):
            return
        self.survey.lead_in(self._turn)
        if self._turn == LEAD_STEPS + LEAST_STEPS:
            fitting = int(self.adaptive.measure_s / max(self.survey.period_s(), 1e-6))
            steps = max(LEAST_STEPS, min(self.adaptive.measure_steps, fitting))
            self._until = LEAD_STEPS + steps
        if self._turn >= max(self._until, LEAD_STEPS + LEAST_STEPS):
            self._plan(step)

    def _measure_anew(self) -> None:
        self._until = LEAD_STEPS + self.adaptive.measure_steps
        self._enter(MEASURING)

    def _leave_slow_start(self, step: int) -> bool:
        """Measure under something quicker if the last dense step took many times one without communication."""
        quick = QUICK_STARTS.get(self._reducer.device.type, QUICK_STARTS["cpu"])
        if quick not in self.candidates:
            return False
        units = self._clock.last_buckets()
        period, silent = self._council.largest([self._clock.periods()[-1], self._clock.silent_s()])
        if period <= max(SLOW_START * silent, SLOW_STEP_S):
            return False
        self._units = tuple(Unit(names, 0.0, UNIFORM_CURVE) for names in units)
        self._turn = 0
        if self._use((quick,) * len(units), step):
            self.survey.restart()
        return True

    def _plan(self, step: int) -> None:
        """Measure the link and the candidates' work, predict, and let rank 0 decide what is tried."""
        self._exclude(step)
        period = self.survey.period_s()
        profile = self.survey.take_profile(self.labels, period)
        if profile is None:
            self._note(
                step,
                "the buckets of the last steps differ, so that nothing can be predicted: stays as it is",
            )
            self._enter(WATCHING)
            return
        self._use_profile(profile)
        said = json.loads(self._council.decide(self._choose))
        plans = [tuple(labels) for labels in said["finalists"]]
        self._note(step, said["why"])
        self._save_profile(profile)
        assert self._predictor is not None
        # What is in force has just been timed, and needs no trial.
        self._trials = Trials(
            [self._predictor.plan(labels) for labels in plans],
            {spread(self.labels, len(profile.units)): (period,)},
        )
        if plans:
            self._go_on_trying(step)
        else:
            self._settle_for(step, tuple(said["labels"]), period)

    def _exclude(self, step: int) -> None:
        """Leave out what would take the optimizer's work over, if that has to stay where it is now."""
        owners = [label for label, one in self.candidates.items() if one.method.takes_over]
        waiting = frozenset(owners) - set(self.labels)
        if not waiting:
            return
        own = self._find_objection()
        (refused,) = self._council.largest([1.0 if own else 0.0])
        self._objection = own or (OBJECTED_ELSEWHERE if refused else "")
        excluded = waiting if refused else frozenset[str]()
        if excluded - self._excluded:
            self._note(step, f"{self._objection}: without {', '.join(sorted(excluded))}")
        self._excluded = excluded

    def _choose(self) -> str:
        """Rank 0: what is worth a trial, if anything."""
        assert (
            self.decision is not None and self._predictor is not None and self.profile is not None
        )
        now = None
        if self._has_chosen:
            now = self._predictor.plan(spread(self.labels, len(self.profile.units)))
        silent, count = self.profile.conditions.silent_s, self.adaptive.finalists
        return json.dumps(asdict(propose(self.decision, now, silent, count)))

    def _save_profile(self, profile: Profile) -> None:
        path = os.environ.get(PROFILE_VARIABLE)
        if path and self._council.leads:
            profile.save(Path(path))

    # -- trying --------------------------------------------------------------------------------------------------

    def _try(self, step: int) -> None:
        if self._turn == WARM_STEPS:
            self.survey.restart()
        if self._turn < WARM_STEPS + self.adaptive.trial_steps:
            return
        seconds = self.survey.period_s()
        self._trials.note(self.labels, seconds)
        self._note(step, f"{describe(self.labels)} took {1e3 * seconds:.1f} ms in a trial")
        self._go_on_trying(step)

    def _go_on_trying(self, step: int) -> None:
        """The next trial, or what won."""
        waiting = self._trials.next()
        self._enter(TRYING)
        if waiting is not None:
            wanted = waiting.labels
        else:
            assert self.profile is not None
            winner = partial(self._trials.winner, self.profile.conditions.silent_s)
            wanted = tuple(json.loads(self._council.decide(lambda: json.dumps(winner()))))
            self._expected_s = self._trials.seconds[wanted]
            self._note(step, f"{describe(wanted)} is kept")
            self._enter(WATCHING)
        if wanted == self.labels or self._use(wanted, step):
            self.survey.restart()

    def _settle_for(self, step: int, labels: tuple[str, ...], period_s: float) -> None:
        """Keep these without a trial; steps took so long under what is in force."""
        self._enter(WATCHING)
        if labels != spread(self.labels, len(labels)):
            self._expected_s = math.nan
            self._use(labels, step)
        else:
            self._expected_s = period_s
            self.labels = labels
        self.survey.restart()

    # -- watching ------------------------------------------------------------------------------------------------

    def _watch(self, step: int) -> None:
        window = self.adaptive.window
        if self._turn == 0 or self._turn % window:
            return
        own = self._find_objection() if self._excluded else ""
        period = median(self._clock.periods() or [math.nan])
        seconds, refused = self._council.largest([period, 1.0 if own else 0.0])
        self._objection = own or (OBJECTED_ELSEWHERE if refused else "")
        if math.isnan(self._expected_s):
            self._expected_s = seconds
        if self._excluded and not refused:
            self._note(step, "the optimizer's work can be taken over from now on: plans anew")
            self._measure_anew()
            return
        surprised = abs(seconds / self._expected_s - 1) > SURPRISE
        self._surprises = self._surprises + 1 if surprised else 0
        if self._surprises >= SURPRISES:
            self._surprises = 0
            self._note(
                step,
                f"a step takes {1e3 * seconds:.1f} ms in place of {1e3 * self._expected_s:.1f} ms: plans anew",
            )
            self._expected_s = seconds
            self._measure_anew()

    # -- switching -----------------------------------------------------------------------------------------------

    def _use(self, labels: tuple[str, ...], step: int) -> bool:
        """Have these candidates in force from this step on; False if it takes a step more."""
        parameters = self._reducer.parameters
        method, rules = as_settings(labels, self._units, parameters, self.candidates)
        if not self._switch(method, rules):
            self._wanted = labels
            return False
        self._wanted = None
        if labels != self.labels:
            self._note(step, f"uses {describe(labels)}")
        self.labels = labels
        return True

    def _note(self, step: int, what: str) -> None:
        self.history.append((step, what))
        if self._council.leads:
            logger.info("step %d: %s", step, what)

    # -- telling and saving --------------------------------------------------------------------------------------

    def advise(self) -> Advice:
        if self.decision is None or self.profile is None:
            return Advice((), (self._why_nothing(),), settled=self.phase == WATCHING)
        assert self._predictor is not None
        kept = self._predictor.plan(spread(self.labels, len(self.profile.units)))
        if self.phase == TRYING:
            kept = self.decision.chosen
        advice = make_advice(self.profile, self.decision, tried=self._trials.seconds, kept=kept)
        said = advice.sentences
        if self._excluded:
            said += (f"Left out: {', '.join(sorted(self._excluded))} ({self._objection}).",)
        return replace(advice, sentences=said, settled=self.phase == WATCHING)

    @property
    def idle(self) -> bool:
        """Whether there is a link, and nothing but dense to choose from."""
        return len(self.candidates) < 2 and self._council.place.world > 1

    @property
    def says(self) -> str:
        """Why a parameter is sent as it is, for `handle.plan()`."""
        return {
            MEASURING: "tw.Auto() is measuring",
            TRYING: "tw.Auto() is trying it",
            WATCHING: "chosen by tw.Auto()",
        }[self.phase]

    def _why_nothing(self) -> str:
        if self._council.place.world == 1:
            return "There is one worker: nothing is sent, do not compress."
        if len(self.candidates) < 2:
            return ONLY_DENSE
        if self.phase == WATCHING:
            return (
                self.history[-1][1]
                if self.history
                else "Taken from a checkpoint; not measured in this run."
            )
        return f"Measuring: step {self._turn} of about {self._until}."

    def _key(self) -> str:
        """What a decision is void without."""
        # The same on all shards, which may have parts of unequal size: a distributed checkpoint keeps one decision for them.
        shapes = [(info.name, info.full_shape) for info in self._reducer.parameters.values()]
        world, kind = self._council.place.world, self._reducer.device.type
        candidates = sorted(self.candidates)
        facts = (PROFILE_VERSION, world, kind, candidates, shapes, *self._council.shards)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def state(self) -> str:
        """What there is to be saved."""
        memo = Memo(
            self._key(),
            self.phase,
            self.labels,
            tuple(unit.names for unit in self._units),
            None if math.isnan(self._expected_s) else self._expected_s,
            self._surprises,
            None if self.profile is None else self.profile.to_json(),
            tuple(plan.labels for plan in self._trials.plans),
            tuple(self._trials.times.items()),
            self._has_chosen,
            tuple(sorted(self._excluded)),
        )
        return memo.to_json()

    def load(self, memo: Memo | None) -> tuple[Method, list[Rule]] | None:
        """Do as was decided, without measuring again, and tell what has to be in force; None if nothing was decided yet.

        A decision for another job is void, on all ranks if it is on one, and so is none: all is measured anew. The method that
        is in force is not looked at: a state that is loaded replaces all that it holds.
        """
        self._begin_anew()
        valid = memo is not None and memo.key == self._key()
        (void,) = self._council.largest([0.0 if valid else 1.0])
        if void or memo is None:
            return None
        self._units = tuple(Unit(names, 0.0, UNIFORM_CURVE) for names in memo.units)
        self._excluded = frozenset(memo.excluded)
        if self._excluded:
            self._objection = self._find_objection() or OBJECTED_ELSEWHERE
        profile = memo.read_profile()
        if profile is not None:
            self._use_profile(profile)
        self._expected_s = math.nan if memo.expected_s is None else memo.expected_s
        self._surprises = memo.surprises
        self._trials = Trials(times=dict(memo.tried))
        if self._predictor is not None:
            self._trials.plans = [self._predictor.plan(labels) for labels in memo.finalists]
        self._has_chosen = memo.has_chosen
        self._enter(memo.phase)
        self.labels = memo.labels
        if not self.labels:
            return None
        # Saved in mid-switch they may be of other units than those of the plan that was under way.
        self.labels = spread(self.labels, len(self._units))
        return as_settings(self.labels, self._units, self._reducer.parameters, self.candidates)

    def _use_profile(self, profile: Profile) -> None:
        self.profile, self._units = profile, profile.units
        self.survey.work = dict(profile.work)
        usable = [one for label, one in self.candidates.items() if label not in self._excluded]
        self._predictor = self.survey.predictor(profile, usable)
        self.decision = self._predictor.decide()
