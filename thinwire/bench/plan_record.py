"""plan.json: what `thinwire plan` found, as plain values for its report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from thinwire.plan import Advice, Decision, Plan, Profile
from thinwire.tools.provenance import describe_origin


def record_plan(
    settings: Mapping[str, Any],
    profile: Profile,
    decision: Decision,
    advice: Advice,
    border: str,
    by_rate: Mapping[int, Decision],
) -> dict[str, Any]:
    """Candidates, sentences, predicted buckets of dense and of the choice, and step times by Gbit/s."""
    return {
        "settings": dict(settings),
        "sentences": [*advice.sentences, border],
        "silent_ms": 1e3 * profile.conditions.silent_s,
        "candidates": [asdict(row) for row in advice.rows],
        "timelines": [record_buckets(plan) for plan in (decision.dense, decision.chosen)],
        "units": record_units(profile, decision.chosen.labels),
        "rates": list(by_rate),
        "step_ms": record_rates(by_rate),
        "origin": {**describe_origin(), "measured on": profile.device},
    }


def record_buckets(plan: Plan) -> dict[str, Any]:
    """When every bucket does what, in milliseconds after the first one is ready."""
    spans = [{k: 1e3 * v for k, v in asdict(span).items()} for span in plan.prediction.spans]
    return {"name": plan.name, "step_ms": 1e3 * plan.prediction.step_s, "spans": spans}


def record_units(profile: Profile, labels: Sequence[str]) -> list[dict[str, Any]]:
    """What was chosen for the buckets that are encoded together, and what is in them."""
    return [
        {
            "label": label,
            "ready_ms": 1e3 * unit.ready_s,
            "parameters": list(unit.names),
            "elements": sum(info.numel for info in profile.infos(unit)),
        }
        for unit, label in zip(profile.units, labels, strict=True)
    ]


def record_rates(by_rate: Mapping[int, Decision]) -> dict[str, list[float]]:
    """By candidate; `chosen` is what would be chosen at each rate."""
    times: dict[str, list[float]] = {}
    for decision in by_rate.values():
        for plan in decision.uniform:
            times.setdefault(plan.name, []).append(1e3 * plan.prediction.step_s)
        times.setdefault("chosen", []).append(1e3 * decision.chosen.prediction.step_s)
    return times
