"""Policy: ordered rules that say what happens to which parameter. The first match wins."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from thinwire.errors import UsageError
from thinwire.layout import ParameterInfo
from thinwire.memory.residual import NoMemory
from thinwire.methods.base import Dense, Method, SparseMethod
from thinwire.select.rows import Axis
from thinwire.validate import (
    check_axis,
    check_bool,
    check_density,
    check_instance,
    check_positive_int,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which parameters (all conditions that are set must hold) and what to do with them."""

    pattern: str = "*"
    module: type | None = None
    shape: tuple[int | None, ...] | None = None
    min_numel: int | None = None
    max_numel: int | None = None
    dense: bool = False
    method: Method | None = None
    axis: Axis | None = None
    density: float | None = None
    feedback: bool | None = None
    all_dimension: bool = False

    def matches(self, info: ParameterInfo) -> bool:
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
        if self.feedback is False and isinstance(chosen, SparseMethod):
            chosen = _replace(chosen, "memory", NoMemory())
        return chosen

    def __str__(self) -> str:
        shown = [
            f"{field.name}={_short(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"rule({', '.join(shown)})"


def rule(
    pattern: str = "*",
    *,
    module: type | None = None,
    shape: Sequence[int | None] | None = None,
    min_numel: int | None = None,
    max_numel: int | None = None,
    dense: bool = False,
    method: Method | None = None,
    axis: Axis | None = None,
    density: float | None = None,
    feedback: bool | None = None,
    all_dimension: bool = False,
) -> Rule:
    """A policy rule. `pattern` is a glob on the canonical parameter name; None in `shape` matches any size.

    `all_dimension` spares the matching parameters ADTopK's global turns.

    >>> policy = [rule("*.wte.*", axis=0), rule(module=nn.LayerNorm, dense=True), rule(max_numel=4096, dense=True)]
    """
    check_instance("pattern", pattern, str, "a glob on parameter names such as '*.weight'")
    check_bool("dense", dense)
    if module is not None:
        check_instance("module", module, type, "a module class such as nn.LayerNorm")
    if method is not None:
        check_instance("method", method, Method, "a method such as tw.Dense()")
    if axis is not None:
        check_axis("axis", axis)
    if density is not None:
        check_density("density", density)
    if feedback is not None:
        check_bool("feedback", feedback)
    check_bool("all_dimension", all_dimension)
    for field, limit in (("min_numel", min_numel), ("max_numel", max_numel)):
        if limit is not None:
            check_positive_int(field, limit)
    if shape is not None:
        check_instance("shape", shape, Sequence, "a list of sizes, None for any size")
    if dense and method is not None:
        raise UsageError(f"dense is True and method is {method!r}; a rule sets only one of them")
    return Rule(
        pattern=pattern,
        module=module,
        shape=tuple(shape) if shape is not None else None,
        min_numel=min_numel,
        max_numel=max_numel,
        dense=dense,
        method=method,
        axis=axis,
        density=density,
        feedback=feedback,
        all_dimension=all_dimension,
    )


@dataclass(frozen=True)
class SlotPlan:
    """What happens to one parameter, and why."""

    info: ParameterInfo
    method: Method
    reason: str

    @property
    def dense(self) -> bool:
        return isinstance(self.method, Dense)

    @property
    def action(self) -> str:
        return self.method.describe(self.info.slot(0))


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
    for info in infos:
        matching = next((r for r in policy if r.matches(info)), None)
        if matching is not None:
            used.add(matching)
        plan[info.name] = _decide(info, method, matching, world, step)
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
    asked = f"by {matching}" if matching is not None else "default method"
    base = method.at(step)
    if isinstance(chosen, Dense):
        return SlotPlan(info, base.dense_companion(chosen), asked)
    dense = chosen.dense_companion(Dense())
    if info.numel == 0:
        return SlotPlan(info, dense, "empty")
    explicit = matching is not None and matching.method is not None
    if len(info.shape) < 2 and not (explicit and info.shape):
        return SlotPlan(info, dense, "fewer than two dimensions")
    against = chosen.reason_against(info.slot(0), 8 * info.dtype.itemsize, world)
    if against is not None:
        return SlotPlan(info, dense, against)
    return SlotPlan(info, chosen, asked)


def _replace(method: Method, field: str, value: Any) -> Method:
    if field not in {f.name for f in dataclasses.fields(method)}:
        raise UsageError(
            f"{field} is {value!r} in a rule, but {type(method).__name__} has no setting {field!r}"
        )
    return dataclasses.replace(method, **{field: value})


def _shape_fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or size == want for size, want in zip(shape, wanted, strict=True)
    )


def _short(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)
