"""What a run begins with when it is given a GGUF file: its vocabulary and its weights."""

from hashlib import sha256
from pathlib import Path

import gguf
import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from tiny.model import Model


def file_digest(path: Path) -> str:
    """Tells this file from all others."""
    return sha256(path.read_bytes()).hexdigest()


def read_tokenizer(path: Path) -> bytes:
    """Return the SentencePiece model that a GGUF file was written with, but for how it was trained.

    Raises
    ------
    ValueError
        When the vocabulary is of another kind.
    """
    fields = gguf.GGUFReader(str(path)).fields
    kind = fields["tokenizer.ggml.model"].contents()
    if kind != "llama":
        raise ValueError(f"{path} has a vocabulary of the kind {kind!r}; runs go on from 'llama' only, SentencePiece's")
    parts = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    model = ModelProto()
    for piece, score, token_type in zip(*parts, strict=True):
        model.pieces.add(piece=piece, score=score, type=token_type)  # GGUF's types are SentencePiece's
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    return bytes(model.SerializeToString())


def load_weights(model: Model, path: Path) -> None:
    """Let a model begin with the weights of a GGUF file.

    Raises
    ------
    ValueError
        When the file has other tensors, or of other sizes.
    """
    tensors = gguf.GGUFReader(str(path)).tensors
    weights = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in tensors}
    try:
        model.load_state_dict(weights)
    except RuntimeError as reason:
        raise ValueError(f"{path} does not fit the settings of this run: {reason}") from None
