"""Profile: what was measured of one training job, enough to predict it on any link and with any number of workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import UsageError
from thinwire.layout import ParameterInfo, SlotKind
from thinwire.plan.candidates import EnergyCurve
from thinwire.plan.prices import Line, MeasuredPrices
from thinwire.plan.step_model import Conditions

PROFILE_VERSION = 2


@dataclass(frozen=True)
class Unit:
    """What is decided about alike: one of DDP's buckets, or a part of the last one."""

    names: tuple[str, ...]
    """Its parameters."""
    ready_s: float
    """When its gradient is there, and that of all that is encoded with it, from the moment at which the first unit's is."""
    curve: EnergyCurve
    with_next: bool = False
    """Whether the next unit is encoded with it, as one: what the reducer's `merge_bytes` made of DDP's buckets."""


@dataclass(frozen=True)
class WorkCost:
    """Seconds of encoding and decoding by the size of a bucket."""

    encode: Line
    """By elements."""
    decode: Line
    """By elements."""
    per_worker_s: float
    """What decoding takes longer for every further worker, by element."""

    def per_element(
        self, numel: int, world: int, measured_world: int, sharing: int
    ) -> tuple[float, float]:
        """(encoding, decoding) of so many elements, without what even the smallest bucket takes.

        It takes as many times as long as workers are `sharing` a device. What the host needs before does not.
        """
        more = (world - measured_world) * self.per_worker_s
        decode = max(0.0, self.decode.per_byte_s + more)
        return sharing * self.encode.per_byte_s * numel, sharing * decode * numel


@dataclass(frozen=True)
class Profile:
    """One job on one kind of device."""

    world: int
    """Workers among which it was measured."""
    device: str
    """Its name, for people."""
    units: tuple[Unit, ...]
    rest_s: float
    """See `Conditions`."""
    sharing: int
    """Workers on one device; `work` is what one takes that has it to itself."""
    decode_on_link: bool
    parameters: tuple[ParameterInfo, ...]
    work: Mapping[str, WorkCost]
    """By the candidate's label."""
    prices: MeasuredPrices | None = None
    """Of the link that it was measured on; None for one worker alone."""
    coalesce_bytes: int = 0
    """See `Conditions`."""

    @property
    def conditions(self) -> Conditions:
        return Conditions(
            tuple(unit.ready_s for unit in self.units),
            self.rest_s,
            self.decode_on_link,
            self.coalesce_bytes,
            tuple(unit.with_next for unit in self.units),
        )

    @cached_property
    def _by_name(self) -> dict[str, ParameterInfo]:
        return {info.name: info for info in self.parameters}

    def infos(self, unit: Unit) -> list[ParameterInfo]:
        return [self._by_name[name] for name in unit.names]

    def to_json(self) -> str:
        prices = (
            None if self.prices is None else {k: asdict(v) for k, v in self.prices.lines.items()}
        )
        content = {
            "version": PROFILE_VERSION,
            "world": self.world,
            "device": self.device,
            "units": [[list(u.names), u.ready_s, u.curve.points, u.with_next] for u in self.units],
            "rest_s": self.rest_s,
            "sharing": self.sharing,
            "decode_on_link": self.decode_on_link,
            "parameters": [
                [i.name, i.shape, i.strides, str(i.dtype).removeprefix("torch."), i.kind.value]
                for i in self.parameters
            ],
            "work": {label: asdict(cost) for label, cost in self.work.items()},
            "prices": prices,
            "coalesce_bytes": self.coalesce_bytes,
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        content: dict[str, Any] = json.loads(text)
        if content.get("version") != PROFILE_VERSION:
            raise UsageError(
                f"the profile has version {content.get('version')!r}; this thinwire reads {PROFILE_VERSION}"
            )
        prices = content["prices"]
        return cls(
            content["world"],
            content["device"],
            tuple(
                Unit(tuple(names), ready, EnergyCurve(tuple((a, b) for a, b in points)), joined)
                for names, ready, points, joined in content["units"]
            ),
            content["rest_s"],
            content["sharing"],
            content["decode_on_link"],
            tuple(_info(*fields) for fields in content["parameters"]),
            {label: _work(cost) for label, cost in content["work"].items()},
            None if prices is None else MeasuredPrices({k: Line(**v) for k, v in prices.items()}),
            content.get("coalesce_bytes", 0),
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting = path.with_name(path.name + ".part")
        waiting.write_text(self.to_json())
        waiting.replace(path)

    @classmethod
    def load(cls, path: Path) -> Profile:
        try:
            return cls.from_json(path.read_text())
        except UsageError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"profile is '{path}', which cannot be read: {type(error).__name__}: {error}"
            ) from None


def _info(
    name: str, shape: Sequence[int], strides: Sequence[int], dtype: str, kind: str
) -> ParameterInfo:
    found = getattr(torch, dtype)
    return ParameterInfo(name, tuple(shape), tuple(strides), found, SlotKind(kind))


def _work(content: dict[str, Any]) -> WorkCost:
    return WorkCost(Line(**content["encode"]), Line(**content["decode"]), content["per_worker_s"])
