"""A worker process of `launch.py`: python -m thinwire.recipes.local_worker FOLDER LAUNCHER_PID

It looks for its launcher before anything else: the imports of a worker take seconds, and one whose launcher was killed has two.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(folder: Path, launcher: int) -> None:
    if os.getppid() != launcher:
        # It was killed before it could tell its warden about this worker.
        sys.exit(1)
    from thinwire.recipes import worker

    worker.main(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
