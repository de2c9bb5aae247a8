"""Groups: twins of a process group, for requests that nobody else's may come between."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.engine.agreement import broadcast_bytes
from thinwire.engine.failures import failing_as
from thinwire.errors import ExchangeError
from thinwire.exchange.requests import BETWEEN, INSIDE

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Torch's own, of groups that do not tell."""


def private_group(
    group: dist.ProcessGroup, device: torch.device | None = None
) -> dist.ProcessGroup:
    """A second group over the same ranks, gloo or what `group` has for `device`: requests of two threads on one group could
    interleave differently on different ranks. Collective over `group`.
    """
    backend = "gloo" if device is None else group._get_backend(device).name()
    options, timeout = None, group_timeout(group, device)
    if backend == "nccl":
        # Its kernels are small and the network waits for them; behind backward's they would queue for milliseconds.
        # Not in builds without CUDA.
        options = vars(dist)["ProcessGroupNCCL"].Options(is_high_priority_stream=True)
        if timeout is not None:
            # Torch warns of options that say something else than `timeout` does.
            options._timeout = timeout
    return _make(
        share_name(group),
        dist.get_process_group_ranks(group),
        backend=backend,
        timeout=timeout,
        pg_options=options,
        group_desc="thinwire",
    )


def host_groups(group: dist.ProcessGroup, per_host: int) -> dict[str, dist.ProcessGroup]:
    """This rank's group inside its host and its group of equal local ranks between hosts. Collective over `group`."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) % per_host:
        raise ExchangeError(
            f"per_host is {per_host}; it must divide the number of ranks, {len(ranks)}"
        )
    host, seat = divmod(dist.get_rank(group), per_host)
    teams = {INSIDE: ranks[host * per_host :][:per_host], BETWEEN: ranks[seat::per_host]}
    name = share_name(group)
    return {
        scope: _make(
            f"{name}-{scope}{team[0]}",
            team,
            backend=dist.get_backend(group),
            timeout=group_timeout(group),
            group_desc=f"thinwire {scope}",
        )
        for scope, team in teams.items()
    }


def release_groups(groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Free the threads and sockets of a private group and its parts, where torch has not done it already."""
    known = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    for group in groups.values():
        if group in known:
            dist.destroy_process_group(group)


def group_timeout(group: dist.ProcessGroup, device: torch.device | None = None) -> timedelta | None:
    """The user's own timeout, so that a dead peer is noticed when they expect it."""
    try:
        return group._get_backend(device or torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        return None


def share_name(group: dist.ProcessGroup) -> str:
    """A name for new groups that no group has had: the first rank's, sent to all."""
    with failing_as(group, "names"):
        return "thinwire-" + broadcast_bytes(group, os.urandom(16).hex().encode(), 0).decode()


def _make(name: str, ranks: list[int], **options: Any) -> dist.ProcessGroup:
    """A group that its members make without the other ranks."""
    with _naming(name):
        return dist.new_group(ranks, use_local_synchronization=True, **options)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """The next group that is made gets this name.

    Torch names a group by the number of groups that this rank knows. Ranks that know different numbers of them, because
    somebody made a group of only some of them, would wait for each other under different names. And once a group was
    destroyed, a later one of its name would find its addresses.
    """
    c10d: Any = dist.distributed_c10d
    own = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        c10d._process_group_name = own
