"""Profiling: a profile of one worker alone, to predict clusters that are not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire.auto.clock import EnergyMeter, StepClock
from thinwire.auto.council import Council
from thinwire.auto.measuring import make_profile, measure_work
from thinwire.engine.network import Network
from thinwire.engine.reducer import Reducer
from thinwire.errors import UsageError
from thinwire.exchange.requests import Place
from thinwire.layout import Bucket
from thinwire.observe.clock import Mark
from thinwire.plan.candidates import Candidate
from thinwire.plan.profile import Profile

WARM_STEPS = 2


def profile_steps(
    reducer: Reducer,
    run_step: Callable[[], None],
    candidates: Sequence[Candidate],
    *,
    steps: int = 6,
    world: int = 4,
) -> Profile:
    """Measure some steps of a dense job of one worker; encoding and decoding are those of `world` workers."""
    network = reducer.driver.network
    if network is None or network.place.world != 1:
        raise UsageError("a profile is made of one worker alone; several measure their own link")
    device = reducer.device
    clock, meter = StepClock(device), EnergyMeter()

    def ready(bucket: Bucket, at: Mark) -> Callable[[], None]:
        meter.look(bucket.layout, bucket.flat)
        return clock.ready(bucket.layout, at)

    def begin(step: int) -> None:
        clock.begin_step()

    for _ in range(WARM_STEPS):
        run_step()
    reducer.before_step.append(begin)
    reducer.on_ready = ready
    try:
        for _ in range(steps):
            run_step()
        measured = clock.measured()
    finally:
        reducer.before_step.remove(begin)
        reducer.on_ready = None
    if measured is None:
        raise UsageError(
            "the buckets of the measured steps differ, so that nothing can be predicted"
        )
    dtype = next(iter(reducer.parameters.values())).dtype
    council = _Several(network, world)
    work = measure_work(candidates, council, device, dtype)
    return make_profile(
        measured,
        meter,
        reducer.parameters,
        council=council,
        device=device,
        work=work,
        prices=None,
        coalesce_bytes=reducer.coalesce_bytes,
    )


class _Several(Council):
    """One worker that stands for many, each on a device of its own."""

    def __init__(self, network: Network, world: int) -> None:
        super().__init__(network.group, Place(0, world))

    def largest(self, values: Sequence[float]) -> list[float]:
        return list(values)
