"""Check of a method: the contracts that every method has to keep, tried on virtual ranks in one process."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.engine.reducer import Reducer
from thinwire.engine.virtual import VirtualCluster
from thinwire.errors import UsageError
from thinwire.layout import (
    Bucket,
    ParameterInfo,
    RowTable,
    contiguous_strides,
    kind_from_shape,
    lay_out,
)
from thinwire.methods.base import MOMENTUM_TAKEOVER, Method, SparseMethod
from thinwire.observe.notebook import html_table
from thinwire.validate import check_instance, check_positive_int

SHAPES: dict[str, tuple[int, ...]] = {"conv": (16, 8, 3, 3), "bias": (8,), "linear": (64, 48)}
BUCKETS = (("linear", "bias"), ("conv",))
"""As DDP may cut them anew; before that, one bucket holds all."""
STEPS = 4
MOMENTUM = 0.9
"""Of the optimizer, for methods that take it over."""
LOST = 1e-6
"""Of the gradients' sum of magnitudes: what float32 sums of a few ranks may round away."""

Gradients = Mapping[str, Tensor]


class Failed(Exception):
    """A contract is broken; the message says how."""


@dataclass(frozen=True)
class Checked:
    """One contract: kept, broken, or not tried (None), and a few words."""

    contract: str
    kept: bool | None
    detail: str

    @property
    def cells(self) -> tuple[str, str, str]:
        said = {True: "kept", False: "BROKEN", None: "not tried"}[self.kept]
        return self.contract, said, self.detail


@dataclass(frozen=True)
class CheckReport:
    """What `tw.check` found: true if no contract is broken; printed as a table."""

    method: Method
    rows: tuple[Checked, ...]

    def __bool__(self) -> bool:
        return all(row.kept is not False for row in self.rows)

    def __str__(self) -> str:
        cells = [row.cells for row in self.rows]
        first, second = (max(len(cell[column]) for cell in cells) for column in (0, 1))
        return "\n".join(f"{a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in cells)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(("contract", "", ""), [row.cells for row in self.rows])


class Ranks:
    """The reducers of all ranks, fed with gradients by name."""

    def __init__(self, method: Method, world: int, buckets: Sequence[Sequence[str]] = ()) -> None:
        self.world = world
        self.infos = {
            name: ParameterInfo(
                name, shape, contiguous_strides(shape), torch.float32, kind_from_shape(len(shape))
            )
            for name, shape in SHAPES.items()
        }
        self.buckets = buckets or (tuple(SHAPES),)
        self.cluster = VirtualCluster(world)
        self.reducers = [
            Reducer(
                self.infos,
                method,
                driver,
                device=torch.device("cpu"),
                deterministic=True,
                restorable=True,
            )
            for driver in self.cluster.drivers
        ]

    def draw(self, seed: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [
            {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
            for _ in range(self.world)
        ]

    def step(self, gradients: Sequence[Gradients]) -> list[dict[str, Tensor]]:
        """Every rank's update by name."""
        updates: list[dict[str, Tensor]] = [{} for _ in range(self.world)]
        for names in self.buckets:
            layout = lay_out([self.infos[n] for n in names], torch.float32, torch.device("cpu"))
            flats = [torch.zeros(layout.numel) for _ in self.reducers]
            futures = []
            for flat, given, reducer in zip(flats, gradients, self.reducers, strict=True):
                for slot in layout.slots:
                    slot.view(flat).copy_(given[slot.name])
                futures.append(reducer.reduce(Bucket(layout, flat)))
            for future in futures:
                if future.done():
                    future.value()  # raises what went wrong
            self.cluster.run()
            for rank, flat in enumerate(flats):
                futures[rank].value()
                updates[rank] |= {slot.name: slot.view(flat).clone() for slot in layout.slots}
        for reducer in self.reducers:
            reducer.end_backward()
        return updates

    def held(self, rank: int) -> dict[str, Tensor]:
        """What the rank holds back, zeros where nothing is."""
        reducer = self.reducers[rank]
        reducer.settle()
        found = {name: reducer.assignments.held(name, "residual") for name in SHAPES}
        return {
            name: torch.zeros(SHAPES[name]) if values is None else values.clone()
            for name, values in found.items()
        }

    def save(self) -> list[bytes]:
        """Every rank's state as a file would hold it."""
        files = []
        for reducer in self.reducers:
            reducer.settle()
            file = io.BytesIO()
            torch.save(reducer.state_dict(), file)
            files.append(file.getvalue())
        return files

    def load(self, files: Sequence[bytes]) -> None:
        for reducer, content in zip(self.reducers, files, strict=True):
            reducer.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))


def check(method: Method, *, world: int | None = None) -> CheckReport:
    """Try a method against the contracts that all methods keep, on virtual ranks; takes about a second.

    `print(tw.check(method))` shows a table. The report is false if a contract is broken.

    Args:
        method: Such as `tw.Compose(select=tw.selector(choose, density=0.01))`.
        world: Number of ranks; 3 unless given, or two hosts where the method asks for hosts.
    """
    check_instance("method", method, Method, "a method such as tw.TopK(density=0.01)")
    ranks = 2 * max(method.host_sizes) if method.host_sizes else 3
    if world is not None:
        check_positive_int("world", world)
        ranks = world
    if method.takes_over not in (None, MOMENTUM_TAKEOVER):
        raise UsageError(
            f"method is {type(method).__name__}, which works inside an optimizer; check the method it is made of"
        )
    method = method.with_momentum(MOMENTUM, False)
    rows = [_try(name, trial, method, ranks) for name, trial in CONTRACTS.items()]
    return CheckReport(method, tuple(rows))


def _try(
    name: str, trial: Callable[[Method, int], str | None], method: Method, world: int
) -> Checked:
    try:
        detail = trial(method, world)
    except Failed as broken:
        return Checked(name, False, str(broken))
    except Exception as error:
        # The user's own code runs here, and whatever it raises is an answer.
        said = " ".join(str(error).split())
        return Checked(name, False, f"{type(error).__name__}: {said}")
    if detail is None:
        return Checked(name, None, NOT_TRIED[name])
    return Checked(name, True, detail)


def try_compression(method: Method, world: int) -> str | None:
    """Something is compressed here at all; if nothing is, the other contracts say little."""
    assigned = Ranks(method, world).reducers[0].assignments.by_name
    sent = [name for name, one in assigned.items() if not one.plan.dense]
    return f"{', '.join(sent)} of {', '.join(SHAPES)}" if sent else None


def try_selection(method: Method, world: int) -> str | None:
    """No entry is chosen twice."""
    now = method.at(0)
    if not isinstance(now, SparseMethod):
        return None
    session, chosen = now.selector().session(), 0
    for name, info in Ranks(method, world).infos.items():
        turn = session.turn(session.begin([name], [0]))
        table = RowTable([turn.rows(0, info.slot(0))], info.numel)
        c = torch.randn(info.numel, generator=torch.Generator().manual_seed(0))
        picks = turn.pick(c, table)
        count = table.entries if picks.counts is None else int(picks.counts.sum())
        places = table.positions(picks.indices)[:count]
        if len(places.unique()) < count:
            raise Failed(
                f"of {count} entries chosen in {name!r} only {len(places.unique())} differ"
            )
        chosen += count
    return f"{chosen} of {sum(map(math.prod, SHAPES.values()))} entries, none twice"


def try_conservation(method: Method, world: int) -> str | None:
    """What arrives and what is held back add up to gradients and what was held before."""
    if method.takes_over is not None:
        return None
    ranks, worst = Ranks(method, world), 0.0
    for seed in range(STEPS):
        before = [ranks.held(rank) for rank in range(world)]
        gradients = ranks.draw(seed)
        update = ranks.step(gradients)[0]
        after = [ranks.held(rank) for rank in range(world)]
        for name in SHAPES:
            had = sum(before[r][name].double() + gradients[r][name].double() for r in range(world))
            has = world * update[name].double() + sum(a[name].double() for a in after)
            share = float((has - had).abs().sum() / torch.as_tensor(had).abs().sum())
            if not share <= LOST:
                raise Failed(
                    f"{100 * share:.2g} % of {name!r} is lost or sent twice in step {seed}"
                )
            worst = max(worst, share)
    return f"{STEPS} steps on {world} ranks, off by {worst:.0e} at most"


def try_replicas(method: Method, world: int) -> str:
    """All ranks get the same bits."""
    ranks = Ranks(method, world)
    for seed in range(STEPS):
        first, *others = ranks.step(ranks.draw(seed))
        for rank, other in enumerate(others, 1):
            wrong = [name for name in SHAPES if not torch.equal(first[name], other[name])]
            if wrong:
                raise Failed(f"rank {rank} has another update of {wrong[0]!r} in step {seed}")
    return f"{STEPS} updates with the same bits on {world} ranks"


def try_resume(method: Method, world: int) -> str:
    """Saved, loaded into other buckets, and gone on: the bits of a run that was not interrupted."""
    through, resumed = Ranks(method, world), Ranks(method, world, BUCKETS)
    for seed in range(STEPS):
        through.step(through.draw(seed))
    resumed.load(through.save())
    for seed in range(STEPS, 2 * STEPS):
        gradients = through.draw(seed)
        one, other = through.step(gradients)[0], resumed.step(gradients)[0]
        wrong = [name for name in SHAPES if not torch.equal(one[name], other[name])]
        if wrong:
            raise Failed(f"the update of {wrong[0]!r} differs in step {seed}, after {STEPS}")
    return f"after {STEPS} steps, into other buckets, bit for bit"


def try_non_finite(method: Method, world: int) -> str:
    """One bad element on one rank is seen by all and leaves no trace."""
    ranks = Ranks(method, world)
    ranks.step(ranks.draw(0))
    for seed, poison in enumerate((math.nan, math.inf), 1):
        before = [ranks.held(rank) for rank in range(world)]
        gradients = ranks.draw(seed)
        gradients[world - 1]["conv"].view(-1)[3] = poison
        for rank, update in enumerate(ranks.step(gradients)):
            if update["conv"].isfinite().any():
                raise Failed(f"rank {rank} does not see the {poison} of rank {world - 1}")
            after = ranks.held(rank)
            wrong = [name for name in SHAPES if not torch.equal(after[name], before[rank][name])]
            if wrong:
                raise Failed(f"the {poison} leaves a trace in {wrong[0]!r} on rank {rank}")
    update = ranks.step(ranks.draw(3))[0]
    if not all(values.isfinite().all() for values in update.values()):
        raise Failed("the step after it is not finite")
    return "nan and inf are seen by all ranks and leave no trace"


def try_random_state(method: Method, world: int) -> str:
    """torch's global generator belongs to the user."""
    ranks = Ranks(method, world)
    before = torch.get_rng_state()
    ranks.step(ranks.draw(0))
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise Failed(
            "a step draws from torch's global generator; use a torch.Generator of your own"
        )
    return "torch's global generator is left alone"


CONTRACTS: dict[str, Callable[[Method, int], str | None]] = {
    "compression": try_compression,
    "selection": try_selection,
    "conservation": try_conservation,
    "replicas": try_replicas,
    "resume": try_resume,
    "non-finite": try_non_finite,
    "random state": try_random_state,
}
NOT_TRIED = {
    "compression": "everything travels whole",
    "selection": "the method does not choose entries",
    "conservation": "the method owns momentum, so that no step's sum is known",
}
"""What a trial that returns nothing means."""
