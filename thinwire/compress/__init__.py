"""Compress: methods at work. What a group of slots sends, who does the work, and what has to be settled afterwards."""

from thinwire.compress.agreed_routes import AGREEING_KERNELS
from thinwire.compress.backends import Backend, SparseTask, forget_backend, register_backend
from thinwire.compress.base import Compressor, GroupPlan, GroupStep, Opened, Route, Terms
from thinwire.compress.kernel_routes import THRESHOLD_KERNELS, TOP_K_KERNELS
from thinwire.compress.picked_routes import PICKING_KERNELS
from thinwire.compress.split_routes import SPLIT_KERNELS
from thinwire.compress.tree_routes import TREE_KERNELS

__all__ = [
    "AGREEING_KERNELS",
    "PICKING_KERNELS",
    "SPLIT_KERNELS",
    "THRESHOLD_KERNELS",
    "TOP_K_KERNELS",
    "TREE_KERNELS",
    "Backend",
    "Compressor",
    "GroupPlan",
    "GroupStep",
    "Opened",
    "Route",
    "SparseTask",
    "Terms",
    "forget_backend",
    "register_backend",
]
