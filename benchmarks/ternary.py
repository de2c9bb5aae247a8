"""Which scale suits 2 bits: the block's largest magnitude, or the least-squares fit? On gradients of networks in training.

    python benchmarks/ternary.py

Prints |g - decoded|^2 / |g|^2 for blocks of 64 and 128: largest magnitude, one to four of Lloyd's rounds, the exact least squares
(by sorting), and one bit for comparison. Needs scikit-learn for its digits; the text is the documentation of this repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.wire import quantize
from thinwire.wire.quantize import BlockQuantizer, SignBlocks, TernaryBlocks, largest

DOCS = Path(__file__).resolve().parents[1] / "docs"
Gradients = list[Tensor]


def digits_gradients() -> Iterator[tuple[str, Gradients]]:
    """A small convolutional network, SGD with momentum."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    first = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten()]
    head = [nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10)]
    net = nn.Sequential(*first, *second, *head)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(60):
        chosen = torch.randint(0, len(images), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        if step in (3, 59):
            yield f"digits, step {step}", gradients_of(net)


class SmallTransformer(nn.Module):
    """Two layers that read 64 bytes."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(64, width)
        options = {"batch_first": True, "norm_first": True, "dropout": 0.0}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(2)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(64)
        hidden = self.bytes(text) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def text_gradients() -> Iterator[tuple[str, Gradients]]:
    """AdamW on bytes."""
    text = torch.tensor(list(b"".join(page.read_bytes() for page in sorted(DOCS.glob("*.md")))))
    net = SmallTransformer()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(80):
        starts = torch.randint(0, len(text) - 65, (16,)).tolist()
        batch = torch.stack([text[start : start + 65] for start in starts])
        optimizer.zero_grad()
        logits = net(batch[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, batch[:, 1:].flatten()).backward()
        optimizer.step()
        if step in (3, 79):
            yield f"text, step {step}", gradients_of(net)


def gradients_of(net: nn.Module) -> Gradients:
    found = [parameter.grad for parameter in net.parameters() if parameter.numel() >= 1024]
    return [gradient.clone() for gradient in found if gradient is not None]


def in_blocks(gradients: Gradients, size: int) -> Tensor:
    return torch.cat([g.flatten()[: g.numel() // size * size].view(-1, size) for g in gradients])


def error(blocks: Tensor, decoded: Tensor) -> float:
    return float((blocks - decoded).square().sum() / blocks.square().sum())


def coded(blocks: Tensor, quantizer: BlockQuantizer) -> Tensor:
    return quantizer.decode(quantizer.encode(blocks, torch.full(blocks.shape[:1], blocks.shape[1])))


def by_largest(blocks: Tensor) -> Tensor:
    scales = largest(blocks).clamp(min=1e-38)[:, None]
    return (blocks / scales).round() * scales


def least_error(blocks: Tensor) -> float:
    """The k largest are not zero, their mean is the scale; the best of all k."""
    sizes = blocks.abs().sort(dim=1, descending=True).values
    explained = sizes.cumsum(1).square() / torch.arange(1, blocks.shape[1] + 1)
    left = blocks.square().sum(1) - explained.max(1).values
    return float(left.sum() / blocks.square().sum())


def main() -> None:
    torch.manual_seed(0)
    columns = ["largest", *(f"fit {rounds}" for rounds in range(1, 5)), "best", "1 bit"]
    print(f"{'gradients':16} {'block':>5} " + " ".join(f"{name:>8}" for name in columns))
    for source in (digits_gradients(), text_gradients()):
        for name, gradients in source:
            for size in (64, 128):
                blocks = in_blocks(gradients, size)
                found = [error(blocks, by_largest(blocks))]
                for rounds in range(1, 5):
                    quantize.LLOYD_ROUNDS = rounds
                    found.append(error(blocks, coded(blocks, TernaryBlocks())))
                found += [least_error(blocks), error(blocks, coded(blocks, SignBlocks()))]
                print(f"{name:16} {size:5} " + " ".join(f"{value:8.4f}" for value in found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
