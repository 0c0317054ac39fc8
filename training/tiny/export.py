"""From a torch model to a GGUF file."""

from pathlib import Path

import gguf
from gguf.quants import quantize
from random_blocks import F32, Q8_0
from random_model import FILE_TYPES, add_meta, shape_meta

from tiny.model import Model
from tiny.tokenizer import BOS, EOS, UNKNOWN, Tokenizer

WEIGHTS = {"f32": F32, "q8_0": Q8_0}


def export(path: Path, model: Model, tokenizer: Tokenizer, weights: str, name: str = "pylongctx-tiny") -> Path:
    """Write a model and its vocabulary.

    Parameters
    ----------
    weights : str
        "f32" or "q8_0"; vectors are f32 in both.
    name : str
        What ``general.name`` says.
    """
    writer = gguf.GGUFWriter(str(path), model.arch)
    writer.add_name(name)
    add_meta(writer, model.arch, shape_meta(model.shape) | {"vocab_size": model.shape.n_vocab})
    writer.add_file_type(FILE_TYPES[WEIGHTS[weights]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_vocabulary(writer, tokenizer)
    for tensor, values in model.state_dict().items():
        kind = WEIGHTS[weights] if values.ndim == 2 else F32
        writer.add_tensor(tensor, quantize(values.float().cpu().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    tokens = range(tokenizer.get_piece_size())
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokenizer.id_to_piece(token) for token in tokens])
    writer.add_token_scores([tokenizer.get_score(token) for token in tokens])
    writer.add_token_types([_kind(tokenizer, token) for token in tokens])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)


def _kind(tokenizer: Tokenizer, token: int) -> gguf.TokenType:
    if tokenizer.is_unknown(token):
        return gguf.TokenType.UNKNOWN
    if tokenizer.is_control(token):
        return gguf.TokenType.CONTROL
    return gguf.TokenType.BYTE if tokenizer.is_byte(token) else gguf.TokenType.NORMAL
