"""What tests of the kernels share: CPU tensors are served by kernels compiled for the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.cpu_compiler import PLAIN, CpuToolchain, Switch, switch


@pytest.fixture
def kernels() -> Iterator[Switch]:
    """Clusters made inside run the kernels. `kernels(False)` goes back to the parts, `kernels.tune` to other sizes."""
    with switch("cpu", PLAIN) as made:
        yield made


@pytest.fixture
def launched(kernels: Switch) -> list[str]:
    """The kernels that were launched, in order."""
    names: list[str] = []

    def noted(name, kernel):
        def launch(*args):
            names.append(name)
            kernel(*args)

        return launch

    kernels.use(CpuToolchain(wrap=noted))
    return names
