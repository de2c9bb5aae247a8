"""Opaque: what torch.compile must run as it is and neither trace nor compile.

Hooks run inside a compiled step. Traced, the pipeline would fall apart into a hundred small graphs; and its kernels and
collectives are launched for their effects, which a graph does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def opaque(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function and all it calls."""
    # torch.compiler.disable imports the whole compiler, more than a second, where this waits for the first call.
    disable = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable
    return cast("Callable[P, R]", disable(function))


def in_compiled_backward() -> bool:
    """Whether this is called by compiled autograd, if this torch tells; asked without importing it."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled_autograd, "in_compiled_autograd_region", False))
