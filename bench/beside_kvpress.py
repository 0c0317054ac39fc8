"""Which KV entries kvpress keeps and which pylongctx keeps, of the same tokens and weights, and the facts found after.

    pip install torch transformers kvpress
    python bench/beside_kvpress.py smollm2-135m --text emma.txt --text karenina.txt

The weights are written as f32 for both, so that neither rounds. Ten numbers are hidden in each text (``recall``).
``kvzip`` compresses the text before they are asked for, ``snapkv`` text and question together; in kvpress they are
KVzipPress, and SnapKVPress with AdaKVPress's budgets of heads. *Shared* is the part of the entries that both keep.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import machine, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from kvpress import AdaKVPress, KVzipPress, SnapKVPress
from tiny_gguf import unquantized
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from pylongctx import Llama
from pylongctx.catalog import resolve
from pylongctx.eval.intervals import mean_interval
from pylongctx.eval.recall import Recall
from pylongctx.eval.task import ModelVocabulary, Sample

WINDOW, POOL, SAFEGUARD = 64, 17, 0.2  # of snapkv here, and as arguments there
Kept = list[list[set[int]]]  # positions by layer and head


@dataclass(frozen=True)
class Outcome:
    """What is left of a text, and the answer to each of its questions."""

    kept: Kept
    answers: list[str]


class Peer:
    """A model of transformers, made from a GGUF file."""

    def __init__(self, path: Path) -> None:
        folder = path.parent / "hf"
        made = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        made.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.chat_template = None  # or KVzipPress takes the first tokens of a text for those of a chat
        tokenizer.save_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def read(self, tokens: Sequence[int], cache: Any) -> int:
        """Evaluate tokens after those of a cache; returns the most probable next one."""
        ids = torch.tensor([list(tokens)])
        found = self.model.model(input_ids=ids, past_key_values=cache).last_hidden_state
        return int(self.model.lm_head(found[:, -1]).argmax())

    def masked(self, n: int) -> Kept:
        """Return the positions of ``n`` that no head's mask has."""
        kept = []
        for layer in self.model.model.layers:
            _, heads, positions = (one.numpy() for one in layer.self_attn.masked_key_indices)
            n_head = self.model.config.num_key_value_heads
            kept.append([set(range(n)) - set(positions[heads == head].tolist()) for head in range(n_head)])
        return kept

    def say(self, token: int, cache: Any, sample: Sample) -> Iterator[int]:
        """Yield greedy tokens, the first one given."""
        for _ in range(sample.max_tokens):
            yield token
            token = self.read([token], cache)

    @torch.no_grad()
    def kvzip(self, sample: Sample, questions: Sequence[list[int]], ratio: float) -> tuple[Kept, list[list[int]]]:
        """Compress the text, then answer."""
        text, cache = list(sample.prompt), DynamicCache()
        with KVzipPress(compression_ratio=1 - ratio)(self.model):
            self.read(text, cache)
        kept, said = self.masked(len(text)), []
        for question in questions:
            said.append(list(self.say(self.read(question, cache), cache, sample)))
            cache.crop(len(text))
        return kept, said

    @torch.no_grad()
    def snapkv(self, sample: Sample, questions: Sequence[list[int]], ratio: float) -> tuple[Kept, list[list[int]]]:
        """Compress text and question together, for each question; returns what the first one kept."""
        kept, said = [], []
        for question in questions:
            prompt, cache = [*sample.prompt, *question], DynamicCache()
            press = AdaKVPress(SnapKVPress(1 - ratio, WINDOW, POOL), SAFEGUARD)
            with press(self.model):
                token = self.read(prompt, cache)
            kept.append(self.masked(len(prompt)))
            said.append(list(self.say(token, cache, sample)))
        return kept[0], said


class Own:
    """The same model here."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.n_ctx = str(path), 2 * length + 512

    def opened(self, method: str) -> Llama:
        return Llama(self.path, method=method, n_ctx=self.n_ctx, type_k="f32", type_v="f32", verbose=False)

    def held(self, llm: Llama, n: int) -> Kept:
        shape = llm.kv_usage().rows.shape
        rows = [[llm.held_rows(layer, head)[0] for head in range(shape[1])] for layer in range(shape[0])]
        return [[set(one[one < n].tolist()) for one in heads] for heads in rows]

    def say(self, llm: Llama, prompt: Sequence[int], sample: Sample) -> list[int]:
        tokens = llm.generate(list(prompt), temp=0.0, reset=True)
        return [token for _, token in zip(range(sample.max_tokens), tokens, strict=False)]

    def full(self, sample: Sample, questions: Sequence[list[int]]) -> list[list[int]]:
        """Answer with all entries."""
        with self.opened("full") as llm:
            return [self.say(llm, [*sample.prompt, *question], sample) for question in questions]

    def kvzip(self, sample: Sample, questions: Sequence[list[int]], ratio: float) -> tuple[Kept, list[list[int]]]:
        """As of ``Peer``."""
        with self.opened("kvzip") as llm:
            llm.eval(list(sample.prompt))
            llm.compress(ratio)
            state = llm.save_state()
            kept, said = self.held(llm, len(sample.prompt)), []
            for question in questions:
                llm.load_state(state)
                said.append(self.say(llm, [*sample.prompt, *question], sample))
        return kept, said

    def snapkv(self, sample: Sample, questions: Sequence[list[int]], ratio: float) -> tuple[Kept, list[list[int]]]:
        """As of ``Peer``."""
        kept, said = [], []
        with self.opened(f"snapkv,window={WINDOW},pool={POOL}") as llm:
            for question in questions:
                prompt = [*sample.prompt, *question]
                llm.reset()
                llm.eval(prompt)
                llm.compress(ratio)
                kept.append(self.held(llm, len(prompt)))
                said.append(self.say(llm, prompt, sample))
        return kept[0], said


def shared(ours: Kept, theirs: Kept) -> tuple[float, float, float]:
    """Return the fractions that are kept here and there, of the longer, and the part of the smaller that both keep."""
    pairs = [pair for layers in zip(ours, theirs, strict=True) for pair in zip(*layers, strict=True)]
    here, there = (sum(len(pair[i]) for pair in pairs) for i in (0, 1))
    both = sum(len(a & b) for a, b in pairs)
    whole = len(pairs) * (1 + max(max(max(pair[0]), max(pair[1])) for pair in pairs))
    return here / whole, there / whole, both / min(here, there)


def facts(sample: Sample, said: Sequence[list[int]], llm: Llama) -> list[float]:
    """Return whether each answer has its number."""
    texts = [llm.detokenize(tokens).decode(errors="replace").partition("\n")[0] for tokens in said]
    return [float(turn["answer"] in text) for turn, text in zip(sample.facts["turns"], texts, strict=True)]


def measure(args: argparse.Namespace, path: Path) -> None:
    own, peer = Own(path, args.length), Peer(path)
    names = ("full", *(f"{rule} {ratio:.0%}" for rule in args.rule for ratio in args.ratio))
    found: dict[str, list[list[float]]] = {name: [[], []] for name in names}
    overlap: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    with Llama(str(path), vocab_only=True, verbose=False) as llm:
        vocabulary = ModelVocabulary(llm)
        task = Recall(tests=len(args.text), questions=args.questions, haystack=tuple(args.text))
        for sample in task.samples(vocabulary, args.length, args.seed):
            questions = [vocabulary.tokenize(turn["question"]) for turn in sample.facts["turns"]]
            found["full"][0] += facts(sample, own.full(sample, questions), llm)
            for rule in args.rule:
                for ratio in args.ratio:
                    name = f"{rule} {ratio:.0%}"
                    sides = [getattr(one, rule)(sample, questions, ratio) for one in (own, peer)]
                    overlap[name].append(shared(sides[0][0], sides[1][0]))
                    for side, (_, said) in zip(found[name], sides, strict=True):
                        side += facts(sample, said, llm)
                    print(name, overlap[name][-1], *(np.mean(side) for side in found[name]), file=sys.stderr)
    rows = [[name, *map(score, found[name]), *parts(overlap[name])] for name in names]
    print(table(["rule and fraction", "facts here", "in kvpress", "kept here", "there", "shared"], rows))


def score(values: list[float]) -> str:
    if not values:
        return ""
    one = mean_interval([100 * value for value in values])
    return f"{one.mean:.0f} % [{one.low:.0f}, {one.high:.0f}]"


def parts(values: list[tuple[float, float, float]]) -> list[str]:
    found: NDArray[np.float64] = np.array(values).mean(axis=0) if values else np.empty(0)
    return [f"{part:.1%}" for part in found] or [""] * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True, help="a text file; may be repeated")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--rule", action="append", choices=("kvzip", "snapkv"))
    parser.add_argument("--ratio", type=float, action="append")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    args.rule, args.ratio = args.rule or ["kvzip", "snapkv"], args.ratio or [0.5, 0.25, 0.1]
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        measure(args, unquantized(Path(folder) / "f32.gguf", resolve(args.model)))


if __name__ == "__main__":
    main()
