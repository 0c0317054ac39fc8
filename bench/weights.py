"""Products of quantized weights with the tokens of a prompt: the rate of each type.

    python bench/weights.py --rows 4096 --width 4096 --tokens 1,4,16,512

Weights are random bytes. A token alone is bound by memory, so its column has GB/s of weights; the others have
operations per second (a product and a sum are two).
"""

import argparse

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from op_harness import call, ffi, lib
from report import machine, table

from pylongctx._free import available_cpus
from pylongctx.cli.arguments import int_list

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--types", type=lambda text: text.split(","), default=TYPES, help="of the weights")
    add("--rows", type=int, default=4096, help="of a weight")
    add("--width", type=int, default=4096, help="values of a row")
    add("--tokens", type=int_list, default=[1, 4, 16, 64, 512], help="columns of a product")
    add("--threads", type=int, default=available_cpus())
    add("--repeat", type=int, default=20)
    return parser.parse_args()


def microseconds(name: str, n_tokens: int, args: argparse.Namespace) -> tuple[float, int]:
    """Return the shortest time of a product, and the bytes of the weight."""
    rng = np.random.default_rng(0)
    n, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    weight = rng.integers(0, 32, (args.rows, args.width // n * size), dtype=np.uint8)  # halves are small numbers
    x = rng.standard_normal((n_tokens, args.width), dtype=np.float32)
    out = np.empty((n_tokens, args.rows), np.float32)
    run = ffi.new("lctx_multiply_args *")
    run.type, run.k_dim, run.n_rows, run.n_columns = GGMLQuantizationType[name], args.width, args.rows, n_tokens
    run.n_threads, run.n_repeat = args.threads, args.repeat
    run.weight, run.x = ffi.from_buffer(weight), ffi.from_buffer("float[]", x)
    run.out = ffi.from_buffer("float[]", out)
    call(lib.lctx_multiply_run, run)
    return run.us, weight.nbytes


def main() -> None:
    args = arguments()
    rows = []
    for name in args.types:
        cells = []
        for n_tokens in args.tokens:
            us, n_bytes = microseconds(name, n_tokens, args)
            rate = 2 * args.rows * args.width * n_tokens / us * 1e6
            cells.append(f"{n_bytes / us / 1e3:.1f} GB/s" if n_tokens == 1 else f"{rate / 1e9:.0f} GOP/s")
        rows.append([name, *cells])
    print(machine(), f"{args.threads} threads", sep="\n", end="\n\n")
    print(table(["type", *(f"{n} tokens" if n > 1 else "1 token" for n in args.tokens)], rows))


if __name__ == "__main__":
    main()
