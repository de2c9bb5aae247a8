"""Host work on a thread of its own, as on CUDA: the same bits, whoever does it, and nobody is left waiting."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.models import batches, fingerprint, make_cnn, train
from thinwire import handle as handles
from thinwire.exchange.drivers import ThreadDriver

STEPS = 6


class JobThread(ThreadDriver):
    """As `StreamDriver`, without streams: jobs are done in order by another thread, after a moment."""

    def __init__(self, network) -> None:
        super().__init__(network)
        self._handed_over: queue.SimpleQueue = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def hand_over(self, job) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._do, daemon=True)
            self._worker.start()
        self._handed_over.put(job)

    @torch.no_grad()
    def _do(self) -> None:
        while (job := self._handed_over.get()) is not None:
            time.sleep(0.002)
            job(lambda: None)

    def catch_up(self) -> None:
        if self._worker is not None and threading.current_thread() is not self._worker:
            done = threading.Event()
            self.hand_over(lambda _: done.set())
            assert done.wait(20)
        super().catch_up()

    def close(self) -> None:
        if self._worker is not None:
            self._handed_over.put(None)
            self._worker.join()
            self._worker = None
        super().close()


def on_a_thread() -> None:
    """Handles made in this process from now on have such a driver."""
    usual = handles.make_driver

    def make_driver(group, device):
        driver, ledger = usual(group, device)
        return JobThread(driver.network), ledger

    handles.make_driver = make_driver


def train_job(rank: int, world: int, adapter: str, threaded: bool) -> list:
    usual = handles.make_driver
    if threaded:
        on_a_thread()
    try:
        model = make_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        method = tw.ADTopK(density=0.1, dense_fallback=False)
        module, optimizer, handle = make(
            adapter, model, optimizer, method, bucket_kb=2.0, deterministic=True
        )
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
    finally:
        handles.make_driver = usual


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_bits_do_not_depend_on_who_does_the_work(pools, adapter):
    group = pools(3)
    assert group.run(train_job, adapter, True) == group.run(train_job, adapter, False)


def failing_job(rank: int, world: int) -> str:
    usual = handles.make_driver
    on_a_thread()
    try:
        model = make_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        module, optimizer, handle = make(
            "ddp", model, optimizer, tw.ADTopK(density=0.1, dense_fallback=False), bucket_kb=2.0
        )
        reopen, calls = handle.pipeline._open, []

        def refuse_first(bucket):
            calls.append(bucket)
            if len(calls) == 1:
                raise ValueError("no memory left for this bucket")
            return reopen(bucket)

        handle.pipeline._open = refuse_first
        (images, labels), *_ = batches(rank, 1)
        try:
            nn.functional.cross_entropy(module(images), labels).backward()
        except Exception as error:
            text = str(error)
        else:
            text = "nothing was raised"
        handle.close()
        return text
    finally:
        handles.make_driver = usual


def test_a_job_that_fails_ends_backward_with_its_error(pools):
    for text in pools(2).run(failing_job):
        assert "no memory left for this bucket" in text
