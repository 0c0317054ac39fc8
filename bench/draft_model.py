"""Whether drafts pay: a model of the time of a step, compared with this machine, and predictions for others.

    python bench/draft_model.py --measure random:llama-3-8b:2 --lengths 4096,16384
    python bench/draft_model.py

A step of n tokens after L others reads all weights and the KV cache once, and multiplies both with n tokens. Reading
and multiplying overlap, so the longer of the two counts, for weights and for attention. A draft token reads the
weights, the index and a window for each query head. Measured first: the steps in an empty context, which are the time
of the weights, and the rates of this machine (native/harness). With acceptance p and d drafts, a check gives
1 + p + ... + p^d tokens.
"""

import argparse
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
from geometries import model_file
from report import machine, table

from pylongctx import Llama
from pylongctx.cli.arguments import int_list

OF_ROW, OF_TILE = 0.7, 0.6  # of the bandwidth and of the rate of products, as attention has them: bench/ops.py
INDEX = 1 / 12  # bytes of the index, of those of K and V in f16
P, DRAFTS, WINDOW = 0.96, 4, 2048


@dataclass(frozen=True)
class Machine:
    """Bytes per second; operations per second with weights, and in attention."""

    name: str
    bandwidth: float
    weights: float
    attention: float


@dataclass(frozen=True)
class Model:
    """Weights (numbers and bytes) that a token is multiplied with, and heads."""

    name: str
    n_layer: int
    n_weight: float
    n_byte: float
    n_head: int
    n_head_kv: int
    head_dim: int

    def kv_bytes(self, n_rows: float) -> float:
        """Bytes of K and V in f16."""
        return 4.0 * n_rows * self.n_head_kv * self.head_dim * self.n_layer

    def weights(self, on: Machine, n: int) -> float:
        """Return the seconds of the weights in a step of ``n`` tokens."""
        return max(self.n_byte / on.bandwidth, 2 * self.n_weight * n / on.weights)

    def attention(self, on: Machine, n: int, length: int) -> float:
        """Return the seconds of attention in a step of ``n`` tokens after ``length``."""
        flops = 4.0 * length * self.n_head * self.head_dim * self.n_layer * n
        return max(self.kv_bytes(length) / (OF_ROW * on.bandwidth), flops / (OF_TILE * on.attention))

    def sparse(self, on: Machine, length: int) -> float:
        """Return the seconds of attention of a draft token: the index, and a window of each query head."""
        n_row = min(length, WINDOW * self.n_head // self.n_head_kv)
        n_byte = INDEX * self.kv_bytes(length) + self.kv_bytes(n_row)
        return n_byte / (OF_ROW * on.bandwidth)


def gain(plain: float, check: float, draft: float, n: int, p: float) -> float:
    """Return tokens per second with drafts of ``n`` tokens, as a multiple of those without."""
    return plain * sum(p**i for i in range(n + 1)) / (check + n * draft)


def time_steps(llm: Llama, length: int, numbers: list[int], reads: bool = True) -> list[float]:
    """Return the seconds of a step by its number of tokens, after ``length`` tokens; ``reads``: evaluate these."""
    n_vocab = llm.n_vocab()
    tokens = np.random.default_rng(length).integers(n_vocab // 8, n_vocab, length + max(numbers)).tolist()
    if reads:
        llm.reset()
    if reads and length:
        llm.eval(tokens[:length])
    times: dict[int, list[float]] = {n: [] for n in numbers}
    for _ in range(9):
        for n in numbers:
            start = perf_counter()
            llm.eval(tokens[length : length + n])
            times[n].append(perf_counter() - start)
            llm.n_tokens = length
    return [median(times[n]) for n in numbers]


def llama_8b(n_layer: int) -> Model:
    """Return Llama-3-8B in Q4_K_M with this number of layers; the output matrix is left out, as in random models."""
    weights = n_layer * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    return Model("llama-3-8b", n_layer, weights, weights * 4.85 / 8, 32, 8, 128)


MACHINES = [
    Machine("desktop, 8 cores, 80 GB/s", 80e9, 3.2e12, 0.9e12),
    Machine("laptop, 4 cores, 40 GB/s", 40e9, 1.2e12, 0.35e12),
    Machine("H100", 3.0e12, 400e12, 400e12),
]


def measured_rows(args: argparse.Namespace) -> list[list[str]]:
    """Return rows of measured and predicted milliseconds of steps, and of the gain that follows from them."""
    from native_ops import roofline

    rows, numbers = [], [1, 2, 3, 1 + DRAFTS]
    model, n_ctx = llama_8b(int(args.measure.split(":")[2])), max(args.lengths) + 64
    with Llama(model_file(args.measure), n_ctx=n_ctx, draft=f"longheads,window={WINDOW}", verbose=False) as llm:
        limits = [roofline(llm.n_threads) for _ in range(5)]
        bandwidth, rate = (
            median(values) for values in zip(*((x.read_bandwidth, x.gemm_f32) for x in limits), strict=True)
        )
        here = Machine("here", bandwidth, 0.0, rate)
        print(f"{machine()}; read {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s in f32\n")
        empty = time_steps(llm, 0, numbers)
        for length in args.lengths:
            found = time_steps(llm, length, numbers)
            want = [weights + model.attention(here, n, length) for weights, n in zip(empty, numbers, strict=True)]
            llm.session.context.select_from(length)
            found += time_steps(llm, length, [1], reads=False)
            llm.session.context.select_from()
            want.append(empty[0] + model.sparse(here, length))
            names = [*map(str, numbers), "draft"]
            rows += [row(length, name, 1e3 * x, 1e3 * y) for name, x, y in zip(names, found, want, strict=True)]
            gains = [gain(x[0], x[-2], x[-1], DRAFTS, args.acceptance) for x in (found, want)]
            rows.append(row(length, f"gain of {DRAFTS} drafts", *gains))
    return rows


def row(length: int, name: str, measured: float, predicted: float) -> list[str]:
    """Return cells with the ratio of both."""
    return [str(length), name, f"{measured:.2f}", f"{predicted:.2f}", f"{predicted / measured:.2f}"]


def predicted_rows(p: float) -> list[list[str]]:
    """Return rows of the gain of drafts by machine and length."""
    model, rows = llama_8b(32), []
    for on in MACHINES:
        cells = []
        for length in (8192, 32768, 131072):
            steps = {n: model.weights(on, n) + model.attention(on, n, length) for n in range(1, 10)}
            draft = model.weights(on, 1) + model.sparse(on, length)
            gains = {n: gain(steps[1], steps[1 + n], draft, n, p) for n in range(1, 9)}
            best = max(gains, key=gains.__getitem__)
            cells.append(f"{gains[best]:.2f} ({best})" if gains[best] > 1.02 else "off")
        rows.append([on.name, *cells])
    return rows


def main() -> None:
    """Print what was measured, or the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", help="random:llama-3-8b:LAYERS, to compare the model with this machine")
    parser.add_argument("--lengths", type=int_list, default="4096,16384")
    parser.add_argument("--acceptance", type=float, default=P)
    args = parser.parse_args()
    if args.measure:
        print(table(["length", "tokens of a step", "measured, ms", "predicted, ms", "ratio"], measured_rows(args)))
    else:
        print(f"predicted, not measured; 8B in Q4_K_M, K and V in f16, acceptance {args.acceptance}; gain (drafts)\n")
        print(table(["machine", "8192", "32768", "131072"], predicted_rows(args.acceptance)))


if __name__ == "__main__":
    main()
