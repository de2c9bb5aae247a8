"""Watching: what a reducer's comparison of the replicas found, and when somebody acts on it."""

from __future__ import annotations

from thinwire.engine.reducer import Reducer
from thinwire.engine.replicas import Difference, ReplicaWatch
from thinwire.errors import UsageError


def look_at_replicas(reducer: Reducer) -> None:
    """A synchronising backward has ended on every rank: act on what the last comparison found."""
    replicas = reducer.replicas
    if replicas is not None:
        _act_on(replicas.find(reducer.step, reducer.driver.place.world), reducer, replicas)


def check_replicas(reducer: Reducer) -> None:
    """Compare now; between steps, on every rank at the same point."""
    replicas = reducer.replicas
    if replicas is None:
        raise UsageError(
            "there are no replicas to compare: the parameters are not known here, or all workers share them"
        )
    reducer.driver.run(replicas.look(reducer.step))
    world = reducer.driver.place.world
    while replicas.waiting:
        # Whoever asks waits for the answer.
        _act_on(replicas.find(reducer.step + 1, world), reducer, replicas)


def _act_on(found: Difference | None, reducer: Reducer, replicas: ReplicaWatch) -> None:
    if found is not None:
        reducer.settle()
        replicas.act(found, reducer.driver)
        reducer.plans.clear()
