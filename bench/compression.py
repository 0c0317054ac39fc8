"""Facts that a model finds after its cache was compressed, by rule and by the fraction of the KV entries that is left.

Ten numbers are hidden in the beginning of each text and asked for, one after the other. ``kvzip`` compresses the text
before the questions are known, ``snapkv`` text and question together; the rules with a budget evict during prefill.
Prints a table, and writes a picture of it:

    python bench/compression.py --model smollm2.gguf --text emma.txt --text karenina.txt --picture compression.svg
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pylongctx.eval.intervals import mean_interval
from pylongctx.eval.recall import Recall
from pylongctx.eval.runner import Cell, run

RATIOS = (0.5, 0.25, 0.1, 0.05)
WHOLE = ("full", "full in q4_0")
ON_REQUEST = ("kvzip", "kvzip in q4_0", "kvzip,replay=text", "snapkv", "snapkv in q4_0")
BUDGETS = ("h2o", "scissorhands", "tova")


def cells(args: argparse.Namespace) -> Iterator[tuple[str, float, Cell]]:
    """Yield the cells of the table with their rules and fractions."""
    texts = tuple(args.text)
    for rule in args.rule or (*WHOLE, *ON_REQUEST, *BUDGETS):
        method, _, kv = rule.partition(" in ")
        types = {"type_k": kv or "f16", "type_v": kv or "f16"}
        for ratio in (1.0,) if rule in WHOLE else RATIOS:
            budget = f",budget={int(ratio * args.length)}" if rule in BUDGETS else ""
            compress = ratio if rule in ON_REQUEST else 1.0
            task = Recall(tests=len(texts), questions=args.questions, haystack=texts, compress=compress)
            yield rule, ratio, Cell(args.model, method + budget, task, args.length, args.seed, **types)


def measured(cell: Cell) -> tuple[list[float], float]:
    """Return whether each fact was found, and the share of the bytes of a full cache in f16."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[cell.type_k.upper()]]
    of_f16 = size / (2 * block)
    records = list(run(cell))
    found = [float(turn["right"]) for record in records for turn in record["turns"]]
    return found, of_f16 * sum(record["kv_bytes"] / record["kv_full_bytes"] for record in records) / len(records)


def draw(path: Path, points: dict[str, list[tuple[float, float]]], title: str) -> None:
    """Draw the scores over the bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for rule, line in points.items():
        axes.plot(*zip(*sorted(line), strict=True), marker="o", label=rule, linestyle="" if len(line) == 1 else "-")
    axes.set(xlabel="KV memory, % of a full cache", ylabel="facts found, %", title=title, ylim=(-2, 102))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", action="append", required=True, help="a text file; may be repeated")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--rule", action="append", help="only this row; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    points: dict[str, list[tuple[float, float]]] = {}
    print("| rule | entries kept | KV memory | facts found |\n|---|---:|---:|---:|")
    for rule, ratio, cell in cells(args):
        found, memory = measured(cell)
        score = mean_interval([100 * one for one in found])
        shown = f"{score.mean:.0f} % [{score.low:.0f}, {score.high:.0f}]"
        print(f"| `{rule}` | {ratio:.0%} | {memory:.0%} | {shown} |", flush=True)
        points.setdefault(rule, []).append((100 * memory, score.mean))
    if args.picture:
        draw(args.picture, points, f"{Path(args.model).stem}, {args.length} tokens")


if __name__ == "__main__":
    main()
