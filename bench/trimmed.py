"""What reused rows behind a gap change in the answers of conversations whose oldest turns the client trims.

    python bench/trimmed.py --model smollm2-135m --model qwen2.5-coder-1.5b

Each conversation keeps its system prompt and its last ``--window`` turns, as clients do that trim by themselves. Its
answers are those of exact evaluation (greedy). The same tokens are scored with the rows behind the gap reused, turn
after turn, as ``--cache-reuse`` does; with a history that is not trimmed; and, as a reference for rounding, with K and
V in q8_0. The table has the mean loss of these tokens, its difference from that of exact evaluation with the standard
error (paired), the Kullback-Leibler divergence from exact evaluation, and how often the likeliest token is the same.
"""

import argparse
from collections.abc import Iterator
from statistics import fmean, stdev

import numpy as np
from report import machine, table

from pylongctx import Llama
from pylongctx.catalog import resolve
from pylongctx.engine.prefix import MIN_AFTER_GAP
from pylongctx.engine.reuse import Held, hold

SYSTEM = "You are a helpful assistant. Answer in two or three sentences."
TOPICS = (
    *("bread", "sailing", "volcanoes", "chess", "the Roman army", "bicycles", "Python lists", "honey bees"),
    *("tea", "sorting numbers", "the moon", "saving money"),
)
QUESTIONS = (
    *("Tell me something about {}.", "Why is that?", "Give me an example.", "What do people often get wrong there?"),
    *(
        "Explain it to a child of six.",
        "My name is Ada, and I am new to this. Where do I begin?",
        "What costs the most?",
    ),
    *("Compare it with something I know.", "What did you say about a child?", "Which tools do I need?"),
    *("Write one sentence that I can remember.", "Now a question of mine: is {} worth my time?"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", action="append", help="a file or a name; default: smollm2-135m")
    add("--conversations", type=int, default=len(TOPICS))
    add("--window", type=int, default=4, help="turns that the client keeps")
    add("--tokens", type=int, default=24, help="of each answer")
    add("--turns", type=int, default=len(QUESTIONS), help="of each conversation")
    return parser.parse_args()


def prompt(llm: Llama, messages: list[dict]) -> np.ndarray:
    return np.array(llm.tokenize(llm.apply_template(messages).encode(), special=True), np.int32)


def trimmed(messages: list[dict], window: int) -> list[dict]:
    """Return the system prompt, the last ``window`` turns and the question."""
    return [messages[0], *messages[1:][-(2 * window + 1) :]]


def scores(llm: Llama, answer: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of each token of an answer, which is evaluated, float64 [n, n_vocab]."""
    rows = [llm.session.last_logits.copy()]
    rows += [row.copy() for step in llm.session.eval_rows(answer) for row in step]
    logits = np.array(rows[: len(answer)], np.float64)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def evaluate(llm: Llama, tokens: np.ndarray, min_chunk: int = 0) -> None:
    """Evaluate a prompt after what the sequence holds of it, with ``min_chunk`` also behind a gap."""
    hold(llm.session, Held(llm.session, min_chunk=min_chunk).covers(tokens[:-1]))
    llm.session.eval(tokens[llm.session.n_tokens :])


def turns(llms: dict[str, Llama], topic: str, args: argparse.Namespace) -> Iterator[tuple[np.ndarray, dict]]:
    """Yield each answer to a trimmed prompt, and its log-probabilities by way of evaluation."""
    messages = [{"role": "system", "content": SYSTEM}]
    for i, question in enumerate(QUESTIONS[: args.turns]):
        messages.append({"role": "user", "content": question.format(topic)})
        tokens = prompt(llms["exact"], trimmed(messages, args.window))
        done = llms["exact"].create_completion(tokens.tolist(), max_tokens=args.tokens, temperature=0.0)
        text = done["choices"][0]["text"]
        answer = np.array(llms["exact"].tokenize(text.encode(), add_bos=False, special=False), np.int32)
        found = {}
        for name, llm in llms.items():
            wanted = prompt(llm, messages) if name == "not trimmed" else tokens
            evaluate(llm, wanted, MIN_AFTER_GAP if name == "reused" else 0)
            found[name] = scores(llm, answer) if len(answer) else None
        messages.append({"role": "assistant", "content": text})
        if i > args.window and len(answer):
            yield answer, found


def compare(name: str, args: argparse.Namespace) -> Iterator[list[str]]:
    path, common = resolve(name), {"n_ctx": 4096, "verbose": False}
    llms = {
        "exact": Llama(path, **common),
        "reused": Llama(path, **common, method="full,spans=2"),
        "not trimmed": Llama(path, **common),
        "K and V in q8_0": Llama(path, **common, type_k="q8_0", type_v="q8_0"),
    }
    rows: dict[str, list[tuple[float, ...]]] = {key: [] for key in llms}
    for topic in TOPICS[: args.conversations]:
        for answer, found in turns(llms, topic, args):
            exact = found["exact"]
            at = np.arange(len(answer)), answer
            for key, other in found.items():
                divergence = (np.exp(exact) * (exact - other)).sum(1).mean()
                same = (exact.argmax(1) == other.argmax(1)).mean()
                loss = -other[at].mean()
                rows[key].append((loss, loss + exact[at].mean(), divergence, same))
    for key, values in rows.items():
        loss, more, divergence, same = (list(column) for column in zip(*values, strict=True))
        error = stdev(more) / len(more) ** 0.5
        numbers = f"{fmean(loss):.3f}", f"{fmean(more):+.4f} +- {error:.4f}", f"{fmean(divergence):.4f}"
        yield [name, key, *numbers, f"{fmean(same):.1%}", str(len(more))]


def main() -> None:
    args = arguments()
    head = ["model", "evaluation", "loss", "difference", "divergence", "same token", "answers"]
    print(machine())
    print(table(head, [row for name in args.model or ["smollm2-135m"] for row in compare(name, args)]))


if __name__ == "__main__":
    main()
