"""Links: slow links between the workers of a job on this machine, each worker on a host of its own in an emulated cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec, why_no_lab
from thinwire.recipes.config import AUTO, Running
from thinwire.tools.processes import worker_environments
from thinwire.tools.started import is_worker_already

AUTO_RATE = "50mbit"
"""What `auto` takes: slow enough that a small model's gradients are felt."""


def why_no_link(running: Running) -> str:
    """In one sentence; empty if there can be one."""
    if running.simulate_workers is not None:
        return "simulated workers are one process, between which nothing travels."
    if is_worker_already():
        return "the workers were started by a launcher, on links of their own."
    if sys.platform != "linux":
        return "only Linux has network namespaces."
    if os.geteuid() != 0:
        return "emulated links need root, who makes network namespaces."
    return why_no_lab(make_spec(replace(running, workers=1)))


def settle_link(
    running: Running, why_not: Callable[[Running], str] = why_no_link
) -> tuple[Running, str]:
    """The same with `auto` decided, and why there is no link where that decided against one.

    UsageError if a rate was asked for that cannot be had here.
    """
    if running.link is None:
        return running, ""
    asked = running.link != AUTO
    settled = running if asked else replace(running, link=AUTO_RATE)
    reason = why_not(settled)
    if not reason:
        return settled, ""
    if asked:
        raise UsageError(f"link is {running.link!r}, which cannot be had here: {reason}")
    return replace(running, link=None), reason


def make_spec(running: Running) -> LabSpec:
    assert running.link is not None
    return LabSpec(hosts=running.workers, rate=running.link)


@contextmanager
def seats(
    running: Running, command: Sequence[str]
) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """What to start for each worker, and with which environment: on the loopback, or on its own host of a lab."""
    if running.link is None:
        yield [(list(command), one) for one in worker_environments(running.processes)]
        return
    with Lab(make_spec(running)) as lab:
        yield lab.seats(command)
