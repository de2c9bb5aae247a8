"""Memo: a pilot's decision, or how far it has come, as text that every kind of checkpoint takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Memo | None:
        """None for what another version has written in another way."""
        try:
            said = json.loads(text)
            listed = {
                key: as_tuples(said[key]) for key in ("labels", "units", "finalists", "tried")
            }
            return cls(**{**said, **listed})
        except (ValueError, KeyError, TypeError):
            return None

    def read_profile(self) -> Profile | None:
        return None if self.profile is None else Profile.from_json(self.profile)


def as_tuples(value: object) -> object:
    """Lists as JSON has them, as the tuples that they were."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
