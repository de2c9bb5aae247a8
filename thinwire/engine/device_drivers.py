"""Which driver runs the exchanges of a device's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from thinwire.engine.drivers import Driver, ThreadDriver
from thinwire.engine.groups import private_group
from thinwire.engine.network import Network
from thinwire.engine.streams import StreamDriver
from thinwire.observe.ledger import Ledger

Made = TypeVar("Made")

MakeDriver = Callable[[dist.ProcessGroup, torch.device, Ledger], Driver]

DRIVERS: dict[str, MakeDriver] = {
    "cpu": lambda group, device, ledger: ThreadDriver(Network(private_group(group), ledger)),
    "cuda": lambda group, device, ledger: StreamDriver(
        Network(private_group(group, device), ledger), device
    ),
}
"""By device type: side streams for CUDA, blocking collectives otherwise. Both have a thread, with a group of its own."""


def make_driver(
    process_group: dist.ProcessGroup, device: torch.device, *, in_turn: bool = False
) -> Driver:
    """The driver that fits the device. `in_turn` if others ask for collectives meanwhile, see `Driver.in_turn`."""
    ledger = Ledger(dist.get_world_size(process_group))
    driver = DRIVERS.get(device.type, DRIVERS["cpu"])(process_group, device, ledger)
    driver.in_turn = in_turn
    return driver


def make_on(driver: Driver, make: Callable[[Driver], Made]) -> Made:
    """What `make` makes on the driver, which is closed if that fails."""
    try:
        return make(driver)
    except Exception:
        driver.close()
        raise
