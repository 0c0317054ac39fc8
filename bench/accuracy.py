"""Pass keys found, perplexity and KV memory of many settings: the tables that defaults were chosen from.

    python bench/accuracy.py emma.txt --lengths 8192,32768 --tests 50 --method longheads --method full@ntk

Every setting and length is a job on one thread; the prompts are those of ``pylongctx eval passkey``. "cut": of the keys
whose sentences a chunk border cuts. Perplexity: of the last 256 tokens of passages that end at the same places.
A method may name a RoPE scaling: ``@ntk``, ``@pi`` and ``@yarn`` stretch the trained context to the length, ``@pi4``
stretches it 4 times. KV: bytes held at the end of the last passage (or prompt), of what a full cache holds.
"""

import argparse
import json
import re
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
from report import machine, table

from pylongctx._free import available_cpus
from pylongctx.cli.arguments import int_list

PARTS = (
    ["chunk_size=16", "chunk_size=32"],
    ["minmax", "outlier", "keys1", "keys2"],
    ["dca", "selfextend"],
    ["head", "group"],
)
COMBINATIONS = [f"longheads,{c},representation={r},position={p},select={s}" for c, r, p, s in product(*PARTS)]
COMBINATIONS += [f"longheads,{c},representation=attention" for c in PARTS[0]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", type=Path, help="plain text: a haystack, and the text whose perplexity is measured")
    add("--model", help="GGUF file; default: the embedded model")
    add("--lengths", type=int_list, default="4096,32768")
    add("--tests", type=int, default=50, help="pass keys per setting, length and haystack")
    add("--haystacks", default="sentences,novel")
    add("--passages", type=int, default=3, help="0: no perplexity")
    add("--method", action="append", help="may be repeated; default: all combinations of LongHeads' parts")
    add("--jobs", type=int, default=available_cpus())
    add("--json", type=Path, help="results; jobs found there are not run again")
    return parser.parse_args()


def scaling(model: str, name: str, length: int) -> dict:
    """Return the arguments of Llama for a RoPE scaling such as ``ntk`` or ``pi4``."""
    from pylongctx import Llama

    kind, factor = re.fullmatch(r"([a-z]*)([\d.]*)", name).groups()
    with Llama(model, vocab_only=True, verbose=False) as llm:
        arch = llm.metadata["general.architecture"]
        base, n_dims, trained = (
            float(llm.metadata[f"{arch}.{key}"]) for key in ("rope.freq_base", "rope.dimension_count", "context_length")
        )
    stretch = max(1.0, float(factor) if factor else length / trained)
    return {
        "": {},
        "ntk": {"rope_freq_base": base * stretch ** (n_dims / (n_dims - 2))},
        "pi": {"rope_freq_scale": 1 / stretch},
        "yarn": {"rope_scaling_type": 2, "rope_freq_scale": 1 / stretch, "yarn_orig_ctx": int(trained)},
    }[kind]


def passages(tokens: list[int], longest: int, n: int) -> list[list[int]]:
    """Return ``n`` evenly spread passages of the longest length; shorter ones are their ends."""
    if len(tokens) < longest:
        raise SystemExit(f"the text has {len(tokens)} tokens, the longest passage needs {longest}")
    starts = np.linspace(0, len(tokens) - longest, n).astype(int)
    return [tokens[start : start + longest] for start in starts]


def measure(job: dict) -> dict:
    """Run one setting at one length; the result holds the job."""
    from pylongctx import Llama
    from pylongctx.eval.haystack import load_haystack
    from pylongctx.eval.passkey import make_prompt, run_trial
    from pylongctx.eval.perplexity import mean_nll
    from pylongctx.models import embedded_model

    length, result, model = job["length"], dict(job), job["model"] or str(embedded_model())
    method, _, rope = job["method"].partition("@")
    options = {"n_ctx": length, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **scaling(model, rope, length)}
    with Llama(model, method=method, **options) as llm:
        for name in job["haystacks"]:
            haystack = load_haystack(job["file"] if name == "novel" else name)
            prompts = [make_prompt(llm.tokenize, haystack, length, i, 0, "space") for i in range(job["tests"])]
            right = np.array([run_trial(llm, prompt).strict for prompt in prompts])
            result[name] = int(right.sum())
            if size := getattr(llm.method.parts[0], "chunk_size", None):
                cut = np.array([(p.needle[1] - 1) // size > p.needle[0] // size for p in prompts])
                result[f"{name} cut"] = [int(right[cut].sum()), int(cut.sum())]
        if job["passages"]:
            text = llm.tokenize(Path(job["file"]).read_bytes(), add_bos=False)
            longest = max(job["lengths"])
            losses = [mean_nll(llm, part[-length:], 256) for part in passages(text, longest, job["passages"])]
            result["perplexity"] = float(np.exp(np.mean(losses)))
        usage = llm.kv_usage()
        result["kv"] = usage.bytes / usage.full_bytes
    return result


def main() -> None:
    args = arguments()
    haystacks = args.haystacks.split(",") if args.tests else []
    shared = {"file": str(args.file), "model": args.model, "tests": args.tests, "haystacks": haystacks,
              "passages": args.passages, "lengths": args.lengths}  # fmt: skip
    jobs = [shared | {"method": m, "length": n} for m in args.method or COMBINATIONS for n in args.lengths]
    done = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json and args.json.exists() else []
    known = {json.dumps({k: r[k] for k in jobs[0]}, sort_keys=True): r for r in done}
    results = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        keys = [json.dumps(job, sort_keys=True) for job in jobs]
        todo = [job for job, key in zip(jobs, keys, strict=True) if key not in known]
        for result in pool.map(measure, todo):
            results[json.dumps({k: result[k] for k in jobs[0]}, sort_keys=True)] = result
            if args.json:
                with args.json.open("a") as out:
                    print(json.dumps(result), file=out)
    found = [(known | results)[key] for key in keys]
    print(f"{machine()}; {args.tests} pass keys each\n")
    head = ["method", "tokens", *(part for name in haystacks for part in (name, "cut")), "perplexity", "KV"]
    print(table(head, [cells(result) for result in found]))


def cells(result: dict) -> list[str]:
    """Return one row of the table."""
    row = [result["method"], str(result["length"])]
    for name in result["haystacks"]:
        right, n = result.get(f"{name} cut", (0, 0))
        row += [f"{100 * result[name] / result['tests']:.0f} %", f"{right}/{n}" if n else ""]
    row.append(f"{result['perplexity']:.2f}" if "perplexity" in result else "")
    return [*row, f"{100 * result['kv']:.0f} %" if "kv" in result else ""]


if __name__ == "__main__":
    main()
