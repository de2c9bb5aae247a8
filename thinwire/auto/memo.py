"""Memo: a pilot's decision, or how far it has come, as text that every kind of checkpoint takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.plan.profile import Profile

Labels = tuple[str, ...]
"""A candidate for every unit."""


@dataclass(frozen=True)
class Memo:
    """What a pilot saves."""

    key: str
    """What it is void without."""
    phase: str
    labels: Labels
    """In force; empty before the first decision."""
    units: tuple[tuple[str, ...], ...]
    """Their parameters."""
    expected_s: float | None
    surprises: int
    profile: str | None
    """As JSON."""
    finalists: tuple[Labels, ...]
    tried: tuple[tuple[Labels, tuple[float, ...]], ...]
    """With the seconds of a step in every trial."""
    has_chosen: bool = False
    """Whether what is in force is what came out of a decision. Earlier versions do not say."""
    excluded: tuple[str, ...] = ()
    """Candidates that would take over what has to stay with the optimizer for now."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Memo | None:
        """None for what another version has written in another way."""
        try:
            said = json.loads(text)
            return cls(**{key: as_tuples(value) for key, value in said.items()})
        except (ValueError, AttributeError, TypeError):
            return None

    def read_profile(self) -> Profile | None:
        return None if self.profile is None else Profile.from_json(self.profile)


def as_tuples(value: Any) -> Any:
    """Lists as JSON has them, as the tuples that they were."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
