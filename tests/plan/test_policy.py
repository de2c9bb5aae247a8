"""Policies: first match wins, what has no effect is said, and the plan tells what happens and why."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.contracts.cluster import parameter
from thinwire.layout import ParameterInfo, describe_module
from thinwire.memory.residual import NoMemory
from thinwire.plan.policy import SlotPlan, make_plan
from thinwire.plan.report import PlanReport


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(200, 32)
        self.norm = nn.LayerNorm(64)
        self.attention = nn.Linear(64, 64)
        self.head = nn.Linear(64, 100)
        self.small = nn.Linear(8, 8)


def infos() -> list[ParameterInfo]:
    return [pair[1] for pair in describe_module(Model()).values()]


def plan_with(*rules, method=None, world: int = 2) -> dict[str, SlotPlan]:
    return make_plan(infos(), method or tw.ADTopK(density=0.02), list(rules), world)


def test_first_matching_rule_wins():
    plan = plan_with(
        tw.rule("head.*", density=0.1),
        tw.rule("*.weight", method=tw.TopK(density=0.05)),
    )
    assert plan["head.weight"].method == tw.ADTopK(density=0.1)
    assert plan["attention.weight"].method == tw.TopK(density=0.05)
    assert plan["wte.weight"].method == tw.TopK(density=0.05)


@pytest.mark.parametrize(
    ("rule", "matched"),
    [
        (tw.rule("att*.weight", dense=True), {"attention.weight"}),
        (tw.rule(module=nn.Embedding, dense=True), {"wte.weight"}),
        (tw.rule(module=nn.Linear, min_numel=4097, dense=True), {"head.weight"}),
        (tw.rule(shape=(64, 64), dense=True), {"attention.weight"}),
        (tw.rule(shape=[None, 32], dense=True), {"wte.weight"}),
        (tw.rule(min_numel=1000, max_numel=6399, dense=True), {"attention.weight"}),
    ],
    ids=str,
)
def test_rules_match_by_name_module_shape_and_size(rule, matched):
    plan = plan_with(rule)
    by_rule = {name for name, slot in plan.items() if slot.reason.startswith("by rule")}
    biases = {name for name in by_rule if name.endswith("bias")}
    assert by_rule - biases >= matched and all(plan[name].dense for name in by_rule)
    others = {"wte.weight", "attention.weight", "head.weight"} - matched
    assert not any(name in by_rule for name in others)


def test_rule_changes_axis_and_feedback():
    plan = plan_with(tw.rule("wte.*", axis=1), tw.rule("head.*", feedback=False))
    assert plan["wte.weight"].method.axis == 1
    assert "fibres along axis 1" in plan["wte.weight"].action
    assert plan["head.weight"].method.memory == NoMemory()
    assert plan["head.weight"].action.endswith("no feedback")


def test_rule_changes_the_phases_of_a_timeline_that_compress():
    changes = tw.rule("head.weight", density=0.1, feedback=False)
    method = tw.Timeline(phases=((0, tw.Dense()), (5, tw.TopK(density=0.02))))
    changed = changes.apply(method)
    assert isinstance(changed.at(4), tw.Dense)
    assert changed.at(5) == tw.TopK(density=0.1, memory=NoMemory())


def test_turns_of_a_timeline_inside_another_are_its_turns():
    inner = tw.Timeline(phases=((0, tw.Dense()), (3, tw.TopK())))
    assert tw.Timeline(phases=((0, tw.Dense()), (10, inner))).turns == (0, 10, 13)
    assert tw.Timeline(phases=((0, inner), (2, tw.Dense()))).turns == (0, 2)


def test_rule_that_does_nothing_warns(caplog):
    with caplog.at_level(logging.WARNING, "thinwire"):
        plan_with(tw.rule("nobody.*", dense=True), tw.rule("*"), tw.rule("head.*", dense=True))
    first, second = [record.getMessage() for record in caplog.records]
    assert "nobody" in first and first.endswith("no effect: no parameter matches")
    assert "head" in second and second.endswith("no effect: an earlier rule matches first")


def test_every_parameter_has_an_action_and_a_reason():
    plan = plan_with(tw.rule("head.*", dense=True), world=4)
    text = str(PlanReport(tuple(plan.values())))
    lines = text.splitlines()
    assert lines[0].split() == ["parameter", "shape", "kind", "what", "happens", "why"]
    assert len(lines) == len(plan) + 2
    line = {row.split()[0]: row for row in lines[1:-1]}
    assert "200x32  embedding" in line["wte.weight"]
    assert "ADTopK: 4 of 200 in each of 32 fibres along axis 0 (2.00%)" in line["wte.weight"]
    assert "fewer than two dimensions" in line["norm.weight"]
    assert "fewer than 1024 elements" in line["small.weight"]
    assert "dense" in line["head.weight"] and "rule" in line["head.weight"]
    assert lines[-1] == f"{200 * 32 + 64 * 64} of {sum(i.numel for i in infos())} elements " + (
        f"({(200 * 32 + 64 * 64) / sum(i.numel for i in infos()):.1%}) are compressed"
    )


@pytest.mark.parametrize(
    ("density", "world", "dense"),
    [(0.1, 2, False), (0.1, 32, True), (1.0, 2, True), (0.22, 8, False), (0.24, 8, True)],
)
def test_where_compression_loses_it_goes_dense_and_says_why(density, world, dense):
    """bf16 + 16-bit indices: 32 bits per entry, to each of world - 1; dense 64 (world - 1) / world bits.

    At 24 % among 8 workers it saves a twenty-fifth of the bytes, which is not worth selecting.
    """
    plan = plan_with(method=tw.ADTopK(density=density), world=world)
    slot = plan["attention.weight"]
    assert slot.dense == dense
    if dense:
        assert "stops paying" in slot.reason and f"among {world} workers" in slot.reason
    kept = plan_with(method=tw.ADTopK(density=density, dense_fallback=False), world=world)
    assert not kept["attention.weight"].dense and not kept["small.weight"].dense


def test_empty_scalar_and_one_dimensional_go_dense_unless_asked_for():
    odd = [parameter("empty", (0, 4)), parameter("scalar", ()), parameter("vector", (4096,))]
    method = tw.TopK(density=0.01, dense_fallback=False)
    assert all(slot.dense for slot in make_plan(odd, method, [], 2).values())
    asked = make_plan(odd, method, [tw.rule("*", method=method)], 2)
    assert [slot.dense for slot in asked.values()] == [True, True, False]


def test_axis_a_parameter_does_not_have_is_refused_even_without_fallback():
    for fallback in (True, False):
        with pytest.raises(tw.UsageError, match=r"axis is 2; parameter 'wte\.weight' of shape"):
            plan_with(method=tw.ADTopK(axis=2, dense_fallback=fallback))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": 3}, "pattern is 3"),
        ({"module": "Linear"}, "module is 'Linear'"),
        ({"method": "topk"}, "method is 'topk'"),
        ({"axis": "rows"}, "axis is 'rows'"),
        ({"density": 2}, "density is 2"),
        ({"dense": 1}, "dense is 1"),
        ({"feedback": "no"}, "feedback is 'no'"),
        ({"min_numel": "x"}, "min_numel is 'x'"),
        ({"max_numel": 0}, "max_numel is 0"),
        ({"shape": 3}, "shape is 3"),
        ({"dense": True, "method": tw.TopK()}, "dense is True and method is"),
        ({"method": tw.Auto()}, "Auto.*chooses by itself"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_bad_rule_gets_one_sentence(settings, message):
    with pytest.raises(tw.UsageError, match=message):
        tw.rule(**settings)


def test_rule_setting_the_method_does_not_have_is_refused():
    with pytest.raises(tw.UsageError, match=r"density is 0\.1 in a rule, but Dense has no setting"):
        plan_with(tw.rule("head.*", density=0.1), method=tw.Dense())
    with pytest.raises(tw.UsageError, match="axis is 0 in a rule, but TopK has no setting"):
        plan_with(tw.rule("head.*", axis=0), method=tw.TopK())


@pytest.mark.parametrize("dtype", ["bf16", torch.int8, 16])
def test_dense_refuses_dtypes_that_are_no_wire_format(dtype):
    with pytest.raises(tw.UsageError, match="dtype is"):
        tw.Dense(dtype=dtype)


def test_sending_everything_goes_dense_even_where_narrow_values_would_pay():
    plan = plan_with(method=tw.TopK(density=1.0, values="int4"), world=1)
    assert plan["attention.weight"].dense
    assert plan["attention.weight"].reason == "would send all of its entries"


def test_a_density_below_one_entry_is_raised_to_one_and_says_so():
    tiny = plan_with(method=tw.TopK(density=1e-6))["attention.weight"]
    assert tiny.action == "TopK: 1 of 4096 in each of 1 whole tensor (0.02%), raised to one entry"
    rows = plan_with(method=tw.ADTopK(density=0.001))["attention.weight"]
    assert rows.action.endswith("raised to one entry in each")
    assert "raised" not in plan_with(method=tw.TopK(density=0.01))["attention.weight"].action


@pytest.mark.parametrize("method", [tw.TopK(), tw.ADTopK(), tw.OkTopK()], ids=repr)
def test_entries_are_not_chosen_where_their_places_do_not_fit_32_bits(method):
    """On the CPU messages were refused, on CUDA every step was bad."""
    sizes = {"fits": (1 << 15, 1 << 15), "huge": (1 << 16, 1 << 15)}
    plan = make_plan([parameter(*item) for item in sizes.items()], method, [], 2)
    assert not plan["fits"].dense
    assert plan["huge"].dense and "2147483647 elements" in plan["huge"].reason
