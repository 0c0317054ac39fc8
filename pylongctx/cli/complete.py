"""``pylongctx complete``: the continuation of a text, for scripts."""

import argparse
import json
import sys
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pylongctx.cli.arguments import Options, integer
from pylongctx.cli.console import Meter, Output
from pylongctx.cli.generation import add_sampling_options, add_text_options, given_text, sampling_arguments, unescaped
from pylongctx.cli.options import add_llama_options, name_of, open_llama

if TYPE_CHECKING:
    from pylongctx.llama import Llama


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("complete", description=__doc__, allow_abbrev=False)
    add_text_options(parser, "text (default: standard input)")
    options = Options(parser, "output")
    options.switch("--json", help="print one JSON object: OpenAI's completion, timings, KV memory")
    echo, off = ("--echo", "--display-prompt"), ("--no-display-prompt",)
    options.switch(*echo, off=off, help="print the text before its continuation (off)", dest="echo")
    options.add("--logprobs", parse=integer, help="with --json: log-probabilities, with the N most likely tokens")
    options.several("--stop", metavar="TEXT", help="same as --reverse-prompt")
    add_llama_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the continuation as a stream or as JSON."""
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs needs --json: plain text cannot show them")
    output = Output(None)
    text, arguments = _text(args), sampling_arguments(args)
    arguments["stop"] = [*arguments.get("stop", []), *(unescaped(args, stop) for stop in args.stop or [])]
    meter = Meter(output.notes)
    with open_llama(args, meter) as llm:
        if args.alias:
            arguments["model"] = args.alias
        try:
            write = _write_json if args.json else _write_text
            write(llm, output, text, echo=bool(args.echo), logprobs=args.logprobs, **arguments)
        finally:
            meter.close()
    return 0


def _text(args: argparse.Namespace) -> str:
    """Return the text to continue."""
    text = given_text(args, "prompt", "file")
    if text is not None:
        return text
    if sys.stdin.isatty():
        raise ValueError("there is no text to continue: give -p TEXT or -f FILE, or pipe it in")
    from pylongctx.readers.files import text_of, without_notes

    return without_notes(text_of(sys.stdin.buffer.read().removesuffix(b"\n"), "standard input", markup=True))


def _write_text(llm: "Llama", output: Output, text: str, **arguments: Any) -> None:
    try:
        for chunk in llm.create_completion(text, stream=True, **arguments):
            output.write(chunk["choices"][0]["text"])
    finally:
        output.write("\n")


def _write_json(llm: "Llama", output: Output, text: str, **arguments: Any) -> None:
    start = perf_counter()
    read: list[float] = []  # time of the first token

    def look(ids: Any, logits: Any) -> bool:
        read.extend([] if read else [perf_counter()])
        return False

    done = llm.create_completion(text, stopping_criteria=look, **arguments)
    seconds = (read[0] - start, perf_counter() - read[0])
    more = {"timings": _timings(done["usage"], *seconds), "method": name_of(llm.method), "kv": _kv(llm)}
    print(json.dumps(done | more))


def _kv(llm: "Llama") -> dict[str, int] | None:
    """Return the KV memory; None with llama.cpp's own KV cache, which does not report it."""
    if llm.method is None:
        return None
    usage = llm.kv_usage()
    return usage.sizes()


def _timings(usage: Mapping[str, int], prompt: float, answer: float) -> dict[str, float]:
    """Return timings in llama-server's form."""

    def numbers(name: str, n: int, seconds: float) -> dict[str, float]:
        return {f"{name}_n": n, f"{name}_ms": 1e3 * seconds, f"{name}_per_second": n / seconds}

    return numbers("prompt", usage["prompt_tokens"], prompt) | numbers("predicted", usage["completion_tokens"], answer)
