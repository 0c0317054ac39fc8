"""``pylongctx bench``: llama-bench's tests, options and formats for methods, alternating with other programs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pylongctx._enums import LOAD_MODES
from pylongctx.cli.arguments import Options, int_list, reported
from pylongctx.cli.get import fetched
from pylongctx.cli.options import MODEL, add_methods
from pylongctx.eval.bench import programs, runner
from pylongctx.eval.bench.record import FORMATS, Case, Printer, cases, model_file, pair, physical_cores, wanted
from pylongctx.methods import parse
from pylongctx.models import embedded_model

FLASH_ATTENTION = {"0": 0, "off": 0, "1": 1, "on": 1, "auto": -1, "-1": -1}
DEFAULTS: dict[str, list[Any]] = {
    "n_prompt": [512],
    "n_gen": [128],
    "n_depth": [0],
    "n_batch": [2048],
    "n_ubatch": [512],
    "type_k": ["f16"],
    "type_v": ["f16"],
    "n_gpu_layers": [-1],
    "load_mode": ["auto"],
}
# the settings of a case in the order of the tests: the last one changes fastest
SETTINGS = (
    *("model_filename", "n_gpu_layers", "n_batch", "n_ubatch", "type_k", "type_v"),
    *("n_threads", "n_depth", "load_mode"),
)
EPILOG = """Several values: 1,2 or a repeated option; numbers also first-last, first-last+step and first-last*factor.
KV: bytes held after the test. peak RSS: of the test's process, after its first repetition. TTFT: from an empty context
to the first logits after depth and prompt."""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("bench", description=__doc__, epilog=EPILOG)
    _add_tests(parser)
    add = parser.add_argument
    add("-r", "--repetitions", type=int, default=5, metavar="N", help="repetitions of each test (5)")
    add("--delay", type=float, default=0, metavar="S", help="seconds to wait before each test (0)")
    add("--no-warmup", action="store_true", help="skip the warmup run before the measured ones")
    add("--progress", action="store_true", help="report progress on stderr")
    add("-o", "--output", choices=(*FORMATS, "none"), default="md", help="format on stdout (md)")
    add("-oe", "--output-err", choices=(*FORMATS, "none"), default="none", help="format on stderr (none)")
    add("--vs-stock", action="store_true", help="alternate with llama-bench of unpatched llama.cpp and print ratios")
    add("--stock", metavar="FILE", help=f"its path (default: {programs.STOCK_VARIABLE}, or {programs.STOCK})")
    add(
        "--vs",
        action="append",
        default=[],
        metavar="LABEL=PATH",
        help="alternate with another llama-bench or llama-sweep-bench, optionally with its own arguments: "
        "--vs 'ik=PATH -rtr 1'; may be repeated",
    )
    refused = Options(parser, environment=False)
    refused.refuse("--rpc", reason="bench measures this machine only; Llama(rpc_servers=...) uses other machines")
    refused.refuse("--kv-offload", reason="bench/offload.py measures it; pylongctx inspect and eval support it")
    parser.set_defaults(run=run)


def _add_tests(parser: argparse.ArgumentParser) -> None:
    def add(*names: str, parse: Callable[[str], list[Any]], help: str, metavar: str = "N", **more: Any) -> None:
        parser.add_argument(*names, action="extend", type=reported(parse), help=help, metavar=metavar, **more)

    def words(text: str) -> list[str]:
        return text.split(",")

    add("-m", "--model", parse=words, metavar="FILE", help=MODEL)
    add("-p", "--n-prompt", parse=int_list, help="prompt tokens (512)")
    add("-n", "--n-gen", parse=int_list, help="tokens to generate (128)")
    add("-pg", parse=lambda text: [pair(text)], metavar="N,N", help="prompt tokens, then tokens to generate")
    add("-d", "--n-depth", parse=int_list, help="tokens in the context before the test (0)")
    add("-b", "--batch-size", dest="n_batch", parse=int_list, help="tokens per batch (2048)")
    add("-ub", "--ubatch-size", dest="n_ubatch", parse=int_list, help="tokens per graph (512)")
    add("-ctk", "--cache-type-k", dest="type_k", parse=words, metavar="TYPE", help="type of K in the cache (f16)")
    add("-ctv", "--cache-type-v", dest="type_v", parse=words, metavar="TYPE", help="type of V in the cache (f16)")
    add("-t", "--threads", parse=int_list, help="threads (all cores)")
    help = "layers on the GPU (all, if there is one)"
    add("-ngl", "--n-gpu-layers", parse=lambda text: int_list(text, -1), help=help)
    help = "flash attention of llama.cpp, with --vs-stock (0,1)"
    add("-fa", "--flash-attn", parse=words, metavar="0|1|auto", help=help)
    help = f"how to load the weights: {', '.join(LOAD_MODES)} (auto)"
    add("-lm", "--load-mode", parse=_load_modes, metavar="MODE", help=help)
    add_methods(parser, "may be repeated (LCTX_METHOD, or full)")


def _load_modes(text: str) -> list[str]:
    modes = text.split(",")
    if unknown := set(modes) - LOAD_MODES.keys():
        raise ValueError(f"{min(unknown)!r} is none of {', '.join(LOAD_MODES)}")
    return modes


def run(args: argparse.Namespace) -> int:
    """Run all tests and print their records; returns 1 when a test was refused."""
    plan, chosen = _plan(args), _cases(args)
    printers = _printers(args)
    ratios: list[runner.Ratio] = []
    failed = False
    with ExitStack() as stack:
        for printer in printers:
            printer.start()
            stack.callback(printer.stop)
        for taking_turns in runner.run(plan, chosen):
            for engine in taking_turns:
                failed |= bool(engine.error)
                for printer in printers:
                    printer.add(engine.record())
            ratios += runner.ratios(taking_turns)
    if ratios:
        print(f"\n{runner.ratio_table(ratios, plan.groups)}", file=sys.stdout if args.output == "md" else sys.stderr)
    return int(failed)


def _plan(args: argparse.Namespace) -> runner.BenchPlan:
    if args.repetitions < 1:
        raise ValueError(f"-r must be at least 1, not {args.repetitions}")
    if args.delay < 0:
        raise ValueError(f"--delay must be at least 0, not {args.delay}")
    methods = args.method or [os.environ.get("LCTX_METHOD") or "full"]
    for spec in methods:
        parse(spec)  # fail now, not when its turn comes
    stock = programs.find_stock(args.stock) if args.vs_stock else None
    return runner.BenchPlan(
        methods,
        args.repetitions,
        not args.no_warmup,
        args.delay,
        args.progress,
        stock,
        _flash_attention(args),
        _programs(args.vs),
    )


def _programs(texts: list[str]) -> list[programs.Program]:
    """Return the programs of --vs; two with one name would share a column."""
    found = [programs.program(text) for text in texts]
    labels = [programs.STOCK_GROUP, *(one.label for one in found)]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"--vs: the label {twice[0]!r} is used twice; give each program its own name")
    return found


def _flash_attention(args: argparse.Namespace) -> list[int]:
    """Return llama.cpp's -fa settings, empty when not given; pylongctx's attention has only one form."""
    words = args.flash_attn or []
    if unknown := [word for word in words if word not in FLASH_ATTENTION]:
        raise ValueError(f"-fa takes 0, 1 or auto, not {unknown[0]!r}")
    chosen = [FLASH_ATTENTION[word] for word in words]
    if 0 in chosen and not args.vs_stock:
        raise ValueError(
            "-fa 0: pylongctx's attention is always a flash attention and cannot be turned off; leave "
            "-fa out, or add --vs-stock to choose how llama.cpp runs"
        )
    return chosen


def _cases(args: argparse.Namespace) -> list[Case]:
    given = vars(args) | {
        "model_filename": [model_file(fetched(name)) for name in args.model or [str(embedded_model())]],
        "n_gpu_layers": _gpu_layers(args.n_gpu_layers),
        "n_threads": args.threads or [physical_cores()],
    }
    tests = wanted(args.n_prompt or DEFAULTS["n_prompt"], args.n_gen or DEFAULTS["n_gen"], args.pg or [])
    if not tests:
        raise ValueError("there is no test to run: every -p, -n and -pg is 0")
    return cases(tests, **{name: given[name] or DEFAULTS[name] for name in SETTINGS})


def _gpu_layers(given: list[int] | None) -> list[int]:
    from pylongctx._arguments import has_gpu

    if has_gpu():
        return given or DEFAULTS["n_gpu_layers"]
    if given and any(given):
        raise ValueError(f"-ngl {given[0]}: this build of pylongctx has no GPU backend; leave -ngl out, or use -ngl 0")
    return [0]


def _printers(args: argparse.Namespace) -> list[Printer]:
    options = ("n_batch", "n_ubatch", "type_k", "type_v", "load_mode")
    columns = [name for name in options if getattr(args, name) not in (None, DEFAULTS[name])]
    columns += ["flash_attn"] if args.vs_stock or args.vs else []
    columns += ["n_gpu_layers"] if any(_gpu_layers(args.n_gpu_layers)) else ["n_threads"]
    wanted = ((sys.stdout, args.output), (sys.stderr, args.output_err))
    return [FORMATS[name](file, columns) for file, name in wanted if name != "none"]
