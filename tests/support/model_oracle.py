"""A forward pass of a llama or qwen2 GGUF in numpy, with any method; see ``oracle.py`` for the attention."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
import oracle
from oracle_chunks import LongHeads, attend_longheads
from oracle_evict import Evicting, Layer, Run

Method = oracle.Method | LongHeads | Evicting


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Scale each row to root mean square 1, then by ``weight``."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def read_gguf(path: Path | str) -> tuple[dict, dict[str, np.ndarray]]:
    """Return metadata (without the architecture prefix) and dequantized tensors of a GGUF file."""
    reader = gguf.GGUFReader(str(path))
    fields = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("tokenizer.")}
    arch = fields["general.architecture"]
    meta = {name.removeprefix(f"{arch}."): value for name, value in fields.items()} | {"arch": arch}
    return meta, {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}


def rope_of(meta: dict, tensors: dict[str, np.ndarray]) -> oracle.Rope:
    """Return the RoPE that llama.cpp sets up for this file."""
    factors = tensors.get("rope_freqs.weight")
    return oracle.Rope(
        n_dims=meta.get("rope.dimension_count", meta["embedding_length"] // meta["attention.head_count"]),
        mode=oracle.NEOX if meta["arch"] == "qwen2" else oracle.NORM,
        freq_base=meta.get("rope.freq_base", 10000.0),
        freq_scale=1 / meta.get("rope.scaling.factor", 1.0),
        ext_factor=float(meta.get("rope.scaling.type") == "yarn"),
        n_ctx_orig=meta.get("rope.scaling.original_context_length", meta["context_length"]),
        freq_factors=factors,
    )


@dataclass(frozen=True)
class Model:
    """Weights and shape of one model; ``rope`` may be replaced to follow context parameters."""

    meta: dict
    tensors: dict[str, np.ndarray]
    rope: oracle.Rope

    @classmethod
    def load(cls, path: Path | str, **rope: float) -> "Model":
        """Read ``path``; keyword arguments override fields of its RoPE."""
        meta, tensors = read_gguf(path)
        return cls(meta, tensors, replace(rope_of(meta, tensors), **rope))

    def logits(self, tokens: list[int], method: Method) -> np.ndarray:
        """Return the logits ``[n_tokens, n_vocab]`` after every token."""
        x = self.tensors["token_embd.weight"][tokens]
        for i in range(self.meta["block_count"]):
            x = x + self.attention(self.norm(x, f"blk.{i}.attn_norm"), i, method)
            x = x + self.feed_forward(self.norm(x, f"blk.{i}.ffn_norm"), i)
        output = "output" if "output.weight" in self.tensors else "token_embd"
        return self.linear(self.norm(x, "output_norm"), output)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.meta["attention.layer_norm_rms_epsilon"])

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def feed_forward(self, x: np.ndarray, i: int) -> np.ndarray:
        gate, up = self.linear(x, f"blk.{i}.ffn_gate"), self.linear(x, f"blk.{i}.ffn_up")
        return self.linear(silu(gate) * up, f"blk.{i}.ffn_down")

    def attention(self, x: np.ndarray, i: int, method: Method) -> np.ndarray:
        n_head = self.meta["attention.head_count"]
        n_head_kv = self.meta.get("attention.head_count_kv", n_head)
        q, k, v = (self.linear(x, f"blk.{i}.attn_{part}").reshape(len(x), heads, -1)
                   for part, heads in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv)))  # fmt: skip
        scale = q.shape[-1] ** -0.5
        if isinstance(method, Evicting):
            out = self.evict(Layer(q, k, v, method, self.rope, scale)).out
        elif isinstance(method, LongHeads):
            center = self.key_center(i, n_head_kv) if method.position == "full" else None
            out, _ = attend_longheads(q, k, v, method, self.rope, scale, center)
        else:
            out = np.array([oracle.attend_method(q[p], k, v, p, method, self.rope, scale) for p in range(len(x))])
        return self.linear(out.reshape(len(x), -1), f"blk.{i}.attn_output")

    def key_center(self, i: int, n_head_kv: int) -> np.ndarray | None:
        """Return the mean of the rotated bias of keys over positions, ``[n_head_kv, head_dim]``; None without one."""
        bias = self.tensors.get(f"blk.{i}.attn_k.bias")
        if bias is None:
            return None
        at, heads = np.arange(0, 8192, 8)[:, None], bias.reshape(n_head_kv, -1)
        return oracle.rotate(np.broadcast_to(heads, (len(at), *heads.shape)), at, self.rope).mean(0)

    def evict(self, layer: Layer) -> Run:
        """Run a layer whose heads drop rows; its rows are stored as ``f32``."""
        return layer.run()


@dataclass(frozen=True)
class WatchedModel(Model):
    """A model that writes down what its layers evict: ``runs`` has one entry per layer and call of ``logits``."""

    margin: float = 0.0
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def watch(cls, model: Model, margin: float = 0.0) -> "WatchedModel":
        """Return the same model; decisions that a change of ``margin`` in a score would turn count as doubts."""
        return cls(model.meta, model.tensors, model.rope, margin)

    def evict(self, layer: Layer) -> Run:
        self.runs.append(layer.run(margin=self.margin))
        return self.runs[-1]

    @property
    def held(self) -> np.ndarray:
        """Return how many rows each layer and KV head holds, ``[n_layer, n_head_kv]``; an eviction is still due."""
        return np.array([run.before.sum(1) for run in self.runs])

    @property
    def doubts(self) -> list[int]:
        """Return the positions after which some layer's decision was not certain."""
        return sorted(p for run in self.runs for p in run.doubts)
