"""Auto: measure real steps, predict every candidate, choose, switch, and go on watching."""

from thinwire.auto.pilot import PROFILE_VARIABLE, Pilot
from thinwire.auto.profiling import profile_steps
from thinwire.auto.prospect import Prospect
from thinwire.auto.rehearsal import Rehearsed, Traffic, rehearse

__all__ = [
    "PROFILE_VARIABLE",
    "Pilot",
    "Prospect",
    "Rehearsed",
    "Traffic",
    "profile_steps",
    "rehearse",
]
