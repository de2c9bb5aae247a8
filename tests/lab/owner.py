"""Script: own a lab, say its name, run `sleep` in it until somebody ends this process."""

from __future__ import annotations

import signal

from thinwire.lab import Lab, LabSpec

# A shell starts what runs in the background with this signal ignored, and so would be everything below it.
signal.signal(signal.SIGINT, signal.default_int_handler)

with Lab(LabSpec(hosts=2, rate="100mbit")) as lab:
    print(lab.name, flush=True)
    lab.run(
        ["sh", "-c", "echo up; exec sleep 60"], echo=lambda line, stream: print(line, flush=True)
    )
