"""Advice: the decision in a table and in sentences a person acts on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.plan.candidates import DENSE
from thinwire.plan.decision import NEAR_FASTEST, NEAR_SILENT, Decision, Plan
from thinwire.plan.profile import Profile

TOO_SLOW = 2.0
"""Local steps are offered where even the fastest step takes more than this many times one without communication."""
LOCAL_SHARE = 0.1
WORTH_SAYING = 0.05
"""A change that gains less is not advised."""
EXPOSED_MENTION_S = 1e-3
"""The last unit is mentioned if it alone leaves more than this exposed."""


@dataclass(frozen=True)
class AdviceRow:
    """One candidate."""

    name: str
    step_ms: float
    exposed_ms: float
    sent_mb: float
    kept: float
    verdict: str
    measured_ms: float | None = None
    """From real steps, where it was tried."""


@dataclass(frozen=True)
class Advice:
    """`print(handle.advise())` shows the table and the sentences."""

    rows: tuple[AdviceRow, ...]
    sentences: tuple[str, ...]
    settled: bool = True
    """Whether measuring and trying are over."""

    @property
    def chosen(self) -> AdviceRow | None:
        """The row of what tw.Auto has in force, or of what is advised to a fixed method; None before anything is known."""
        return next((row for row in self.rows if row.verdict == "chosen"), None)

    def __str__(self) -> str:
        if not self.rows:
            return "\n".join(self.sentences)
        header = ("candidate", "step ms", "exposed ms", "MB sent", "kept", "tried ms", "verdict")
        lines = [header]
        for row in self.rows:
            tried = "" if row.measured_ms is None else f"{row.measured_ms:.1f}"
            lines.append(
                (
                    row.name,
                    f"{row.step_ms:.1f}",
                    f"{row.exposed_ms:.1f}",
                    f"{row.sent_mb:.2f}",
                    f"{row.kept:.1%}",
                    tried,
                    row.verdict,
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*table, "", *self.sentences])


def make_advice(
    profile: Profile,
    decision: Decision,
    *,
    tried: dict[tuple[str, ...], float] | None = None,
    kept: Plan | None = None,
) -> Advice:
    """`tried` has the seconds of plans that real steps were taken with; `kept` is what is in force, if not the choice."""
    in_force = decision.chosen if kept is None else kept
    tried = tried or {}
    plans = {plan.labels: plan for plan in (*decision.uniform, decision.fastest, in_force)}
    rows = [
        _row(plan, _verdict(plan, decision, in_force), tried.get(plan.labels))
        for plan in plans.values()
    ]
    sentences = [
        *_sentences(profile, decision, in_force, tried),
        *_local_steps(decision, min(tried.values(), default=math.inf)),
    ]
    return Advice(tuple(rows), tuple(sentences))


def advise_fixed(profile: Profile, decision: Decision, fixed: Plan, measured_s: float) -> Advice:
    """For a job whose method is not to be changed here: `fixed` is in force and its steps take `measured_s`."""
    chosen, silent = decision.chosen, decision.dense.prediction.silent_s
    plans = {plan.labels: plan for plan in (*decision.uniform, decision.fastest, chosen)}
    rows = [
        _row(plan, _verdict(plan, decision, chosen))
        for labels, plan in plans.items()
        if labels != fixed.labels
    ]
    # Both as predicted: what the model leaves out is missing in both.
    gain = 1 - chosen.prediction.step_s / fixed.prediction.step_s
    keeps_more = chosen.kept > fixed.kept and gain > -WORTH_SAYING
    verdict = f"nothing among the candidates is better by {WORTH_SAYING:.0%}: stay with it."
    if chosen.labels != fixed.labels and (gain > WORTH_SAYING or keeps_more):
        verdict = (
            f"{chosen.name} would take {1e3 * chosen.prediction.step_s:.1f} ms (predicted) and keep {chosen.kept:.1%} of a "
            f"gradient at once, not {fixed.kept:.1%}: change to it."
        )
    sentences = [
        f"{fixed.name}, which is in force, takes {1e3 * measured_s:.1f} ms (measured), {measured_s / silent:.2f}x of no "
        f"communication; {verdict}",
        *_local_steps(decision),
    ]
    return Advice((_row(fixed, "in force", measured_s), *rows), tuple(sentences))


def _row(plan: Plan, verdict: str, measured_s: float | None = None) -> AdviceRow:
    return AdviceRow(
        plan.name,
        1e3 * plan.prediction.step_s,
        1e3 * plan.prediction.exposed_s,
        plan.sent_bytes / 1e6,
        plan.kept,
        verdict,
        None if measured_s is None else 1e3 * measured_s,
    )


def _verdict(plan: Plan, decision: Decision, in_force: Plan) -> str:
    if plan.labels == in_force.labels:
        return "chosen"
    if plan.labels == decision.fastest.labels:
        return "fastest"
    late = plan.prediction.step_s > decision.deadline_s * (1 + 1e-9)
    return "too slow" if late else "in time, keeps less"


def _sentences(
    profile: Profile, decision: Decision, in_force: Plan, tried: Mapping[tuple[str, ...], float]
) -> list[str]:
    dense, silent = decision.dense.prediction, decision.dense.prediction.silent_s
    exposed = 1e3 * dense.exposed_s
    if set(in_force.labels) == {DENSE}:
        near = dense.step_s <= NEAR_SILENT * silent
        why = f"is {exposed:.1f} ms slower than no communication" if near else "is as fast as any"
        return [f"Dense {why}: do not compress."]
    took = tried.get(in_force.labels, in_force.prediction.step_s)
    sentences = [
        f"Dense takes {_time(decision.dense, tried)}, {dense.step_s / silent:.2f}x of no communication; "
        f"{in_force.name} takes {_time(in_force, tried)}."
    ]
    sentences += _mixture(in_force.labels)
    last = profile.units[-1]
    alone = in_force.prediction.spans[-1]
    left = alone.arrived - max(alone.encoded, 0.0)
    if took > NEAR_FASTEST * silent and left > EXPOSED_MENTION_S:
        size = sum(i.numel * i.dtype.itemsize for i in profile.infos(last)) / 1e6
        sentences.append(
            f"The last bucket ({last.names[0]} and others, {size:.0f} MB) leaves {1e3 * left:.1f} ms exposed: "
            "nothing is left to compute behind it."
        )
    return sentences


def _time(plan: Plan, tried: Mapping[tuple[str, ...], float]) -> str:
    """What a step takes, and how that is known."""
    predicted = f"{1e3 * plan.prediction.step_s:.1f} ms (predicted"
    took = tried.get(plan.labels)
    return f"{predicted})" if took is None else f"{predicted}; tried: {1e3 * took:.1f} ms)"


def _local_steps(decision: Decision, tried_s: float = math.inf) -> list[str]:
    """What to do where every step would wait for the link, those among them that were tried: `tried_s` is the fastest."""
    dense = decision.dense.prediction
    if min(decision.fastest.prediction.step_s, tried_s) <= TOO_SLOW * dense.silent_s:
        return []
    # 4 bits are an eighth of a dense round, which may take a tenth of the steps between two.
    steps = max(2.0, dense.exposed_s / 8 / (LOCAL_SHARE * dense.silent_s))
    every = 2 ** math.ceil(math.log2(steps))
    return [
        f"No candidate stays under {TOO_SLOW:g}x of no communication. Local steps do: tw.LocalSteps(model, optimizer, "
        f"tw.Quantized(bits=4), every={every}) in place of attach exchanges once in {every} steps (predicted: {LOCAL_SHARE:.0%} of "
        "the time). That changes the optimisation, as workers differ between two exchanges: compare the loss "
        "(docs/local-steps.md)."
    ]


def _mixture(labels: Sequence[str]) -> list[str]:
    whole = sum(label == DENSE for label in labels)
    if not whole:
        return []
    return [f"{whole} of {len(labels)} buckets may stay dense."]
