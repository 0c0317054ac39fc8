"""What a GPU must do as the CPU does: every sub-op over the shared table of cases, and logits of whole models."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
from cases import EIGHT_BITS, OP_CASES, OpCase
from cases_chunks import CHUNK_CASES, ChunkCase
from cases_evict import EVICT_CASES, EvictCase
from op import make_inputs, run_chunks, run_evict, run_native
from oracle_rules import MODEL_RULES

from gpu.workers import Lost
from pylongctx import Llama

# Of the largest value. All rows become f16 on their way to the tensor cores, whose products have 11 bits and whose sums
# are float; sharper scores have larger errors, and an exponential makes them relative ones of the weights. The largest
# of 1700 runs of cases on an H200 was 2.5e-3.
TOLERANCE = 3e-3
OTHER_CHOICES = 0.03  # share of queries that may choose another chunk: near ties fall either way
OTHER_ROWS = 0.05  # share of rows about which heads may decide otherwise: near thresholds they fall either way
THREADS = 2  # of a model: several are checked at once
LOGITS = 3.0  # our logits may differ by this multiple of how much those of llama.cpp's own attention differ
READING = ("full", "window", "selfextend", "dca", "string", "longheads")  # whose rows all stay
METHODS = (
    "full",
    "window,n_sink=4,window=128",
    "selfextend,group_size=4,neighbor_window=128",
    "dca,chunk_size=128,local_window=64",
    "string,shift_offset=128,local_window=32",
    "longheads,chunk_size=16,window=128",
    "longheads,chunk_size=16,window=128,representation=keys1",
    "longheads,chunk_size=16,window=128,representation=outlier,select=group",
    "longheads,chunk_size=16,window=128,position=selfextend",
    *MODEL_RULES,
    "longheads,chunk_size=16,window=128+corm,window=64,recent=64,evict_every=64",
)


@dataclass
class Check:
    """One line of the table.

    Attributes
    ----------
    name : str
        Sub-ops and KV types, or model and method.
    n : int
        Cases, or tokens.
    error : float
        The largest seen, as a fraction of what is allowed.
    refused : int
        Cases that the device does not run: shapes, whose layers a model's memory leaves to the CPU, or methods.
    wrong : int
        Cases with failures.
    failures : list of str
        What is not as it must be.
    """

    name: str
    n: int = 0
    error: float = 0.0
    refused: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)

    def hold(self, what: str, value: float, limit: float) -> None:
        """Note a failure when ``value`` exceeds ``limit``; NaN does."""
        self.error = max(self.error, value / limit if np.isfinite(value) else np.inf)
        if not value <= limit:
            self.failures.append(f"{what}: {value:.2e}, more than {limit:.0e}")

    def add(self, name: str, done: "Check | Lost") -> None:
        """Count what a process found out about a part, or that it was lost there."""
        if isinstance(done, Lost):
            done = Check(name, n=1, error=np.inf, failures=[f"{name}: {done.reason}"])
        self.n += done.n
        self.refused += 0 if done.failures else done.refused
        self.wrong += bool(done.failures)
        self.error = max(self.error, done.error)
        self.failures += done.failures


# ---- sub-ops ----


def on(device: str) -> dict:
    """Return what makes a run of an op one on a device."""
    return {"device": device}


def check_attend(check: Check, case: OpCase, device: str, x) -> None:
    """Store, and attend over the segments of the case: outputs and LSE."""
    want, got = (run_native(case, x, **where) for where in ({}, on(device)))
    for what, a, b in zip(("out", "lse"), got, want, strict=True):
        if a is not None:
            check.hold(f"{case.name} {what}", error_of(a, b, least_of(case)), limit_of(case))


def check_chunks(check: Check, case: ChunkCase, device: str, x) -> None:
    """Index or summarize, select and attend; outputs where the choice is the same."""
    want, got = (run_chunks(case, x, **where) for where in ({}, on(device)))
    if want.summaries is not None:
        check.hold(f"{case.name} summaries", error_of(got.summaries, want.summaries), limit_of(case))
    same = (got.chunks == want.chunks).all(-1)
    check.hold(f"{case.name} choices", 1 - same.mean(), OTHER_CHOICES)
    if same.any():
        check.hold(f"{case.name} out", error_of(got.out[same], want.out[same], least_of(case)), limit_of(case))


def check_evict(check: Check, case: EvictCase, device: str, x) -> None:
    """Vote and evict too: the rows held, and outputs as long as nothing was evicted; later their median."""
    want, got = (run_evict(case, x, **where) for where in ({}, on(device)))
    check.hold(f"{case.name} held", (got.held != want.held).mean(), OTHER_ROWS)
    error = abs(got.out - want.out).max(axis=(1, 2)) / max(abs(want.out).max(), 1e-30)
    check.hold(f"{case.name} out", float(np.median(error)), limit_of(case))


def error_of(got: np.ndarray, want: np.ndarray, least: float = 1e-30) -> float:
    """Return the largest difference as a fraction of the largest value, at least of ``least``.

    What is not finite must be the same.
    """
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf
    return float(abs(got[finite] - want[finite]).max(initial=0) / max(abs(want[finite]).max(initial=0), least))


def least_of(case: OpCase) -> float:
    """Return the least value that errors are a fraction of: of the CPU's products in 8 bits 1, as in its tests."""
    return 1.0 if case.in_eight_bits else 1e-30


def limit_of(case: OpCase) -> float:
    """Return how far an output may be off."""
    return (EIGHT_BITS if case.in_eight_bits else TOLERANCE) * max(1.0, case.sharpness)


def serves(device: str, method: str) -> bool:
    """Return whether a method has kernels on a device: with Vulkan not summaries, votes and evictions."""
    if not device.startswith("Vulkan"):
        return True
    return method.partition(",")[0] in READING and not re.search(r"\+|representation=(?!keys)", method)


def serves_case(device: str, case: OpCase | EvictCase) -> bool:
    """Return whether the sub-ops of a case have kernels on a device."""
    reads = not isinstance(case, EvictCase) and getattr(case.method, "key_bits", True)
    return not device.startswith("Vulkan") or bool(reads)


def fits(case: OpCase) -> bool:
    """Return whether the kernels are made for heads of this width and what chunks are compared by."""
    by_paper = getattr(case.method, "representation", "") == "attention"
    return not by_paper and all(dim % 8 == 0 and dim <= 576 for dim in (case.head_dim_k, case.head_dim_v))


Group = tuple[str, Iterable[OpCase], Callable[..., None]]
GROUPS: tuple[Group, ...] = (
    ("store, attend", OP_CASES, check_attend),
    ("index, summarize, select, attend", CHUNK_CASES, check_chunks),
    ("vote, evict, attend", EVICT_CASES, check_evict),
)


def check_ops(
    device: str, seed: int, every: int = 1, groups: Iterable[Group] = GROUPS, each: Callable[..., Iterable] = map,
    named: str = "",
) -> Iterator[Check]:  # fmt: skip
    """Compare a device with the CPU on fresh random inputs; yields a check per group and KV types.

    Parameters
    ----------
    seed : int
        Of the inputs: another one draws others.
    every : int
        Take only one case in ``every``.
    each : callable
        Maps a function over cases: `map`, or `workers.each_in`.
    named : str
        Take only cases with this in their names.
    """
    for name, cases, compare in groups:
        of_name = [case for case in cases if named in case.name]
        chosen = [replace(case, seed=case.seed + seed) for case in of_name[::every]]
        checks: dict[str, Check] = {}
        for case, done in zip(chosen, each(partial(check_case, device, compare), chosen), strict=True):
            types = f"{name} {case.type_k if case.type_k == case.type_v else 'mixed'}"
            checks.setdefault(types, Check(types)).add(case.name, done)
        yield from checks.values()


def check_case(device: str, compare: Callable[..., None], case: OpCase) -> Check:
    """Compare one case."""
    check = Check(case.name, n=1)
    if not serves_case(device, case):
        check.refused += 1
        return check
    try:
        compare(check, case, device, make_inputs(case))
    except ValueError as reason:
        check.refused += 1
        if fits(case) or "cannot run" not in str(reason):
            check.failures.append(f"{case.name}: {reason}")
    return check


# ---- whole models ----


@dataclass(frozen=True)
class Text:
    """Tokens of a prompt, which is evaluated at once, and those after it, one by one."""

    prompt: list[int]
    rest: list[int]


def logits(model: str, method: str | None, n_gpu_layers: int, text: Text) -> np.ndarray:
    """Return the logits of all tokens, float32 [n, n_vocab]; without layers on the GPU nothing is computed there."""
    n = len(text.prompt) + len(text.rest)
    with quiet():
        llm = Llama(model, method=method, n_ctx=n, n_threads=THREADS, n_gpu_layers=n_gpu_layers, logits_all=True,
                    op_offload=n_gpu_layers > 0, verbose=False)  # fmt: skip
    with llm:
        llm.eval(text.prompt)
        for token in text.rest:
            llm.eval([token])
        return llm.scores[:n].copy()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings: of a test without GPU, and of contexts beyond training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_model(
    name: str, model: str, text: Text, n_gpu_layers: int, methods: Iterable[str] = METHODS,
    each: Callable[..., Iterable] = map,
) -> Iterator[Check]:  # fmt: skip
    """Compare logits of all layers on the GPU with those of the CPU; the tokens after the prompt must be the same.

    Quantized matrices are multiplied otherwise on a GPU, which has nothing to do with methods: what llama.cpp's own
    attention makes of it is the measure.
    """
    stock, _ = differences(model, None, n_gpu_layers, text)
    methods = list(methods)
    run = partial(check_method, model, n_gpu_layers, text, LOGITS * max(stock, TOLERANCE))
    for method, done in zip(methods, each(run, methods), strict=True):
        check = Check(f"{name} {method}")
        check.add(method, done)
        yield check


def check_method(model: str, n_gpu_layers: int, text: Text, limit: float, method: str) -> Check:
    """Compare one method."""
    check = Check(method, len(text.prompt) + len(text.rest))
    error, other = differences(model, method, n_gpu_layers, text)
    check.hold("median error of the logits", error, limit)
    check.failures += other
    return check


def differences(model: str, method: str | None, n_gpu_layers: int, text: Text) -> tuple[float, list[str]]:
    """Return the median over the tokens of the largest error of their logits, and the tokens chosen otherwise."""
    want, got = (logits(model, method, n, text) for n in (0, n_gpu_layers))
    error = abs(got - want).max(1) / abs(want).max(1)
    other = []
    for i in range(len(text.prompt) - 1, len(want)):
        a, b = want[i].argmax(), got[i].argmax()
        gap = (want[i, a] - want[i, b]) / abs(want[i]).max()
        if gap > 2 * error[i] or not np.isfinite(got[i]).all():  # else a tie within the error
            other.append(f"token {i}: {b} in place of {a}, {gap:.1e} below")
    return float(np.median(error)), other


def greedy(model: str, prompt: list[int], n: int) -> Text:
    """Return a prompt and what the model says after it on the CPU."""
    with quiet():
        llm = Llama(model, n_ctx=len(prompt) + n, op_offload=False, verbose=False)
    with llm:
        return Text(prompt, list(islice(llm.generate(prompt, temp=0.0), n)))
