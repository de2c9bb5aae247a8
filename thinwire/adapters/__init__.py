"""Adapters: where thinwire plugs in."""

from thinwire.adapters.attach import attach
from thinwire.adapters.local_presets import DiLoCo, SparseLoCo, StreamingDiLoCo
from thinwire.adapters.local_steps import LocalSteps
from thinwire.adapters.optimizer import DistributedOptimizer
from thinwire.adapters.simulate import Simulation, simulate
from thinwire.adapters.simulate_local import LocalSimulation
from thinwire.adapters.simulate_report import SimulationReport

__all__ = [
    "DiLoCo",
    "DistributedOptimizer",
    "LocalSimulation",
    "LocalSteps",
    "Simulation",
    "SimulationReport",
    "SparseLoCo",
    "StreamingDiLoCo",
    "attach",
    "simulate",
]
