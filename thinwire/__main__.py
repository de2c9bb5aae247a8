"""`python -m thinwire`, which is how torchrun starts it: torchrun -m thinwire train digits."""

import sys

from thinwire.cli import main

sys.exit(main())
