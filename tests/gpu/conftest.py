"""What GPU tests of the fused kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.cpu_compiler import Switch, switch
from thinwire.kernels.cuda.toolchain import kernels_for


@pytest.fixture
def kernels() -> Iterator[Switch]:
    """`kernels(False)` goes to the parts, `kernels(True)` back to the kernels."""
    with switch("cuda", kernels_for(torch.device("cuda", 0))) as made:
        yield made
