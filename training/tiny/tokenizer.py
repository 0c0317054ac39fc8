"""A SentencePiece vocabulary: BPE, one token per digit, unknown characters as bytes, as llama.cpp's "llama" has it."""

import io
from collections.abc import Iterable
from pathlib import Path

try:
    import sentencepiece
except ImportError as reason:
    raise ImportError("tokenizers are made with sentencepiece: pip install pylongctx[train]") from reason

UNKNOWN, BOS, EOS = range(3)
Tokenizer = sentencepiece.SentencePieceProcessor


def train_tokenizer(lines: Iterable[str], n_vocab: int) -> bytes:
    """Return a SentencePiece model of ``n_vocab`` tokens.

    Raises
    ------
    ValueError
        When the texts have too few words, or too many characters, for that.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=n_vocab,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            unk_id=UNKNOWN,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as reason:
        raise ValueError(f"no vocabulary of {n_vocab} tokens can be made of these texts: {reason}") from reason
    return model.getvalue()


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a SentencePiece file."""
    return Tokenizer(model_file=str(path))
