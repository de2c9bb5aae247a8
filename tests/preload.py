"""What workers of a pool need, imported once by the process that they are forked from. No thread begins here."""

import os

# numpy's own threads would begin with its import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import tests.pool  # noqa: F401
import thinwire.public  # noqa: F401
