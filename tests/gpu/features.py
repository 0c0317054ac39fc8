"""What a context does other than decoding, on a GPU as on the CPU: states, offload, compression, drafts, sequences."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from gpu.checks import LOGITS, THREADS, TOLERANCE, Check, Text, error_of, quiet, serves
from pylongctx import Llama

N_CTX = 4096
KEY = "50417"
FILL = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
LIMIT = 4 * TOLERANCE  # of the largest logit: batches of other sizes sum in another order
READING = ("full", "selfextend", "dca", "longheads,chunk_size=16,window=128")
KINDS = (*READING, "corm,window=64,recent=64,evict_every=64", "h2o,budget=192,recent=32,evict_every=32", "kvzip")


def open_model(model: str, n_gpu_layers: int, **settings: Any) -> Llama:
    with quiet():
        return Llama(model, n_ctx=N_CTX, n_threads=THREADS, n_gpu_layers=n_gpu_layers, verbose=False, **settings)


def passkey(llm: Llama, n_lines: int) -> list[int]:
    """Return a prompt with a number in the middle of ``n_lines`` lines, which the embedded model is trained to find."""
    half = FILL * (n_lines // 2)
    text = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        f"{half}The pass key is {KEY}. Remember it. {KEY} is the pass key. {half}What is the pass key? The pass key is"
    )
    return llm.tokenize(text.encode())


def last_logits(llm: Llama, tokens: Iterable[int], step: int = 1) -> np.ndarray:
    """Evaluate tokens in steps; returns the logits of the last one."""
    tokens = list(tokens)
    for i in range(0, len(tokens), step):
        llm.eval(tokens[i : i + step])
    return llm.scores[llm.n_tokens - 1].copy()


# ---- features ----


def check_state(check: Check, text: Text, start: Callable[..., Llama], method: str) -> None:
    """A saved state continues as the context did, also in a new one."""
    with start(method=method, logits_all=True) as llm:
        llm.eval(text.prompt)
        state = llm.save_state()
        want = last_logits(llm, text.rest)
        llm.load_state(state)
        check.hold("continued", error_of(last_logits(llm, text.rest), want), LIMIT)
    with start(method=method, logits_all=True) as other:
        other.load_state(state)
        check.hold("in a new context", error_of(last_logits(other, text.rest), want), LIMIT)


def check_steps(check: Check, text: Text, start: Callable[..., Llama], method: str) -> None:
    """A prompt in one batch gives what the same tokens give in small ones: another kernel attends there.

    Weights are multiplied by other kernels too, so llama.cpp's own attention says how much that changes.
    """
    stock, ours = (in_steps(text, start, method) for method in (None, method))
    check.hold("in steps of 5", ours, LOGITS * max(stock, LIMIT / LOGITS))


def in_steps(text: Text, start: Callable[..., Llama], method: str | None) -> float:
    results = []
    for step in (len(text.prompt), 5):
        with start(method=method, logits_all=True) as llm:
            results.append(last_logits(llm, text.prompt, step))
    return error_of(results[1], results[0])


def check_offload(check: Check, text: Text, start: Callable[..., Llama], _: str) -> None:
    """K and V in host memory give what they give on the device."""
    results = []
    for where in ({}, {"kv_offload": "host"}, {"kv_offload": "host", "kv_offload_mib": 8}):
        with start(method="longheads,chunk_size=16,window=128", logits_all=True, n_ubatch=128, **where) as llm:
            llm.eval(text.prompt)
            results.append(last_logits(llm, text.rest))
    for what, got in zip(("host", "host, 8 MiB"), results[1:], strict=True):
        check.hold(what, error_of(got, results[0]), LIMIT)


def check_compress(check: Check, text: Text, start: Callable[..., Llama], method: str) -> None:
    """A compressed text is smaller, and a number in it is found."""
    with start(method=method) as llm:
        prompt = passkey(llm, 24)
        llm.eval(prompt)
        report = llm.compress(0.5)
        check.hold("bytes", report.bytes_after / report.bytes_before, 0.75)
        found = llm.detokenize(list(islice(llm.generate(prompt, temp=0.0), 6))).decode()
        if KEY not in found:
            check.failures.append(f"{KEY} is {found!r} after a compression")


def check_draft(check: Check, text: Text, start: Callable[..., Llama], draft: str) -> None:
    """Text with drafts is the text without."""
    texts = []
    for settings in ({}, {"draft": draft}):
        with start(**settings) as llm:
            texts.append(list(islice(llm.generate(passkey(llm, 16), temp=0.0), 24)))
    check.hold("other tokens", float(texts[0] != texts[1]), 0.5)


def check_types(check: Check, text: Text, start: Callable[..., Llama], kv: str) -> None:
    """The number is found with every type of K and V."""
    for method in READING:
        with start(method=method, type_k=kv, type_v=kv) as llm:
            found = llm.detokenize(list(islice(llm.generate(passkey(llm, 24), temp=0.0), 6))).decode()
            if KEY not in found:
                check.failures.append(f"{method}: {KEY} is {found!r}")


FEATURES: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "state": (check_state, KINDS),
    "steps": (check_steps, READING),
    "offload": (check_offload, ("longheads",)),
    "compress": (check_compress, ("kvzip", "snapkv")),
    "draft": (check_draft, ("longheads", "longheads,window=64")),
    "types": (check_types, ("f16", "bf16", "q8_0", "q5_1", "q4_0", "iq4_nl")),
}


def has(device: str, feature: str, setting: str) -> bool:
    """Return whether a device has a feature: with Vulkan nothing that stages or evicts rows."""
    if not device.startswith("Vulkan"):
        return True
    return feature not in ("offload", "compress") and (feature != "state" or serves(device, setting))


def check_features(
    model: str, text: Text, n_gpu_layers: int, each: Callable[..., Iterable] = map, device: str = ""
) -> Iterator[Check]:
    """Yield a check per feature and what it is run with."""
    both = [(feature, setting) for feature, (_, settings) in FEATURES.items() for setting in settings]
    items = [(feature, setting) for feature, setting in both if has(device, feature, setting)]
    for (feature, setting), done in zip(
        items, each(partial(check_feature, model, text, n_gpu_layers), items), strict=True
    ):
        check = Check(f"{feature} {setting}")
        check.add(check.name, done)
        yield check


def check_feature(model: str, text: Text, n_gpu_layers: int, item: tuple[str, str]) -> Check:
    """Run one feature with one setting."""
    feature, setting = item
    check = Check(f"{feature} {setting}", 1)
    try:
        FEATURES[feature][0](check, text, partial(open_model, model, n_gpu_layers), setting)
    except Exception as reason:  # the table names it, and the other features run
        check.failures.append(f"{type(reason).__name__}: {reason}")
    return check
