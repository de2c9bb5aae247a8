"""What of a handle survives a restart, and how it is read back into the same or another number of ranks.

    {"version": 2, "world": P, "ranks": {"rank3": {
        "rank": 3,
        "step": steps begun,
        "steps": {name: exchanges of this parameter},
        "memory": {store: {name: tensor}},
        "selection": {name: {what selection, exchange or low rank have learned}},
        "auto": what a method that chooses for itself has decided,        only where there is one
        "takeover": {number or text: what was taken over from an optimizer},      likewise
        "shards": {name: which part of the parameter it is}}}}    only where parameters are sharded

Version 1 is the same without shards. Plain tensors and numbers only, so that `torch.load(weights_only=True)` reads it; keys carry the rank, because
distributed checkpoints keep one copy of every key and a residual belongs to one rank. Beside these there is a key that is a
sentence: a distributed load into another number of ranks ends with an error that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.engine.agreement import agree
from thinwire.engine.drivers import Driver
from thinwire.errors import ExchangeError, UsageError
from thinwire.layout import local_part

STATE_VERSION = 2
READ_VERSIONS = (1, 2)
ON_WORLD_CHANGE = ("mean", "reset")


class WholeTensors:
    """How the content of one rank is saved where every rank has all of each parameter: as it is.

    A form in which parameters are spread over ranks is made by its adapter.
    """

    own = ""
    """Before the keys of what only this rank's part of a model has."""

    def pack(self, content: dict[str, Any]) -> dict[str, Any]:
        """The content as it is saved."""
        return content

    def fits(self, content: Mapping[str, Any]) -> bool:
        """Whether what was saved is of this rank's part of the model."""
        return True

    def unpack(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The content out of what was saved."""
        return dict(content)

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Where what is saved of a parameter's memory is read to."""
        return torch.empty(shape, dtype=dtype)

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups over which all ranks that share one copy of the model are reached, one after the other."""
        return []

    def describe(self, world: int) -> str:
        """For whom a state is."""
        return f"for {world} ranks"


WHOLE = WholeTensors()
REMEDY = "a checkpoint of others is read by handle.load_checkpoint(path, on_world_change='mean' or 'reset')"


def wrap_rank(
    rank: int, world: int, content: dict[str, Any], form: WholeTensors = WHOLE
) -> dict[str, Any]:
    return {
        # First, because a distributed load names the first key that it misses.
        f"{form.describe(world)}; {REMEDY}": True,
        "version": STATE_VERSION,
        "world": world,
        "ranks": {f"rank{rank}": {"rank": rank, **form.pack(content)}},
    }


def find_together(
    driver: Driver, find: Callable[[], dict[str, Any]], form: WholeTensors = WHOLE
) -> dict[str, Any]:
    """What `find` returns, which has to be of the same step on all ranks, those of other shards too.

    A rank that finds nothing it can use tells the others, who would wait for it later on. Every rank calls this.
    """
    content, refusal = None, None
    try:
        content = find()
        said = {"the step of the state": str(content.get("step", 0))}
        said |= {f"the steps of {name}": str(n) for name, n in content["steps"].items()}
    except UsageError as error:
        refusal = error
        said = {"the step of the state": "a state that it cannot load"}
    try:
        agree_everywhere(driver, form.groups(), said)
    except ExchangeError:
        if refusal is None:
            raise
    if content is None:
        assert refusal is not None
        raise refusal
    return content


def agree_everywhere(
    driver: Driver, beside: Sequence[dist.ProcessGroup], settings: dict[str, str]
) -> None:
    """Raise on all ranks of all replicas if `settings` differ anywhere; `beside` are the groups that share one replica.

    The ranks of a replica do not know what the others of their shard have found, so a difference is handed on.
    """
    refusal: ExchangeError | None = None
    asked: list[Callable[[dict[str, str]], None]] = [partial(agree, group) for group in beside]
    for ask in [driver.agree, *asked]:
        try:
            ask(settings if refusal is None else {key: str(refusal) for key in settings})
        except ExchangeError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal


def pick_rank(
    states: Sequence[Mapping[str, Any]],
    rank: int,
    world: int,
    on_world_change: str | None,
    form: WholeTensors = WHOLE,
) -> dict[str, Any]:
    """This rank's content out of one or several ranks' states; of those that are of its shard if there are shards."""
    found: list[Mapping[str, Any]] = []
    saved_worlds = set()
    for state in states:
        if not isinstance(state, Mapping) or "version" not in state:
            raise UsageError(
                f"state is of class {type(state).__name__} and without a version; it must be what handle.state_dict() gave"
            )
        if state["version"] not in READ_VERSIONS:
            raise UsageError(
                f"state has version {state['version']!r}; this thinwire reads versions "
                f"{' and '.join(map(str, READ_VERSIONS))}"
            )
        saved_worlds.add(int(state["world"]))
        found.extend(state["ranks"].values())
    fitting = [content for content in found if form.fits(content)]
    if not fitting and on_world_change == "reset":
        return {**found[0], "memory": {}}
    contents = {int(content["rank"]): form.unpack(content) for content in fitting or found}
    if saved_worlds == {world}:
        if rank not in contents:
            raise UsageError(
                f"state belongs to rank {sorted(contents)}, this is rank {rank}; each rank must load its own"
            )
        return contents[rank]
    if len(saved_worlds) != 1:
        raise UsageError(f"states come from different world sizes {sorted(saved_worlds)}")
    return _for_other_world(contents, saved_worlds.pop(), world, on_world_change)


def _for_other_world(
    contents: dict[int, dict[str, Any]], saved_world: int, world: int, on_world_change: str | None
) -> dict[str, Any]:
    check_world_change(saved_world, world, on_world_change)
    any_rank = contents[min(contents)]
    if on_world_change == "reset":
        return {**any_rank, "memory": {}}
    if len(contents) != saved_world:
        raise UsageError(
            f"on_world_change='mean' needs the states of all {saved_world} ranks, got {sorted(contents)}"
        )
    memory: dict[str, dict[str, Tensor]] = {}
    ordered = [contents[r]["memory"] for r in sorted(contents)]
    for store in any_rank["memory"]:
        memory[store] = {
            name: mean_tensor([saved[store][name] for saved in ordered])
            for name in any_rank["memory"][store]
        }
    return {**any_rank, "memory": memory}


def check_world_change(saved_world: int, world: int, on_world_change: str | None) -> None:
    if on_world_change not in ON_WORLD_CHANGE:
        raise UsageError(
            f"state was saved with {saved_world} ranks and there are {world}; "
            f"on_world_change is {on_world_change!r}, it must be 'mean' or 'reset'"
        )


def mean_tensor(tensors: Sequence[Tensor]) -> Tensor:
    """Every new rank gets the old mean, so that the pending update, which is that mean, is kept."""
    total = tensors[0].to(torch.float64)
    for tensor in tensors[1:]:
        total = total + tensor
    return (total / len(tensors)).to(tensors[0].dtype)


def read_distributed(
    path: str | Path,
    rank: int,
    world: int,
    on_world_change: str | None,
    form: WholeTensors = WHOLE,
) -> dict[str, Any]:
    """This rank's content out of a distributed checkpoint, one parameter at a time."""
    from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata, load

    reader = FileSystemReader(path)
    keys = _Keys(list(reader.read_metadata().state_dict_metadata))

    def fetch(wanted: dict[str, Any]) -> dict[str, Any]:
        load(wanted, storage_reader=reader, no_dist=True)
        return wanted

    saved_world = fetch({keys.prefix + "world": 0})[keys.prefix + "world"]
    source = rank
    if saved_world != world:
        check_world_change(saved_world, world, on_world_change)
        source = 0
    content: dict[str, Any] = {"rank": rank, "memory": {}, "steps": {}, "selection": {}}
    metadata = reader.read_metadata().state_dict_metadata

    def empty(key: str) -> Any:
        like = metadata[key]
        if isinstance(like, TensorStorageMetadata):
            return torch.empty(like.size, dtype=like.properties.dtype)
        return 0

    for store, name in keys.memory(source):
        if saved_world != world and on_world_change == "reset":
            continue
        ranks = [rank] if saved_world == world else range(saved_world)
        tensors = []
        for saved_rank in ranks:
            key = keys.memory_key(saved_rank, store, name)
            like = metadata[key]
            assert isinstance(like, TensorStorageMetadata), "memory is made of tensors"
            room = form.room(name, like.size, like.properties.dtype)
            tensors.append(local_part(fetch({key: room})[key]))
        content["memory"].setdefault(store, {})[name] = (
            mean_tensor(tensors) if len(tensors) > 1 else tensors[0]
        )
    _read_numbers(keys, source, content, fetch, empty, form.own + "selection.")
    return content


def _read_numbers(
    keys: _Keys,
    source: int,
    content: dict[str, Any],
    fetch: Callable[[dict[str, Any]], dict[str, Any]],
    empty: Callable[[str], Any],
    selection: str,
) -> None:
    head = f"{keys.prefix}ranks.rank{source}."
    for key in keys.all:
        if not key.startswith(head):
            continue
        tail = key[len(head) :]
        if tail in ("step", "auto"):
            content[tail] = fetch({key: 0})[key]
        elif tail.startswith("steps."):
            content["steps"][tail.removeprefix("steps.")] = fetch({key: 0})[key]
        elif tail.startswith("takeover."):
            content.setdefault("takeover", {})[tail.removeprefix("takeover.")] = fetch({key: 0})[
                key
            ]
        elif tail.startswith(selection):
            name, _, field = tail.removeprefix(selection).rpartition(".")
            content["selection"].setdefault(name, {})[field] = fetch({key: empty(key)})[key]


class _Keys:
    """The flattened keys of a handle inside a distributed checkpoint, wherever the user put it."""

    def __init__(self, keys: list[str]) -> None:
        self.all = keys
        found = next((m for k in keys if (m := re.match(r"(.*?)ranks\.rank\d+\.rank$", k))), None)
        if found is None:
            raise UsageError("the checkpoint holds no thinwire state; save the handle in it first")
        self.prefix = found.group(1)

    def memory_key(self, rank: int, store: str, name: str) -> str:
        return f"{self.prefix}ranks.rank{rank}.memory.{store}.{name}"

    def memory(self, rank: int) -> list[tuple[str, str]]:
        head = f"{self.prefix}ranks.rank{rank}.memory."
        tails = (key[len(head) :] for key in self.all if key.startswith(head))
        return [(store, name) for store, _, name in (tail.partition(".") for tail in tails)]
