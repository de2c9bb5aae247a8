"""Horovod's face: `import thinwire.horovod as hvd`. The code is in `thinwire/adapters/horovod/`."""

from thinwire.adapters.horovod import *  # noqa: F403
from thinwire.adapters.horovod import __getattr__ as __getattr__
