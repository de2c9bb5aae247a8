"""thinwire: fast data-parallel PyTorch training on networks that are slower than the gradients."""

from thinwire.adapters.ddp import attach
from thinwire.adapters.optimizer import DistributedOptimizer
from thinwire.errors import ExchangeError, UsageError, WireError
from thinwire.exchange.gather import AllGather, AllGatherFast
from thinwire.handle import Handle
from thinwire.memory.residual import NoMemory, Residual
from thinwire.methods.adtopk import ADTopK
from thinwire.methods.base import Compose, Dense
from thinwire.methods.topk import TopK
from thinwire.plan.layerwise import layerwise_density
from thinwire.plan.policy import rule
from thinwire.select.interleave import Interleaved
from thinwire.select.threshold import Monitor, ThresholdTopK, Updater
from thinwire.select.topk import AllDimensionTopK, TradTopK
from thinwire.version import __version__
from thinwire.wire.format import Wire

__all__ = [
    "ADTopK",
    "AllDimensionTopK",
    "AllGather",
    "AllGatherFast",
    "Compose",
    "Dense",
    "DistributedOptimizer",
    "ExchangeError",
    "Handle",
    "Interleaved",
    "Monitor",
    "NoMemory",
    "Residual",
    "ThresholdTopK",
    "TopK",
    "TradTopK",
    "Updater",
    "UsageError",
    "Wire",
    "WireError",
    "__version__",
    "attach",
    "layerwise_density",
    "rule",
]
