"""Decisions on a described job: the objective, mixtures, rules, and profiles that survive a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import thinwire as tw
from thinwire.auto import Traffic
from thinwire.errors import UsageError
from thinwire.layout import describe_module
from thinwire.plan.advice import advise_fixed, make_advice
from thinwire.plan.candidates import EnergyCurve, Entry, find_candidates, register_candidate
from thinwire.plan.decision import Predictor, as_settings
from thinwire.plan.policy import make_plan
from thinwire.plan.prices import Line, LinkPrices, sent_bytes
from thinwire.plan.profile import Profile, Unit, WorkCost
from thinwire.plan.step_model import predict_from_bytes

CURVE = EnergyCurve(((0.01, 0.4), (0.1, 0.8), (1.0, 1.0)))
NOTHING = WorkCost(Line(0.0, 0.0), Line(0.0, 0.0), 0.0)
SOME = WorkCost(Line(1e-5, 2e-11), Line(1e-5, 1e-11), 0.0)


def describe(layers: int = 6, world: int = 4) -> Profile:
    """Layers of 4 MB, one every 4 ms, and 20 ms of everything else."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))
    infos = [info for _, info in describe_module(model).values()]
    units = tuple(
        Unit((f"{index}.weight", f"{index}.bias"), 4e-3 * (layers - 1 - index), CURVE)
        for index in reversed(range(layers))
    )
    labels = [one.label for one in find_candidates("fastest", "adam", 1024)]
    work = {label: NOTHING if label in ("dense", "bf16") else SOME for label in labels}
    return Profile(world, "described", units, 20e-3, 1, False, tuple(infos), work)


def decide(profile: Profile, gbit: float, quality: str = "safe", world: int = 4):
    candidates = find_candidates(quality, "adam", world)
    prices = LinkPrices(gbit * 1e9, 20e-6, world)
    return Predictor(profile, candidates, prices, Traffic(world).rounds, world).decide()


def test_a_fast_link_stays_dense() -> None:
    profile = describe()
    decision = decide(profile, 100)
    assert decision.chosen.name == "dense"
    assert "do not compress" in str(make_advice(profile, decision))


def test_what_was_tried_counts_more_than_what_was_predicted() -> None:
    profile = describe()
    decision = decide(profile, 0.1)
    plan, silent_s = decision.chosen, decision.dense.prediction.silent_s
    predicted = str(make_advice(profile, decision))
    assert "Local steps do" in predicted and "ms exposed" in predicted
    told = str(make_advice(profile, decision, tried={plan.labels: 1.01 * silent_s}))
    assert f"(predicted; tried: {1010 * silent_s:.1f} ms)." in told
    assert "Local steps" not in told and "ms exposed" not in told.split("verdict")[1]


def test_a_fixed_method_is_compared_with_what_would_be_chosen() -> None:
    profile = describe()
    fast, slow = decide(profile, 100), decide(profile, 1)
    stay = str(advise_fixed(profile, fast, fast.dense, 0.060))
    assert "dense, which is in force, takes 60.0 ms (measured)" in stay and "stay with it" in stay
    change = advise_fixed(profile, slow, slow.dense, 0.060)
    assert change.rows[0].verdict == "in force" and change.rows[0].measured_ms == 60.0
    assert change.chosen is not None and change.chosen.name == slow.chosen.name
    assert "change to it" in str(change)
    # What compresses more than the link needs.
    few = next(plan for plan in fast.uniform if plan.name == "int4")
    assert "dense would take" in str(advise_fixed(profile, fast, few, 0.060))


def test_workers_that_share_a_device_wait_for_it_and_not_for_its_host() -> None:
    costs = []
    for sharing in (1, 3):
        profile = replace(describe(), sharing=sharing)
        candidates = find_candidates("safe", "adam", 4)
        predictor = Predictor(profile, candidates, LinkPrices(1e9, 2e-5, 4), Traffic(4).rounds)
        costs.append(predictor.costs(predictor.plan(["int4"] * 6))[0])
    alone, shared = costs
    assert shared.encode_s == pytest.approx(3 * alone.encode_s)
    assert shared.start_s == alone.start_s == SOME.encode.latency_s
    assert shared.decode_s - 1e-5 == pytest.approx(3 * (alone.decode_s - 1e-5))


def test_what_is_sent_in_some_steps_only_counts_by_its_share() -> None:
    profile = describe()
    work = {**profile.work, "adam-int1": SOME}
    world, traffic = profile.world, Traffic(profile.world)
    candidates = find_candidates("fastest", "adam", world, takes_over="Adam")
    chosen = [one for one in candidates if one.label in ("dense", "adam-int1")]
    prices = LinkPrices(1e9, 20e-6, world)
    predictor = Predictor(replace(profile, work=work), chosen, prices, traffic.rounds)
    sent = predictor.plan(["adam-int1"] * len(profile.units)).sent_bytes
    usual, fuller = (
        sum(sent_bytes(traffic.rounds(profile.infos(unit), method)) for unit in profile.units)
        for method in (chosen[1].method, chosen[1].method.seldom[1])
    )
    assert usual < 0.3 * fuller
    assert sent == pytest.approx(usual + (fuller - usual) / 50)


def test_what_the_host_does_counts_once_for_neighbours_that_are_encoded_alike() -> None:
    profile = describe()
    labels = ["int4"] * 6, ["int4", "dense"] * 3
    joined = replace(
        profile,
        units=tuple(replace(u, with_next=i < 5) for i, u in enumerate(profile.units)),
    )
    delays = []
    for one in (profile, joined):
        candidates = find_candidates("safe", "adam", 4)
        predictor = Predictor(one, candidates, LinkPrices(1e9, 2e-5, 4), Traffic(4).rounds)
        for plan in map(predictor.plan, labels):
            last = plan.prediction.spans[-1]
            delays.append(round(1e5 * (last.encoded - last.ready)))
    # 1e-5 s each for starting, and 2.1e-5 s for a million elements.
    assert delays == [6 * 3 + 1, 3 * 3, 1 + 6 * 2 + 1, 3 * 3]


def test_no_more_is_compressed_than_the_link_needs() -> None:
    """From fast to slow, less and less is kept, and the step is always in time."""
    profile = describe()
    kept = []
    for gbit in (100, 20, 10, 4, 1):
        decision = decide(profile, gbit)
        assert decision.chosen.prediction.step_s <= decision.deadline_s * (1 + 1e-9)
        assert decision.chosen.kept >= decision.fastest.kept - 1e-9
        kept.append(decision.chosen.kept)
    assert kept == sorted(kept, reverse=True)
    mixed = decide(profile, 10).chosen
    assert len(set(mixed.labels)) > 1


def test_what_is_far_from_the_fastest_gets_no_trial() -> None:
    slow, fast = decide(describe(), 0.1), decide(describe(), 100)
    assert {plan.name for plan in slow.finalists(3)}.isdisjoint({"dense", "int8"})
    assert len(fast.finalists(3)) == 3


def test_a_mixture_becomes_rules_by_name() -> None:
    profile = describe()
    candidates = {one.label: one for one in find_candidates("safe", "adam", 4)}
    labels = ("dense", "int8", "int8", "int8", "int4", "int8")
    parameters = {info.name: info for info in profile.parameters}
    method, rules = as_settings(labels, profile.units, parameters, candidates)
    plan = make_plan(profile.parameters, method, rules, 4)
    assert plan["5.weight"].method == tw.Dense()
    assert plan["4.weight"].method == tw.Quantized(bits=8)
    assert plan["1.weight"].method == tw.Quantized(bits=4)
    assert all(plan[f"{index}.bias"].dense for index in range(6))


def test_among_too_many_workers_top_k_is_dense_and_counts_as_dense() -> None:
    decision = decide(describe(), 10, "fastest", world=512)
    alike = {plan.name: plan for plan in decision.uniform}
    assert alike["adtopk-residual-1%"].kept == pytest.approx(1.0)


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    profile = describe()
    profile.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again == profile
    (tmp_path / "other.json").write_text('{"version": 99}')
    with pytest.raises(UsageError, match="version 99"):
        Profile.load(tmp_path / "other.json")


def test_energy_is_read_off_the_curve() -> None:
    assert CURVE.share(0.01) == pytest.approx(0.4)
    assert CURVE.share(0.055) == pytest.approx(0.6)
    assert CURVE.share(0.005) == pytest.approx(0.2)
    assert CURVE.share(1.0) == 1.0


def test_a_candidate_from_outside_is_one_like_the_others() -> None:
    entry = Entry("mine", lambda: tw.RandomK(density=0.02), {"unknown": "safe"}, density=0.02)
    register_candidate(entry)
    try:
        assert "mine" in [one.label for one in find_candidates("safe", "unknown", 2)]
        assert "mine" not in [one.label for one in find_candidates("safe", "adam", 2)]
    finally:
        register_candidate(Entry("mine", tw.Dense, {}))


def test_a_guess_from_bytes_alone() -> None:
    assert predict_from_bytes(0.1, 0, 1e-4, 1e-9) == 0.1
    assert predict_from_bytes(0.1, 1e9, 0.0, 1e-9) == pytest.approx(1.0, rel=0.1)
    assert predict_from_bytes(0.1, 1e6, 0.0, 1e-9) < 0.102
