"""Speech with its transcript, aligned by connectionist temporal classification (CTC)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from thinwire.recipes.examples import Batch
from thinwire.recipes.kinds import Carry, Kind, Totals
from thinwire.recipes.objectives.transcripts import BLANK, count_edits, decode_greedily


@dataclass(frozen=True, kw_only=True)
class Speech(Kind):
    """A batch is (features [B, T, features] float, lengths [B], targets [B, S] int64, target_lengths [B]); both are padded.

    `model(features, lengths)` gives (log_probs [B, T', len(alphabet)], output lengths [B]).
    """

    headline: ClassVar[str] = "wer"
    higher_is_better: ClassVar[bool] = False

    features: int
    """Numbers per frame, such as 13 cepstral coefficients or 161 bins of a spectrogram."""
    alphabet: str
    """The character of each label; the first stands for the blank and is never in a transcript. Words end at spaces."""

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """Per utterance, not per character: what the rates and the clipping norm of the published jobs are meant for."""
        features, lengths, targets, target_lengths = batch
        log_probs, out_lengths = model(features, lengths)
        total = functional.ctc_loss(
            log_probs.float().transpose(0, 1),
            targets,
            out_lengths,
            target_lengths,
            blank=BLANK,
            reduction="sum",
            # An utterance shorter than its transcript has no alignment: it teaches nothing rather than infinity.
            zero_infinity=True,
        )
        return total / len(features), None

    def measure(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Totals, Carry]:
        """Edits to words and to characters, over how many were said."""
        features, lengths, targets, target_lengths = batch
        log_probs, out_lengths = model(features, lengths)
        heard = decode_greedily(log_probs, out_lengths, self.alphabet)
        said = [
            "".join(self.alphabet[label] for label in row[:length])
            for row, length in zip(targets.tolist(), target_lengths.tolist(), strict=True)
        ]
        pairs = list(zip(heard, said, strict=True))
        words = sum(count_edits(one.split(), other.split()) for one, other in pairs)
        letters = sum(count_edits(one, other) for one, other in pairs)
        return {
            "wer": (
                targets.new_tensor(words),
                targets.new_tensor(sum(len(s.split()) for s in said)),
            ),
            "cer": (targets.new_tensor(letters), targets.new_tensor(sum(map(len, said)))),
        }, None
