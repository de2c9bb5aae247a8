"""A DeepSpeech-like recogniser: two convolutions, recurrent layers that look back, one convolution that looks ahead."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.recipes.kinds import Kind
from thinwire.recipes.models.fitting import expect_kind
from thinwire.recipes.objectives.speech import Speech

Size = TypeVar("Size", int, Tensor)

LOOK_AHEAD = 20
"""Frames to come that a frame's output may depend on, after the recurrent layers."""
STRIDE = 2
"""Input frames per output frame."""
LARGEST_ACTIVATION = 20.0


class FrameNorm(nn.BatchNorm1d):
    """Batch normalisation of [B, T, width] over all frames."""

    def forward(self, frames: Tensor) -> Tensor:
        return super().forward(frames.flatten(0, 1)).view_as(frames)


class LookAhead(nn.Module):
    """Each channel of a frame becomes a weighted sum of itself and of the next frames' (Wang et al., 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, LOOK_AHEAD + 1, groups=width, bias=False)

    def forward(self, frames: Tensor) -> Tensor:
        ahead = functional.pad(frames.transpose(1, 2), (0, LOOK_AHEAD))
        return self.convolution(ahead).transpose(1, 2)


class DeepSpeech(nn.Module):
    """`model(features [B, T, F], lengths [B])` gives (log_probs [B, T', labels], lengths [B]) with T' = T / 2, rounded up.

    The padding behind an utterance is cleared wherever a convolution could mix it in. In evaluation the output then does not
    depend on how far it was padded.
    """

    def __init__(self, features: int, labels: int, channels: int, width: int, layers: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, (41, 11), (2, STRIDE), padding=(20, 5))
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, (21, 11), (2, 1), padding=(10, 5))
        self.norm2 = nn.BatchNorm2d(channels)
        quarter = _halve(_halve(features))
        self.norms = nn.ModuleList([nn.Identity()])
        self.norms.extend(FrameNorm(width) for _ in range(layers - 1))
        self.lstms = nn.ModuleList(
            nn.LSTM(channels * quarter if i == 0 else width, width, batch_first=True)
            for i in range(layers)
        )
        self.ahead = LookAhead(width)
        self.norm = FrameNorm(width)
        self.labels = nn.Linear(width, labels, bias=False)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        lengths = _halve(lengths)
        x = features.transpose(1, 2).unsqueeze(1)  # [B, 1, F, T]
        frames = torch.arange(_halve(features.shape[1]), device=features.device)
        heard = frames < lengths[:, None].to(features.device)  # [B, T']
        for convolution, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            x = functional.hardtanh(norm(convolution(x)), 0.0, LARGEST_ACTIVATION)
            x = x * heard[:, None, None]
        x = x.flatten(1, 2).transpose(1, 2)  # [B, T', channels * F / 4]
        for frame_norm, lstm in zip(self.norms, self.lstms, strict=True):
            x, _ = lstm(frame_norm(x))
        x = functional.hardtanh(self.ahead(x * heard[..., None]), 0.0, LARGEST_ACTIVATION)
        return self.labels(self.norm(x)).log_softmax(2), lengths


def deepspeech(kind: Kind, tiny: bool) -> nn.Module:
    """Ok-Topk's: 5 layers of 800; 27,569,568 parameters with 161 features and 29 labels."""
    speech = expect_kind("deepspeech", kind, Speech)
    channels, width, layers = (4, 16, 2) if tiny else (32, 800, 5)
    return DeepSpeech(speech.features, len(speech.alphabet), channels, width, layers)


def _halve(size: Size) -> Size:
    """What a convolution of stride 2 leaves of a side, or of sides, that it has padded by half its own."""
    return (size + 1) // 2
