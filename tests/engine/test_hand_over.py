"""Host work on a thread of its own, as on CUDA: the same bits, whoever does it, and nobody is left waiting."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.models import batches, fingerprint, make_cnn, train
from thinwire.engine.device_drivers import DRIVERS
from thinwire.engine.drivers import ThreadDriver
from thinwire.engine.groups import private_group
from thinwire.engine.network import Network
from thinwire.layout import Bucket
from thinwire.observe.clock import Mark

STEPS = 6
WORK_BEGINS_LATER_S = 0.002


class JobThread(ThreadDriver):
    """As `StreamDriver`, without streams: jobs are done in order by another thread, after a moment."""

    def __init__(self, network) -> None:
        super().__init__(network)
        self._handed_over: queue.SimpleQueue = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def hand_over(self, job, on_error) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._do, daemon=True)
            self._worker.start()
        self._handed_over.put((job, on_error))

    @torch.no_grad()
    def _do(self) -> None:
        while (entry := self._handed_over.get()) is not None:
            time.sleep(WORK_BEGINS_LATER_S)
            super().hand_over(*entry)

    def catch_up(self) -> None:
        if self._worker is not None and threading.current_thread() is not self._worker:
            done = threading.Event()
            self.hand_over(done.set, print)
            assert done.wait(20)
        super().catch_up()

    def close(self) -> None:
        if self._worker is not None:
            self._handed_over.put(None)
            self._worker.join()
            self._worker = None
        super().close()


@contextmanager
def on_a_thread(wanted: bool = True) -> Iterator[None]:
    """Handles made in this process inside have such a driver."""
    usual = dict(DRIVERS)
    if wanted:
        DRIVERS["cpu"] = lambda group, device, ledger: JobThread(
            Network(private_group(group), ledger)
        )
    try:
        yield
    finally:
        DRIVERS.update(usual)


def train_job(rank: int, world: int, adapter: str, threaded: bool, quiet: int = 0) -> list:
    with on_a_thread(threaded):
        model = make_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        method = tw.ADTopK(density=0.1, dense_fallback=False)
        module, optimizer, handle = make(
            adapter, model, optimizer, method, bucket_kb=2.0, deterministic=True, skippable=True
        )
        handle.reducer.keep_quiet(quiet)
        seen = []

        def look(step: int) -> None:
            seen.append((fingerprint(model), handle.stats().wire_bytes))
            if step == 2:
                handle.switch(tw.TopK(density=0.2, dense_fallback=False))
            if step == 3:
                handle.load_state_dict(handle.state_dict())

        train(module, optimizer, batches(rank, STEPS), look)
        handle.discard_step()
        held = {name: handle.residual(name) for name, _ in model.named_parameters()}
        seen.append(sum(float(one.double().sum()) for one in held.values()))
        handle.close()
        return seen


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_bits_do_not_depend_on_who_does_the_work(pools, adapter):
    group = pools(3)
    assert group.run(train_job, adapter, True) == group.run(train_job, adapter, False)


def look_at_marks(rank: int, world: int) -> list[float]:
    with on_a_thread():
        model = make_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        module, optimizer, handle = make("ddp", model, optimizer, tw.Dense(), bucket_kb=2.0)
        waited = []

        def ready(bucket: Bucket, at: Mark) -> Callable[[], None]:
            waited.append(Mark(bucket.flat.device).ms_since(at))
            return lambda: None

        handle.reducer.on_ready = ready
        train(module, optimizer, batches(rank, 2), lambda step: None)
        handle.close()
        return waited


def test_who_looks_is_told_when_the_gradient_was_there_and_not_when_encoding_begins(pools):
    """On CUDA encoding may wait until other buckets have arrived. Taken for a backward that is so slow, that would hide what the link costs."""
    for waited in pools(2).run(look_at_marks):
        assert waited and min(waited) >= 1e3 * WORK_BEGINS_LATER_S


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("threaded", [False, True])
def test_quiet_backwards_give_the_same_bits(pools, adapter, threaded):
    group = pools(3)
    assert group.run(train_job, adapter, threaded, 3) == group.run(train_job, adapter, threaded)


class NoRoom(tw.select.TradTopK):
    """Cannot select in the first bucket that comes."""

    calls: ClassVar[list[int]] = []

    def pick(self, c, table):
        self.calls.append(table.numel)
        if len(self.calls) == 1:
            raise ValueError("no memory left for this bucket")
        return super().pick(c, table)


def failing_job(rank: int, world: int) -> str:
    with on_a_thread():
        model = make_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        method = tw.Compose(select=NoRoom(0.1), dense_fallback=False)
        module, optimizer, handle = make("ddp", model, optimizer, method, bucket_kb=2.0)
        (images, labels), *_ = batches(rank, 1)
        try:
            nn.functional.cross_entropy(module(images), labels).backward()
        except Exception as error:
            text = str(error)
        else:
            text = "nothing was raised"
        handle.close()
        return text


def test_a_job_that_fails_ends_backward_with_its_error(pools):
    for text in pools(2).run(failing_job):
        assert "no memory left for this bucket" in text
