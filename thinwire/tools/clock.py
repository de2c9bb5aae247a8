"""Clock: the library's own marks in time, under the name that tools know them by."""

from __future__ import annotations

from thinwire.observe import Mark, wait_for

__all__ = ["Mark", "wait_for"]
