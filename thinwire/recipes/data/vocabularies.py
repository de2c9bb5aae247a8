"""Vocabularies of word pieces: BERT's and GPT-2's, read from their published files by the package tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.recipes.data.source import damaged, reading

BERT_VOCABULARY = 30522
GPT2_VOCABULARY = 50257
SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_word_pieces(path: Path) -> Any:
    """BERT's uncased tokenizer over a vocab.txt, one piece per line."""
    tokenizers = import_tokenizers()
    with reading(path, "a list of word pieces"):
        pieces = {piece: number for number, piece in enumerate(path.read_text("utf-8").split("\n"))}
    missing = [piece for piece in SPECIAL_PIECES if piece not in pieces]
    if missing:
        raise damaged(path, f"it lacks {', '.join(missing)}")
    return tokenizers.BertWordPieceTokenizer(str(path), lowercase=True)


def read_byte_pairs(vocabulary: Path, merges: Path) -> Any:
    """GPT-2's tokenizer over a vocab.json and a merges.txt."""
    tokenizers = import_tokenizers()
    try:
        model = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the package raises nothing narrower
        raise UsageError(
            f"{vocabulary} and {merges} do not make a vocabulary of byte pairs; {error}"
        ) from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(
            "this data set needs the package tokenizers; pip install 'thinwire[text]' brings it"
        ) from error
    return tokenizers
