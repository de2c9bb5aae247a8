"""Plans: what happens to which parameter, and why."""

from thinwire.plan.advice import Advice, AdviceRow, make_advice
from thinwire.plan.candidates import (
    QUALITIES,
    TAKEN_FROM,
    Candidate,
    Entry,
    find_candidates,
    register_candidate,
)
from thinwire.plan.decision import Decision, Plan, Predictor
from thinwire.plan.layerwise import layerwise_density
from thinwire.plan.planner import Planner
from thinwire.plan.policy import Rule, SlotPlan, make_plan, rule
from thinwire.plan.prices import LinkPrices, MeasuredPrices, Prices
from thinwire.plan.profile import Profile
from thinwire.plan.report import PlanReport
from thinwire.plan.step_model import (
    BucketSpan,
    Conditions,
    Cost,
    StepPrediction,
    predict_from_bytes,
    predict_step,
)

__all__ = [
    "QUALITIES",
    "TAKEN_FROM",
    "Advice",
    "AdviceRow",
    "BucketSpan",
    "Candidate",
    "Conditions",
    "Cost",
    "Decision",
    "Entry",
    "LinkPrices",
    "MeasuredPrices",
    "Plan",
    "PlanReport",
    "Planner",
    "Predictor",
    "Prices",
    "Profile",
    "Rule",
    "SlotPlan",
    "StepPrediction",
    "find_candidates",
    "layerwise_density",
    "make_advice",
    "make_plan",
    "predict_from_bytes",
    "predict_step",
    "register_candidate",
    "rule",
]
