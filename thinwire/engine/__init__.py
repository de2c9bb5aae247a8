"""Engine: from a bucket of local gradients to the mean update. `Reducer` is the door; drivers run the exchanges."""

from thinwire.engine.bucket_plan import deliver_nothing
from thinwire.engine.drivers import Driver, InlineDriver, ThreadDriver, run_inline
from thinwire.engine.groups import private_group
from thinwire.engine.method_check import CheckReport, check
from thinwire.engine.network import Network
from thinwire.engine.reducer import Reducer
from thinwire.engine.streams import StreamDriver
from thinwire.engine.virtual import VirtualCluster, VirtualRank, VirtualRanks, answer, run_virtual

__all__ = [
    "CheckReport",
    "Driver",
    "InlineDriver",
    "Network",
    "Reducer",
    "StreamDriver",
    "ThreadDriver",
    "VirtualCluster",
    "VirtualRank",
    "VirtualRanks",
    "answer",
    "check",
    "deliver_nothing",
    "private_group",
    "run_inline",
    "run_virtual",
]
