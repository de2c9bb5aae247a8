"""Methods: the published ones, each a small file of hyper-parameters and parts, and what they are composed with."""

from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.adam_scale import AdamScale, Settled
from thinwire.methods.adtopk import ADTopK
from thinwire.methods.auto import Auto
from thinwire.methods.base import SMALL_NUMEL, Compose, Dense, Method, SparseMethod
from thinwire.methods.chunktopk import ChunkTopK
from thinwire.methods.dgc import DGC
from thinwire.methods.exclusive import ExclusiveTopK
from thinwire.methods.gaussiank import GaussianK
from thinwire.methods.gtopk import GTopK
from thinwire.methods.oktopk import OkTopK
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.quantized import Quantized
from thinwire.methods.randomk import RandomK
from thinwire.methods.redsync import RedSync
from thinwire.methods.schedule import Schedule, decay, exponential_warmup, warmup
from thinwire.methods.sidco import SIDCo
from thinwire.methods.signsgd import SignSGD
from thinwire.methods.threshold import Threshold
from thinwire.methods.timeline import Timeline
from thinwire.methods.topk import TopK
from thinwire.methods.topka import TopKA
from thinwire.methods.topkdsa import TopKDSA

__all__ = [
    "ACPSGD",
    "DGC",
    "SMALL_NUMEL",
    "ADTopK",
    "AdamScale",
    "Auto",
    "ChunkTopK",
    "Compose",
    "Dense",
    "ExclusiveTopK",
    "GTopK",
    "GaussianK",
    "Method",
    "OkTopK",
    "PowerSGD",
    "Quantized",
    "RandomK",
    "RedSync",
    "SIDCo",
    "Schedule",
    "Settled",
    "SignSGD",
    "SparseMethod",
    "Threshold",
    "Timeline",
    "TopK",
    "TopKA",
    "TopKDSA",
    "decay",
    "exponential_warmup",
    "warmup",
]
