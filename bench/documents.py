"""What documents save, and what they change (Llama.read).

    python bench/documents.py --model smollm2.gguf --text emma.txt --text sherlock.txt
    python bench/documents.py --model random:llama-3-8b:2:q4_k_m --time-only

Documents are passages of a text, each with a fact: "One of the special magic numbers for NAME is: NUMBER" (RULER,
arXiv 2404.06654, niah_multikey). After a system prompt and all documents, every fact is asked for: with a prompt that
is read as a whole, with documents that were read by themselves, and with --ratio also with documents that were
compressed when they were read. Another table has the KL divergence of the next token's distribution over a
continuation, from that of the prompt that is read as a whole, for several numbers of first tokens that are evaluated in
place; "nothing" is the continuation without documents, in the same unit.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from geometries import model_file
from report import machine, table

from pylongctx import Llama
from pylongctx.engine import documents
from pylongctx.engine.documents import Document, Placed

TEXT = Path(__file__).with_name("emma.txt")
NAMES = "amber basil cedar daisy elder fern garlic hazel iris jasmine".split()
SYSTEM = ("You answer questions about texts.", "You are a librarian. Answer in one short sentence.")
CONTINUED = 256  # tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--text", action="append", type=Path, help="file of a text (bench/emma.txt)")
    add("--documents", type=int, default=4, help="in a prompt")
    add("--tokens", type=int, default=1500, help="of a document")
    add("--trials", type=int, default=5, help="prompts of each text")
    add("--fresh", default=f"0,4,8,16,{documents.FRESH_TOKENS},64", help="first tokens that are evaluated in place")
    add("--ratio", action="append", type=float, default=[], help="share of the rows of compressed documents")
    add("--n-ctx", type=int, default=0)
    add("--time-only", action="store_true", help="random tokens, and no questions")
    return parser.parse_args()


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        n_ctx = args.n_ctx or args.documents * args.tokens + 1024
        method = f"full,spans={args.documents + 1}" + "+kvzip" * bool(args.ratio)
        self.llm = Llama(model_file(args.model), n_ctx=n_ctx, method=method, verbose=False)
        self.session = self.llm.session
        self.start = self.session.model.start

    def passages(self, text: str, trial: int) -> list[str]:
        n = 4 * self.args.tokens  # characters, about
        at = 20000 + trial * n * self.args.documents
        return [text[at + i * n : at + (i + 1) * n] for i in range(self.args.documents)]

    # ---- facts ----

    def ask(self, text: str, trial: int) -> dict[str, float]:
        """Return shares of right answers and mean seconds to the first token, read whole, placed and compressed."""
        rng = np.random.default_rng(trial)
        names, found = rng.permutation(NAMES)[: self.args.documents], defaultdict(list)
        numbers = [str(n) for n in rng.integers(10000, 99999, len(names))]
        texts = []
        for passage, name, number in zip(self.passages(text, trial), names, numbers, strict=True):
            at = passage.find(" ", int(len(passage) * rng.uniform(0.1, 0.9)))
            fact = f" One of the special magic numbers for {name} is: {number}."
            texts.append(f"{passage[:at]}{fact}{passage[at:]}\n\n")
        for kind in kinds(self.args):
            if kind != "whole":
                for passage in texts:
                    self.llm.read(passage, ratio=None if kind == "placed" else float(kind))
            for system in SYSTEM[: 1 if kind == "whole" else 2]:
                for name, number in zip(names, numbers, strict=True):
                    seconds, right = self.answer(system, texts, name, number)
                    found[kind, "right"].append(right)
                    if name == names[0]:
                        found[kind, "seconds"].append(seconds)
        for passage in texts:
            self.llm.forget(passage)
        return {key: float(np.mean(values)) for key, values in found.items()}

    def answer(self, system: str, texts: list[str], name: str, number: str) -> tuple[float, bool]:
        question = f"What is the special magic number for {name} mentioned in the texts?"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "".join(texts) + question}]
        started, first = time.monotonic(), 0.0
        said = ""
        for chunk in self.llm.create_chat_completion(messages, max_tokens=24, temperature=0, stream=True):
            piece = chunk["choices"][0]["delta"].get("content") or ""
            first = first or (time.monotonic() - started if piece else 0.0)
            said += piece
        return first, number in said

    # ---- distributions ----

    def divergences(self, text: str) -> dict[str, float]:
        """Return the mean KL divergence for each number of fresh tokens."""
        n, size = self.args.documents, self.args.tokens
        tokens = self.llm.tokenize("".join([*self.passages(text, 0), text[:20000]]).encode(), False)
        texts = [tokens[i * size : (i + 1) * size] for i in range(n)]
        self.after = np.array(tokens[n * size :][:CONTINUED], np.int32)
        begin = self.start + self.llm.tokenize(SYSTEM[0].encode(), False)
        parts = [self.read(self.start + one) for one in texts]
        want = self.distribution(begin + [token for one in texts for token in one])
        found = {"nothing": _divergence(want, self.distribution(begin))}
        for fresh in map(int, self.args.fresh.split(",")):
            self.read(begin)
            for one, rows in zip(texts, parts, strict=True):
                self.session.eval(np.array(one[:fresh], np.int32))
                own = Document("", "", np.array(one, np.int32), rows=rows)
                at = self.session.n_tokens
                place = Placed(at, at + size - fresh, own, len(self.start) + fresh)
                self.session.place(place, own.tokens[fresh:])
            found[str(fresh)] = _divergence(want, self.continued())
        return found

    def read(self, tokens: list[int]) -> np.ndarray:
        self.session.clear()
        self.session.eval(np.array(tokens, np.int32))
        return self.session.context.slice(0, len(tokens))

    def distribution(self, tokens: list[int]) -> np.ndarray:
        self.read(tokens)
        return self.continued()

    def continued(self) -> np.ndarray:
        """Return log-probabilities, float64 [n, n_vocab], after each token of the continuation."""
        rows = np.concatenate([rows.copy() for rows in self.session.eval_rows(self.after)]).astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))

    # ---- time ----

    def time(self) -> tuple[float, float]:
        """Return the seconds to the logits of a prompt of random tokens, read whole and placed."""
        n, size = self.args.documents, self.args.tokens
        tokens = np.random.default_rng(0).integers(3, self.llm.n_vocab(), (n, size)).astype(np.int32)
        parts = [self.read([*self.start, *one.tolist()]) for one in tokens]
        started = time.monotonic()
        self.read([*self.start, *range(3, 35), *tokens.ravel().tolist(), 3])
        whole = time.monotonic() - started
        fresh = documents.FRESH_TOKENS
        started = time.monotonic()
        self.session.clear()
        self.session.eval(np.array([*self.start, *range(3, 35)], np.int32))
        for one, rows in zip(tokens, parts, strict=True):
            self.session.eval(one[:fresh])
            at = self.session.n_tokens
            place = Placed(at, at + size - fresh, Document("", "", one, rows=rows), len(self.start) + fresh)
            self.session.place(place, one[fresh:])
        self.session.eval(np.array([3], np.int32))
        return whole, time.monotonic() - started


def kinds(args: argparse.Namespace) -> list[str]:
    """Return how prompts are read: as a whole, with documents, and with documents of which a share stays."""
    return ["whole", "placed", *map(str, args.ratio)]


def _divergence(want: np.ndarray, got: np.ndarray) -> float:
    return float((np.exp(want) * (want - got)).sum(axis=1).mean())


def main() -> None:
    args = arguments()
    print(machine())
    bench = Bench(args)
    n = args.documents * args.tokens
    if args.time_only:
        whole, placed = bench.time()
        print(f"{n} tokens: {whole:.2f} s whole, {placed:.2f} s placed, {whole / placed:.0f} x")
        return
    rows = []
    for path in args.text or [TEXT]:
        text = path.read_text()
        kld = bench.divergences(text)
        rows.append([path.stem, *(f"{value:.4f}" for value in kld.values())])
    print(table(["KL divergence of", "nothing", *(f"{one} fresh" for one in args.fresh.split(","))], rows))
    rows = []
    for path in args.text or [TEXT]:
        found = [bench.ask(path.read_text(), trial) for trial in range(args.trials)]
        mean = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
        shares = (f"{100 * mean[kind, 'right']:.0f} %" for kind in kinds(args))
        rows.append([path.stem, *shares, *(f"{mean[kind, 'seconds']:.2f}" for kind in kinds(args))])
        print(rows[-1], flush=True)
    heads = [f"{what}, {kind}" for what in ("right", "s to first token") for kind in kinds(args)]
    print(table(["text", *heads], rows))


if __name__ == "__main__":
    main()
