"""What a tile of *attend* computes on a GPU for each pair (query, chunk) that is read, by the columns it has.

    python bench/tiles.py --text emma.txt --group 2,4,8

The last tokens of a text are traced on the CPU, and their choices are dealt to tiles. A group is query heads that
share K and V; a larger one than the model has stands for a model that has it.
"""

import argparse
from pathlib import Path

import numpy as np
from geometries import model_file
from report import table

from pylongctx import Llama
from pylongctx.cli.arguments import int_list
from pylongctx.eval.haystack import SENTENCES
from pylongctx.models import embedded_model

COLUMNS, WARP_COLUMNS = 64, 16  # of a tile, of a warp (native/cuda/blocks.h)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(embedded_model()), help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--method", default="longheads")
    add("--text", type=Path, help="a novel, for instance; default: the sentences of the pass-key test")
    add("--tokens", type=int, default=8192)
    add("--ubatch", type=int, default=512, help="the last tokens, whose choices are counted")
    add("--group", type=int_list, default="2,4,8")
    return parser.parse_args()


def choices(args: argparse.Namespace) -> np.ndarray:
    """Return which chunks the last tokens read, bool [n_token, n_layer, n_head, n_chunk]."""
    with Llama(model_file(args.model), method=args.method, n_ctx=args.tokens, verbose=False) as llm:
        text = args.text.read_text() if args.text else SENTENCES
        tokens = llm.tokenize((text * (8 * args.tokens // len(text) + 1)).encode())[: args.tokens]
        llm.eval(tokens[: -args.ubatch])
        with llm.trace() as trace:
            llm.eval(tokens[-args.ubatch :])
        read = np.zeros((*trace.chunks.shape[:3], trace.n_chunks + 1), bool)
        np.put_along_axis(read, trace.chunks, True, axis=3)  # -1: the last one, which is none
    return read[..., :-1]


def count(read: np.ndarray, n_head: int, by_token: bool) -> list[str]:
    """Return spans, and pairs per pair that is read by whole tiles and by warps, for tiles of ``n_head`` heads."""
    n_token, spans, of_warps = COLUMNS // n_head, 0, 0
    n_layer, n_heads = read.shape[1:3]
    for layer, head, token in np.ndindex(n_layer, n_heads // n_head, len(read) // n_token):
        tile = read[token * n_token :][:n_token, layer, head * n_head :][:, :n_head]
        columns = (tile if by_token else tile.swapaxes(0, 1)).reshape(COLUMNS, -1)
        spans += columns.any(0).sum()
        of_warps += columns.reshape(-1, WARP_COLUMNS, columns.shape[1]).any(1).sum()
    needed = read.sum()
    return [str(spans), f"{spans * COLUMNS / needed:.1f}", f"{of_warps * WARP_COLUMNS / needed:.1f}"]


def main() -> None:
    args = arguments()
    read = choices(args)
    rows = []
    for group in args.group:
        rows += [
            [str(group), "all, by token", *count(read, group, True)],
            [str(group), "all, by head", *count(read, group, False)],
        ]
    rows.append(["any", "one", *count(read, 1, True)])
    print(f"{Path(args.model).name}; {args.method}; the last {args.ubatch} of {args.tokens} tokens\n")
    print(table(["group", "heads of a tile", "chunks that tiles read", "computed by tiles", "by warps"], rows))


if __name__ == "__main__":
    main()
