"""Moving: a reducer goes on among the ranks of another group, and ranks that come together agree on the step they are at."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.engine.device_drivers import make_driver, make_on
from thinwire.engine.drivers import Driver
from thinwire.engine.reducer import Reducer
from thinwire.engine.repair import Follower
from thinwire.errors import UsageError

FindGroup = Callable[[dist.ProcessGroup | None, nn.Module | None], dist.ProcessGroup]
"""The group to move to, out of what `regroup` was given: a group, or a model that was wrapped anew."""

OWN = ("memory", "shards")
"""What of a rank's state is its own. The rest is the same on all ranks of a group."""
ALIKE = "alike"


def refuse_to_move(
    process_group: dist.ProcessGroup | None, model: nn.Module | None
) -> dist.ProcessGroup:
    raise UsageError(
        "the workers of this handle cannot change; regroup is for attach and DistributedOptimizer"
    )


def take_group(
    process_group: dist.ProcessGroup | None, model: nn.Module | None
) -> dist.ProcessGroup:
    if process_group is None:
        raise UsageError("process_group is None; pass regroup the group to go on in")
    return process_group


def move(old: Reducer, group: dist.ProcessGroup, build: Callable[[Driver], Reducer]) -> Reducer:
    """A reducer of the same parameters in another group, which goes on with what this one holds on this rank."""
    made = make_on(make_driver(group, old.device, in_turn=old.driver.in_turn), build)
    old.settle()
    if old.replicas is not None:
        old.replicas.followers.remove(old.assignments)
    made.coalesce_bytes, made.merge_bytes = old.coalesce_bytes, old.merge_bytes
    made.exposure.wanted = old.exposure.wanted
    made.load_state_dict(old.state_dict())
    return made


def share_progress(reducer: Reducer, followers: Sequence[Follower]) -> None:
    """Ranks that are behind take counters and what was learned from the first that is furthest.

    1. Every rank says its step.
    2. The first of the furthest sends all of its state but the memory, if anyone is behind, and what its `followers` keep alike on
       all ranks, such as the momentum of dense parameters.
    3. Those behind load it. What they hold back stays.
    4. All say of which parameters they hold something back, because what is sent when a method changes follows from that.
    """
    driver = reducer.driver
    steps = [int(one) for one in driver.gather(str(reducer.step).encode())]
    if min(steps) == max(steps):
        return
    source = steps.index(max(steps))
    content = reducer.state_dict()
    shared = {key: values for key, values in content.items() if key not in OWN}
    shared[ALIKE] = [one.shared_state() for one in followers]
    received = from_bytes(driver.broadcast(to_bytes(shared), source))
    alike = received.pop(ALIKE)
    if reducer.step < max(steps):
        own = {key: values for key, values in content.items() if key in OWN}
        reducer.load_state_dict({**received, **own})
        for one, state in zip(followers, alike, strict=True):
            one.load_shared_state({name: held.to(reducer.device) for name, held in state.items()})
    said = json.dumps(reducer.assignments.held_by()).encode()
    reducer.assignments.hold_alike([json.loads(one) for one in driver.gather(said)])
    reducer.plans.clear()


def to_bytes(content: Mapping[str, Any]) -> bytes:
    """Plain tensors and numbers, as a message to other ranks."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def from_bytes(content: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return loaded
