"""Compare methods on one task: how often each finds a pass key in a text of some length.

    python examples/compare_methods.py qwen2.5-coder-1.5b --method full --method longheads --length 16384
pylongctx eval passkey does the same with more options, and pylongctx matrix with more tasks.
"""

import argparse

from rich.console import Console
from rich.table import Table

from pylongctx.eval.passkey import Passkey
from pylongctx.eval.runner import Cell, run

METHODS = ["full", "longheads", "selfextend", "window"]


def main() -> None:
    """Measure every method and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="GGUF file, or a name of pylongctx get")
    parser.add_argument("--method", action="append", help=f"may be repeated (default: {', '.join(METHODS)})")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt (default: 4096)")
    parser.add_argument("--tests", type=int, default=3, help="prompts for each method (default: 3)")
    args = parser.parse_args()

    task = Passkey(tests=args.tests)
    table = Table(title=f"pass keys in {args.length} tokens")
    for head in ("method", "found", "KV memory, MiB", "seconds for a prompt"):
        table.add_column(head, justify="left" if head == "method" else "right")
    for method in args.method or METHODS:
        records = list(run(Cell(args.model, method, task, args.length)))
        found = sum(record["strict"] for record in records)
        memory = max(record["kv_peak_bytes"] for record in records) / 2**20
        seconds = sum(record["seconds"] for record in records) / len(records)
        table.add_row(method, f"{found} of {len(records)}", f"{memory:.1f}", f"{seconds:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
