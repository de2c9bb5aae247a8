"""Exchanges: how the selected entries of all ranks become the same update on every rank.

An exchange is a generator that yields what it asks of the network; `Sum`, `Gather` and the like are these requests.
"""

from thinwire.exchange.agreed import CyclicLeader
from thinwire.exchange.all_gather import GATHERED_PAYLOADS, AllGather, AllGatherPlain
from thinwire.exchange.base import Exchange, ExchangeSession, Offer, Outcome
from thinwire.exchange.chunks import ChunkAllReduce
from thinwire.exchange.dsa import SplitGather
from thinwire.exchange.exclusive import Exclusive
from thinwire.exchange.hierarchy import Hierarchical
from thinwire.exchange.requests import (
    AllToAll,
    AllToAllUneven,
    Batch,
    Broadcast,
    Collective,
    Common,
    Gather,
    Place,
    Program,
    Request,
    Sum,
    Swap,
    common,
    together,
)
from thinwire.exchange.reused import ReusedThresholds
from thinwire.exchange.shared_indices import SharedIndices
from thinwire.exchange.split import SplitReduce
from thinwire.exchange.tree import TreeMerge

__all__ = [
    "GATHERED_PAYLOADS",
    "AllGather",
    "AllGatherPlain",
    "AllToAll",
    "AllToAllUneven",
    "Batch",
    "Broadcast",
    "ChunkAllReduce",
    "Collective",
    "Common",
    "CyclicLeader",
    "Exchange",
    "ExchangeSession",
    "Exclusive",
    "Gather",
    "Hierarchical",
    "Offer",
    "Outcome",
    "Place",
    "Program",
    "Request",
    "ReusedThresholds",
    "SharedIndices",
    "SplitGather",
    "SplitReduce",
    "Sum",
    "Swap",
    "TreeMerge",
    "common",
    "together",
]
