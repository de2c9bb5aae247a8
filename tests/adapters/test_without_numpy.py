"""torch is the only hard dependency: nothing on the library's way needs numpy."""

from __future__ import annotations

from tests.launch import launch


def test_two_ranks_train_where_numpy_cannot_be_imported():
    for output in launch("without_numpy.py", 2):
        assert "done without numpy" in output
