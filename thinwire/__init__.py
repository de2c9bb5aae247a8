"""thinwire: fast data-parallel PyTorch training on networks that are slower than the gradients."""

from thinwire import optim
from thinwire.adapters.ddp import attach
from thinwire.adapters.optimizer import DistributedOptimizer
from thinwire.adapters.simulate import Simulation, simulate
from thinwire.errors import ExchangeError, UsageError, WireError
from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.chunks import ChunkAllReduce
from thinwire.exchange.dsa import SplitGather
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.gather import AllGather, AllGatherFast
from thinwire.exchange.hierarchy import Hierarchical
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.shared_indices import SharedIndices
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.tree import TreeMerge
from thinwire.handle import Handle
from thinwire.memory.clip import Clip
from thinwire.memory.momentum import MomentumCorrection
from thinwire.memory.residual import NoMemory, Residual
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.adtopk import ADTopK
from thinwire.methods.base import Compose, Dense
from thinwire.methods.chunktopk import ChunkTopK
from thinwire.methods.dgc import DGC
from thinwire.methods.exclusive import ExclusiveTopK
from thinwire.methods.gaussiank import GaussianK
from thinwire.methods.gtopk import GTopK
from thinwire.methods.oktopk import OkTopK
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.randomk import RandomK
from thinwire.methods.redsync import RedSync
from thinwire.methods.sidco import SIDCo
from thinwire.methods.signsgd import SignSGD
from thinwire.methods.threshold import Threshold
from thinwire.methods.timeline import Timeline
from thinwire.methods.topk import TopK
from thinwire.methods.topka import TopKA
from thinwire.methods.topkdsa import TopKDSA
from thinwire.plan.layerwise import layerwise_density
from thinwire.plan.policy import rule
from thinwire.plan.schedule import Schedule, decay, exponential_warmup, warmup
from thinwire.select.chunks import ChunkChoice
from thinwire.select.gaussian import GaussianThreshold
from thinwire.select.interleave import Interleaved
from thinwire.select.random import RandomChoice
from thinwire.select.redsync import RedSyncThreshold
from thinwire.select.sampled import SampledThreshold
from thinwire.select.sidco import SIDCoThreshold
from thinwire.select.threshold import Monitor, ThresholdTopK, Updater
from thinwire.select.threshold_fixed import FixedThreshold
from thinwire.select.topk import AllDimensionTopK, TradTopK
from thinwire.version import __version__
from thinwire.wire.format import Wire

__all__ = [
    "ACPSGD",
    "DGC",
    "ADTopK",
    "AllDimensionTopK",
    "AllGather",
    "AllGatherFast",
    "ChunkAllReduce",
    "ChunkChoice",
    "ChunkTopK",
    "Clip",
    "Compose",
    "CyclicLeader",
    "Dense",
    "DistributedOptimizer",
    "ExchangeError",
    "Exclusive",
    "ExclusiveTopK",
    "FixedThreshold",
    "GTopK",
    "GaussianK",
    "GaussianThreshold",
    "Handle",
    "Hierarchical",
    "Interleaved",
    "MomentumCorrection",
    "Monitor",
    "NoMemory",
    "OkTopK",
    "PowerSGD",
    "RandomChoice",
    "RandomK",
    "RedSync",
    "RedSyncThreshold",
    "Residual",
    "ReusedThresholds",
    "SIDCo",
    "SIDCoThreshold",
    "SampledThreshold",
    "Schedule",
    "SharedIndices",
    "SignSGD",
    "Simulation",
    "SplitGather",
    "SplitReduce",
    "Threshold",
    "ThresholdTopK",
    "Timeline",
    "TopK",
    "TopKA",
    "TopKDSA",
    "TradTopK",
    "TreeMerge",
    "Updater",
    "UsageError",
    "Wire",
    "WireError",
    "__version__",
    "attach",
    "decay",
    "exponential_warmup",
    "layerwise_density",
    "optim",
    "rule",
    "simulate",
    "warmup",
]
