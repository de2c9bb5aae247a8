"""thinwire inside training frameworks: `integrations.accelerate`, `integrations.transformers`, `integrations.lightning`.

Each is imported by itself, because each needs its framework. What they share is here: a folder with one file per rank.
"""

from thinwire.integrations.files import load_rank, save_rank

__all__ = ["load_rank", "save_rank"]
