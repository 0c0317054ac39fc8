"""Record queries, keys and values of one layer of a model while it reads a text, for benchmarks of kernels.

    python bench/record_rows.py qwen2.5-coder-1.5b --text emma.txt --tokens 32768 --out rows.npz
    python tests/gpu/acceptance.py --section layers --rows rows.npz

What a real text reads differs from random rows: heads and tokens that follow each other choose the same chunks. Stock
llama.cpp evaluates the text (package llama-cpp-python), and a callback takes the tensors before they are rotated. The
file has f16 numbers: 35 MB for 32768 tokens of this model. Its queries are those of the last QUERIES tokens.
"""

import argparse
import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from native_ops import Rows, Shape

from pylongctx.catalog import resolve

QUERIES = 1024


def library() -> ctypes.CDLL:
    """Return the library of the package with what reads a tensor."""
    lib = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    for name, result in (("name", ctypes.c_char_p), ("op_desc", ctypes.c_char_p), ("nbytes", ctypes.c_size_t)):
        function = getattr(lib, f"ggml_{'get_' if name == 'name' else ''}{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], result
    lib.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return lib


class Recorder:
    """Keeps queries, keys and values of a layer, batch by batch."""

    def __init__(self, layer: int):
        self.lib = library()
        self.names = {f"{part.upper()}cur{end}-{layer}": part for part in "qkv" for end in ("", "_normed")}
        self.last: dict[str, np.ndarray] = {}
        self.parts: dict[str, list[np.ndarray]] = {part: [] for part in "qkv"}

    def on_node(self, tensor: int, ask: bool, _: Any) -> bool:
        """Take what these names stand for at last before it is rotated: sums with a bias, normed heads."""
        part = self.names.get(self.lib.ggml_get_name(tensor).decode())
        wanted = part is not None and b"ROPE" not in self.lib.ggml_op_desc(tensor)
        if wanted and not ask:
            values = np.empty(self.lib.ggml_nbytes(tensor) // 4, np.float32)
            self.lib.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
            self.last[part] = values
        return wanted if ask else True  # the graph continues

    def end_batch(self, n_token: int) -> None:
        """Keep what a batch gave as ``[n_token, channels]``."""
        for part, values in self.last.items():
            self.parts[part].append(values.reshape(n_token, -1).astype(np.float16))

    def array(self, part: str, n_head: int) -> np.ndarray:
        """Return ``[n_tokens, n_head, head_dim]``."""
        rows = np.concatenate(self.parts[part])
        return rows.reshape(len(rows), n_head, -1)


def evaluate(path: str, tokens: list[int], recorder: Recorder, n_batch: int) -> bool:
    """Read tokens with stock llama.cpp while a recorder looks at its nodes; returns whether heads rotate halves."""
    callback = llama_cpp.ggml_backend_sched_eval_callback(recorder.on_node)
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.cb_eval = len(tokens), n_batch, n_batch, callback
    context = llama_cpp.llama_init_from_model(model, params)
    for first in range(0, len(tokens), n_batch):
        batch = tokens[first : first + n_batch]
        ids = (ctypes.c_int32 * len(batch))(*batch)
        if status := llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(batch))):
            raise RuntimeError(f"llama_decode returned {status} at token {first}")
        recorder.end_batch(len(batch))
    is_neox = llama_cpp.llama_model_rope_type(model) == llama_cpp.LLAMA_ROPE_TYPE_NEOX
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return is_neox


def record(path: str, text: str, n: int, layer: int | None = None, n_batch: int = 512) -> Rows:
    """Evaluate ``n`` tokens of a text and return the rows of a layer, by default the one in the middle."""
    vocabulary = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    arch = vocabulary.metadata["general.architecture"]
    meta = {name.removeprefix(f"{arch}."): value for name, value in vocabulary.metadata.items()}
    tokens = vocabulary.tokenize(text.encode())[:n]
    if len(tokens) < n:
        raise ValueError(f"the text has {len(tokens)} tokens, not {n}")
    recorder = Recorder(int(meta["block_count"]) // 2 if layer is None else layer)
    is_neox = evaluate(path, tokens, recorder, n_batch)
    n_head, n_head_kv = int(meta["attention.head_count"]), int(meta["attention.head_count_kv"])
    q, k, v = (recorder.array(part, heads) for part, heads in zip("qkv", (n_head, n_head_kv, n_head_kv), strict=True))
    shape = Shape(n_head, n_head_kv, k.shape[2], is_neox, float(meta.get("rope.freq_base", 10000.0)))
    return Rows(shape, k, v, q[-QUERIES:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file, or a name of pylongctx get")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layer", type=int, help="default: the one in the middle")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = record(resolve(args.model), args.text.read_text(), args.tokens, args.layer, args.batch)
    rows.save(args.out)
    print(f"{args.out}: {len(rows.k)} rows of {rows.shape}, {args.out.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
