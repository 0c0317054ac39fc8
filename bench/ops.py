"""One layer's attention, op by op, compared with ggml_flash_attn_ext at the same shape and with the machine's limits.

    python bench/ops.py --shape llama-3-8b --kv f16,q8_0 --depth 32768

Rows are random. Ours and ggml_flash_attn_ext take turns (A B A B) in one process, on llama.cpp's own layout of the KV
cache for the latter. Before every repeat all threads read four times the last-level cache: in a model, the other
layers do that. Bytes are those that an op must touch, each once.
"""

import argparse
import sys
from dataclasses import replace
from statistics import median

from native_ops import OPS, SHAPES, Roofline, Rows, Run, Step, flash, roofline, step
from report import machine, spread, table

from pylongctx._free import available_cpus

N_PREFILL = 512
PERIOD = 256  # rows between two evictions; chunks divide it
ROUNDED = ("bf16", "q8_0", "q4_0")  # whose products have factors of 8 bits
LONGHEADS = "longheads,window=4096"
CORM = f"corm,window={PERIOD},recent={PERIOD},evict_every={PERIOD}"
METHODS = {
    "longheads": LONGHEADS,
    "selfextend": "selfextend",
    "corm": CORM,
    "longheads+corm": f"{LONGHEADS}+{CORM}",
}
PROMPTS = {"a tile": "", "a token": ",tile=1"}  # options of what chooses in a prompt
DECODE = ["op", "shape", "KV", "us", "flash_attn_ext us", "ratio", "MB", "GB/s", "of bandwidth"]
TOKENS = ["op", "shape", "KV", "tokens", "us", "of one token", "GFLOP/s", "bound, us", "of bound"]
PREFILL = ["op", "shape", "KV", "ms", "flash_attn_ext ms", "ratio", "GFLOP/s", "of f32", "of bf16", "flash GFLOP/s"]
PROMPT = ["what chooses", "shape", "KV", "index, ms", "select, ms", "attend, ms", "GFLOP/s", "of f32", "times as fast"]
BY_METHOD = ["method", "shape", "KV", "op", "a token, us", "at a border, us", "per token, us", "MB", "GB/s", "ratio"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", action="append", choices=list(SHAPES), help="may be repeated (default: all)")
    add("--kv", default="f16,q8_0,q4_0,bf16", help="types of K and V")
    add("--depth", type=int, default=32768, help=f"rows that are there, a multiple of {PERIOD}")
    add(
        "--section",
        action="append",
        choices=["decode", "tokens", "prefill", "prompt", "methods"],
        help="may be repeated (default: all)",
    )
    add("--method", action="append", choices=list(METHODS), help="may be repeated (default: all)")
    add("--tokens", default="1,2,3,5,9", help="section tokens: tokens of a draft that are verified together")
    add("--n-ctx-train", type=int, default=8192)
    add("--held", type=float, default=0.3, help="corm: share of the rows that a head still holds")
    add("--open", type=float, default=0.1, help="corm: share of these that no query of the interval has voted for yet")
    add("--rounds", type=int, default=3, help="turns of each side")
    add("--repeats", type=int, default=5, help="per turn; prefill has one")
    add("--threads", type=int, default=available_cpus())
    args = parser.parse_args()
    if args.depth < 2 * PERIOD or args.depth % PERIOD:
        parser.error(f"--depth must be a multiple of {PERIOD}, {2 * PERIOD} at least")
    if args.rounds < 1 or args.repeats < 1:
        parser.error("--rounds and --repeats must be positive")
    return args


class Bench:
    """The measurements of one shape and KV type."""

    def __init__(self, args: argparse.Namespace, name: str, rows: Rows, kv: str, limits: Roofline):
        self.args, self.name, self.rows, self.kv, self.limits = args, name, rows, kv, limits

    def run(self, n_rows: int, n_tokens: int = 1, n_repeat: int | None = None) -> Run:
        return Run(self.kv, n_rows, n_tokens, self.args.threads, n_repeat or self.args.repeats)

    def step(self, run: Run, method: str) -> Step:
        return step(self.rows, run, method, self.args.n_ctx_train, self.args.held, self.args.open)

    def turns(self, run: Run) -> tuple[Step, list[float]]:
        """Return a step of ``full`` and the times of flash attention, which have taken turns."""
        ours, theirs = [], []
        for _ in range(self.args.rounds):
            ours.append(self.step(run, "full"))
            theirs += flash(self.rows, run).times
        times = {op: [us for s in ours for us in s.times[op]] for op in ours[0].times}
        return replace(ours[0], times=times), theirs

    def decode(self) -> list[list[str]]:
        full, peer = self.turns(self.run(self.args.depth))
        return [["attend", self.name, self.kv, spread(full.times["attend"]), spread(peer),
                 ratio(median(peer), median(full.times["attend"])), *self.memory(full)]]  # fmt: skip

    def tokens(self) -> list[list[str]]:
        """Return a row per number of tokens; they have taken turns, and their best times count."""
        numbers = [int(n) for n in self.args.tokens.split(",")]
        steps = [[self.step(self.run(self.args.depth, n), "full") for n in numbers] for _ in range(self.args.rounds)]
        best = [min(min(one.times["attend"]) for one in turns) for turns in zip(*steps, strict=True)]
        self.limits = self.limits.best(roofline(self.args.threads))  # a host that is shared may have been busy before
        return [self.of_tokens(n, us, best[0], one) for n, us, one in zip(numbers, best, steps[0], strict=True)]

    def of_tokens(self, n: int, us: float, first: float, step: Step) -> list[str]:
        """Return the row of ``n`` tokens, with the bound that bandwidth and matrix products set."""
        bytes_, flops = step.attend_bytes, step.attend_flops
        rate = self.limits.gemm_bf16 if self.kv in ROUNDED and n > 1 else self.limits.gemm_f32
        bound = 1e6 * max(bytes_ / self.limits.read_bandwidth, flops / (rate or self.limits.gemm_f32))
        return ["attend", self.name, self.kv, str(n), f"{us:.0f}", ratio(us, first), f"{flops / us / 1e3:.0f}",
                f"{bound:.0f}", share(bound, us)]  # fmt: skip

    def prefill(self) -> list[list[str]]:
        full, peer = self.turns(self.run(self.args.depth + N_PREFILL, N_PREFILL, 1))
        ms, peer_ms = ([us / 1e3 for us in times] for times in (full.times["attend"], peer))
        rate, peer_rate = (full.attend_flops / median(times) * 1e3 for times in (ms, peer_ms))
        cells = [ratio(median(peer_ms), median(ms)), f"{rate / 1e9:.1f}", share(rate, self.limits.gemm_f32),
                 share(rate, self.limits.gemm_bf16), f"{peer_rate / 1e9:.1f}"]  # fmt: skip
        return [["attend", self.name, self.kv, spread(ms), spread(peer_ms), *cells]]

    def prompt(self) -> list[list[str]]:
        """Return what choosing and reading take for a prompt: by tiles, by token, and reading everything."""
        names = {"full": "full", **{name: METHODS["longheads"] + more for name, more in PROMPTS.items()}}
        run = self.run(self.args.depth + N_PREFILL, N_PREFILL, 1)
        turns = {name: [self.step(run, method) for _ in range(self.args.rounds)] for name, method in names.items()}
        ms = {name: {op: min(step.times[op][0] for step in steps) / 1e3 for op in OPS} for name, steps in turns.items()}
        whole = {name: sum(of_op.values()) for name, of_op in ms.items()}
        rows = []
        for name, steps in turns.items():
            rate = steps[0].attend_flops / ms[name]["attend"] * 1e3
            times = [f"{ms[name][op]:.1f}" for op in ("summarize", "select", "attend")]
            cells = [f"{rate / 1e9:.1f}", share(rate, self.limits.gemm_f32), ratio(whole["full"], whole[name])]
            rows.append([name, self.name, self.kv, *times, *cells])
        return rows

    def methods(self) -> list[list[str]]:
        out, peer = [], []
        for method in self.args.method or METHODS:
            usual = self.step(self.run(self.args.depth - PERIOD // 2), METHODS[method])
            border = self.step(self.run(self.args.depth), METHODS[method])
            peer += flash(self.rows, self.run(self.args.depth)).times
            out.append((method, usual, border))
        return [row for method, usual, border in out for row in self.by_op(method, usual, border, median(peer))]

    def by_op(self, method: str, usual: Step, border: Step, peer: float) -> list[list[str]]:
        """Return a row per sub-op, then their sum; one token in PERIOD is at a border."""
        rows, total = [], 0.0
        label = [f"{method} ({usual.n_held} rows)", self.name, self.kv]
        for op in usual.times:
            us, at_border = median(usual.times[op]), median(border.times[op])
            if us == at_border == 0:
                continue
            per_token = (us * (PERIOD - 1) + at_border) / PERIOD
            total += per_token
            memory = self.memory(usual)[:2] if op == "attend" else ["", ""]
            rows.append([*label, op, f"{us:.1f}", f"{at_border:.1f}", f"{per_token:.1f}", *memory, ""])
        rows.append([*label, "sum", "", "", f"{total:.1f}", "", "", f"{ratio(peer, total)} (flash {peer:.0f})"])
        return rows

    def memory(self, step: Step) -> list[str]:
        """Return the cells MB, GB/s and share of the read bandwidth of *attend*."""
        rate = step.attend_bytes / (median(step.times["attend"]) * 1e-6)
        return [f"{step.attend_bytes / 1e6:.2f}", f"{rate / 1e9:.1f}", share(rate, self.limits.read_bandwidth)]


def ratio(peer: float, ours: float) -> str:
    return f"{peer / ours:.2f}"


def share(rate: float, limit: float) -> str:
    return f"{100 * rate / limit:.0f} %" if limit else "-"


def first_line(args: argparse.Namespace, limits: Roofline) -> str:
    return (f"{machine()}; {args.threads} threads; depth {args.depth}; "
            f"{4 * limits.cache_bytes >> 20} MiB read before every repeat; median (min - max)")  # fmt: skip


def measured(limits: Roofline) -> str:
    bf16 = f"{limits.gemm_bf16 / 1e9:.0f} in bf16" if limits.gemm_bf16 else "no bf16 product"
    return f"read {limits.read_bandwidth / 1e9:.1f} GB/s, GEMM {limits.gemm_f32 / 1e9:.0f} GFLOP/s in f32, {bf16}"


def section_rows(
    args: argparse.Namespace, section: str, limits: Roofline
) -> tuple[list[list[str]], list[str], Roofline]:
    """Return the rows of one table, what was refused, and the best limits seen."""
    lines, refused = [], []
    for name in args.shape or SHAPES:
        rows = Rows.random(SHAPES[name], args.depth + N_PREFILL, N_PREFILL)
        limits = limits.best(roofline(args.threads))
        for kv in args.kv.split(","):
            print(f"{section}: {name} {kv}", file=sys.stderr)
            try:
                lines += getattr(Bench(args, name, rows, kv, limits), section)()
            except ValueError as reason:
                refused.append(f"{name}, {kv}: refused, {reason}")
    return lines, refused, limits


def main() -> None:
    args = arguments()
    limits = roofline(args.threads)
    print(first_line(args, limits), flush=True)
    heads = {"decode": DECODE, "tokens": TOKENS, "prefill": PREFILL, "prompt": PROMPT, "methods": BY_METHOD}
    for section in args.section or heads:
        lines, refused, limits = section_rows(args, section, limits)
        title = f"{section}; measured in this run: {measured(limits)}"
        print(
            "\n".join(["", title, "", table(heads[section], lines), *([""] if refused else []), *refused]), flush=True
        )


if __name__ == "__main__":
    main()
