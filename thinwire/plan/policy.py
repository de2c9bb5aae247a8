"""Policy: ordered rules that say what happens to which parameter. The first match wins."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from typing import Any

from thinwire.described import Described
from thinwire.errors import UsageError
from thinwire.layout import Axis, ParameterInfo
from thinwire.methods.base import Dense, Method, check_method, refuse_choosing
from thinwire.validate import (
    check_axis,
    check_bool,
    check_density,
    check_instance,
    check_positive_int,
)

logger = logging.getLogger(__name__)

DEFAULT, ON_SHARD = "default method", ", on this rank's shard"
"""Reasons of a plan, and what follows one where a parameter is sharded."""
MOST_PLACES = (1 << 31) - 1
"""Elements of a parameter in which entries can be chosen: tables and messages have int32 for their places."""


@dataclass(frozen=True)
class Rule(Described):
    """Which parameters, and what to do with them. All conditions that are set must hold; in a policy the first match wins.

    >>> policy = [rule("*.wte.*", axis=0), rule(module=nn.LayerNorm, dense=True), rule(max_numel=4096, dense=True)]
    """

    pattern: str = "*"
    """A glob on the canonical parameter name."""
    _: KW_ONLY
    module: type | None = None
    """The class of the module that owns the parameter, such as nn.LayerNorm; None = any."""
    shape: Sequence[int | None] | None = None
    """Its full shape, None for a dimension of any size; None = any shape."""
    min_numel: int | None = None
    """The fewest elements it may have."""
    max_numel: int | None = None
    """The most elements it may have."""
    dense: bool = False
    """Send it whole."""
    method: Method | None = None
    """Compress it by this method instead of the handle's."""
    axis: Axis | None = None
    """Select along this axis, where the method has one."""
    density: float | None = None
    """Keep this fraction of its entries, where the method has a density."""
    feedback: bool | None = None
    """False: hold nothing back, so that what is not sent is lost."""
    all_dimension: bool = False
    """Select in its rows only, also in ADTopK's global turns."""

    def __post_init__(self) -> None:
        check_instance("pattern", self.pattern, str, "a glob on parameter names such as '*.weight'")
        check_bool("dense", self.dense)
        if self.module is not None:
            check_instance("module", self.module, type, "a module class such as nn.LayerNorm")
        if self.method is not None:
            check_instance("method", self.method, Method, "a method such as tw.Dense()")
            refuse_choosing("method", self.method, "in a rule")
        if self.axis is not None:
            check_axis("axis", self.axis)
        if self.density is not None:
            check_density("density", self.density)
        if self.feedback is not None:
            check_bool("feedback", self.feedback)
        check_bool("all_dimension", self.all_dimension)
        for field in ("min_numel", "max_numel"):
            if getattr(self, field) is not None:
                check_positive_int(field, getattr(self, field))
        if self.shape is not None:
            check_instance("shape", self.shape, Sequence, "a list of sizes, None for any size")
            object.__setattr__(self, "shape", tuple(self.shape))
        for field in ("method", "axis", "density", "feedback", "all_dimension"):
            value = getattr(self, field)
            if self.dense and value is not None and value is not False:
                raise UsageError(
                    f"dense is True and {field} is {value!r}; a rule sets only one of them"
                )

    def matches(self, info: ParameterInfo) -> bool:
        """By the full shape: a rule says the same of all shards of a parameter."""
        info = info.full
        if not fnmatchcase(info.name, self.pattern):
            return False
        if self.module is not None and not (
            info.module_type is not None and issubclass(info.module_type, self.module)
        ):
            return False
        if self.shape is not None and not _shape_fits(info.shape, self.shape):
            return False
        if self.min_numel is not None and info.numel < self.min_numel:
            return False
        return self.max_numel is None or info.numel <= self.max_numel

    def apply(self, method: Method) -> Method:
        """The method for a matching parameter."""
        if self.dense:
            return Dense()
        return (self.method or method).changed(self._change)

    def _change(self, method: Method) -> Method:
        """With what this rule says of its settings."""
        chosen = method
        for name in ("axis", "density"):
            value = getattr(self, name)
            if value is not None:
                chosen = _replace(chosen, name, value)
        if self.all_dimension:
            chosen = _replace(_replace(chosen, "threshold", False), "interleave", None)
        return chosen.without_memory() if self.feedback is False else chosen

    def __str__(self) -> str:
        shown = [
            f"{field.name}={_short(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"rule({', '.join(shown)})"


rule = Rule
"""As it is written in a policy."""


@dataclass(frozen=True)
class SlotPlan:
    """What happens to one parameter, and why."""

    info: ParameterInfo
    method: Method
    reason: str

    @property
    def dense(self) -> bool:
        return self.method.is_dense

    @property
    def action(self) -> str:
        return self.method.describe(self.info.slot(0)) if self.info.numel else "nothing to send"


def make_plan(
    infos: Iterable[ParameterInfo],
    method: Method,
    policy: Sequence[Rule],
    world: int,
    step: int = 0,
    quiet: bool = False,
) -> dict[str, SlotPlan]:
    """Decide for every parameter, from shapes, settings and the step only, so that all ranks decide alike."""
    used: set[Rule] = set()
    plan = {}
    infos = list(infos)
    sizes = {info.name: info.full.numel for info in infos if len(info.full_shape) > 1}
    exempt = method.at(step).exempt(sizes)
    for info in infos:
        matching = next((r for r in policy if r.matches(info)), None)
        if matching is not None:
            used.add(matching)
        decided = _decide(info, method, matching, world, step)
        if matching is None and info.name in exempt and not decided.dense:
            dense = method.at(step).dense_companion(Dense())
            decided = SlotPlan(info, dense, "small enough to travel whole within the budget")
        plan[info.name] = decided
    _check_momentum(method, plan.values())
    for unused in [r for r in policy if r not in used and not quiet]:
        shadowed = any(unused.matches(slot_plan.info) for slot_plan in plan.values())
        why = "an earlier rule matches first" if shadowed else "no parameter matches"
        logger.warning("%s has no effect: %s", unused, why)
    return plan


def _check_momentum(method: Method, plans: Iterable[SlotPlan]) -> None:
    """Momentum is applied in one place: by the optimizer for all parameters, or for none."""
    for plan in plans:
        if plan.method.owns_momentum != method.owns_momentum:
            lone, common = (
                ("applies momentum itself", "leaves it to the optimizer")
                if plan.method.owns_momentum
                else ("applies no momentum", "has taken it over from the optimizer")
            )
            raise UsageError(
                f"method is {type(plan.method).__name__} for {plan.info.name!r}, which {lone}, "
                f"while {type(method).__name__} {common}; it must be the same for all parameters"
            )


def _decide(
    info: ParameterInfo, method: Method, matching: Rule | None, world: int, step: int
) -> SlotPlan:
    chosen = (matching.apply(method) if matching is not None else method).at(step)
    asked = f"by {matching}" if matching is not None else DEFAULT
    if info.shard is not None:
        asked += ON_SHARD
    base = method.at(step)
    if chosen.is_dense:
        return SlotPlan(info, chosen.beside(base), asked)
    dense = chosen.dense_companion(Dense())
    # Not of an empty shard: the ranks that share a parameter plan alike, so that they save alike.
    if info.full.numel == 0:
        return SlotPlan(info, dense, "empty")
    explicit = matching is not None and matching.method is not None
    if len(info.full_shape) < 2 and not (explicit and info.full_shape):
        return SlotPlan(info, dense, "fewer than two dimensions")
    if chosen.selects and info.shard is None and info.numel > MOST_PLACES:
        return SlotPlan(info, dense, f"more than {MOST_PLACES} elements, whose places take 32 bits")
    against = chosen.reason_against(info.full.slot(0), 8 * info.dtype.itemsize, world)
    if against is not None:
        return SlotPlan(info, dense, against)
    return SlotPlan(info, chosen, asked)


def _replace(method: Method, field: str, value: Any) -> Method:
    if field not in {f.name for f in dataclasses.fields(method)}:
        raise UsageError(
            f"{field} is {value!r} in a rule, but {type(method).__name__} has no setting {field!r}"
        )
    return dataclasses.replace(method, **{field: value})


def _shape_fits(shape: tuple[int, ...], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or size == want for size, want in zip(shape, wanted, strict=True)
    )


def _short(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def check_settings(method: Any, policy: Any, deterministic: Any) -> None:
    check_method(method)
    check_bool("deterministic", deterministic)
    if policy is not None:
        check_instance("policy", policy, Sequence, "a list of tw.rule(...)")
    for entry in policy or []:
        check_instance("policy", entry, Rule, "a list of tw.rule(...)")
