"""Provenance: what a figure was measured with."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.tools.processes import count_cores

PACKAGES = ("numpy", "scikit-learn")


def describe_origin() -> dict[str, Any]:
    """Date, versions, hardware, and the commit when thinwire runs from a checkout."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": find_commit(),
        "versions": {
            "thinwire": thinwire.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{name: found for name in PACKAGES if (found := _version(name))},
        },
        "hardware": {
            "cpu": cpu_name(),
            "cores": count_cores(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def find_commit() -> str | None:
    """The checkout's commit, with -dirty if files differ from it; None for an installed package."""
    root = Path(thinwire.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
