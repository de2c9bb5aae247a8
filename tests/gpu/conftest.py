"""What GPU tests of the fused kernels share."""

from __future__ import annotations

import pytest

from thinwire import dense_compressor, fused
from thinwire.kernels import inspection
from thinwire.kernels.cuda.launch import has_kernels


@pytest.fixture
def kernels(monkeypatch):
    """`kernels(False)` goes to the parts, `kernels(True)` back to the kernels."""

    def switch(on: bool) -> None:
        for module in (dense_compressor, fused, inspection):
            monkeypatch.setattr(module, "has_kernels", lambda device: on and has_kernels(device))

    return switch
