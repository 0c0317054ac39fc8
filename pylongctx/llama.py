"""The class Llama: llama_cpp.Llama's interface over a Completer and an engine without a thread."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from pylongctx import _arguments as arguments
from pylongctx import _log
from pylongctx.attention.trace import Trace, record
from pylongctx.catalog.huggingface import from_pretrained
from pylongctx.chat.formats import LlamaChatCompletionHandler
from pylongctx.chat.template import Templates
from pylongctx.completer import Completer
from pylongctx.completions.embeddings import CreateEmbeddingResponse, Embedder, Texts, Vectors
from pylongctx.completions.grammar import constraint
from pylongctx.completions.request import Grammar, Prompt, SamplerOptions, flattened, prompt_tokens, sampling_params
from pylongctx.completions.results import Answered, Completion, complete_together
from pylongctx.drafts.model import MtpDraft
from pylongctx.engine.compress import CompressionReport
from pylongctx.engine.context import KVUsage, OffloadUsage
from pylongctx.engine.documents import Document
from pylongctx.engine.drafting import DraftModel, check_draft, check_model
from pylongctx.engine.job import Counters
from pylongctx.engine.model import Model
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.sampling.sampler import Processors, Sampler, StoppingCriteria, process
from pylongctx.engine.saved_state import BaseLlamaCache, LlamaState
from pylongctx.engine.session import Session
from pylongctx.engine.solo import Solo
from pylongctx.engine.source import NoTokens, TokenSource
from pylongctx.engine.states import States
from pylongctx.loading import AUTO, OpenedModel
from pylongctx.methods import Method
from pylongctx.store import StoreUsage

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_SEED = 0xFFFFFFFF
NO_CONTEXT = "this Llama was loaded with vocab_only=True: it has no context"


class LlamaTokenizer:
    """The tokenizer of a loaded model.

    Examples
    --------
    >>> tokenizer = llm.tokenizer()
    >>> tokenizer.decode(tokenizer.encode("Who is the thief?", add_bos=False)).strip()
    'Who is the thief?'
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Return the token ids of UTF-8 bytes."""
        return self._model.tokenize(text, add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Return the bytes of tokens."""
        return self._model.detokenize(tokens, special)

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Return the token ids of a string."""
        return self.tokenize(text.encode("utf-8", "ignore"), add_bos, special)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return self.detokenize(tokens).decode("utf-8", "ignore")


class Llama(Completer):
    """A GGUF model and one context, with the interface of ``llama_cpp.Llama``.

    Calls from several threads wait for each other; only ``abort`` returns at once. Between two chunks of a stream
    another call may run; the stream then raises RuntimeError. A forked child must open its own object.

    Parameters
    ----------
    model_path : str
        GGUF file; or, if there is no such file, a name of the catalogue that ``pylongctx get`` lists. A missing model
        of the catalogue is downloaded after a warning with its size and license.
    n_gpu_layers : int or "auto"
        How many of the last layers to place on devices, with their part of the KV cache; -1: all; "auto": as many as
        fit, of experts too.
    tensor_split : list of float or None
        Split between devices: first those of ``rpc_servers``, then the GPUs of this machine. None: by free memory.
    n_ctx : int
        Context window in tokens. 0 (the default here): the trained context, times 4 for a method that extends, or as
        much as memory allows, with a warning.
    n_batch, n_ubatch : int
        Maximum tokens of a batch, and of the graph that evaluates a part of it.
    n_threads, n_threads_batch : int or None
        Threads for generation (None: the physical cores available to this process) and for prefill (None: all
        CPUs).
    split_mode : int
        How the model is split across devices: 0 not, 1 by layers, 2 by rows, 3 by tensors.
    main_gpu : int
        The device of all layers, with ``split_mode=0``.
    vocab_only : bool
        Load only the vocabulary: the object can tokenize, but has no context.
    use_mmap : bool
        Memory-map the file. False: read the weights into the process's own memory, on huge pages where Linux has
        them, which makes generation up to 10 % faster and opening slower.
    use_mlock : bool
        Lock the model in memory.
    rope_scaling_type : int or None
        RoPE scaling: -1 the model's, 0 none, 1 linear, 2 YaRN.
    rope_freq_base, rope_freq_scale : float
        RoPE base frequency and frequency scale; 0: the model's.
    yarn_ext_factor : float
        YaRN's extrapolation mix factor; negative: the model's.
    yarn_attn_factor : float
        YaRN's attention magnitude factor.
    yarn_beta_fast : float
        YaRN's low correction dimension.
    yarn_beta_slow : float
        YaRN's high correction dimension.
    yarn_orig_ctx : int
        The trained context that YaRN extends; 0: the model's.
    pooling_type, attention_type : int
        Pooling of embeddings, and causal or non-causal attention; -1: the model's.
    offload_kqv : bool
        Keep K and V on the devices of their layers.
    op_offload : bool or None
        Offload operations on host tensors to devices. None: llama.cpp's default.
    swa_full : bool or None
        Keep every KV entry of sliding windows, so that rewinding needs no checkpoint. None: False with a method,
        llama.cpp's default without one.
    no_perf : bool
        Do not measure times inside llama.cpp.
    last_n_tokens_size : int
        Number of last generated tokens that penalties consider.
    kv_overrides : dict or None
        Values that override metadata of the file, by key: bool, int, float, or str of at most 127 bytes, of the same
        type as in the file. A key that llama.cpp does not read for this model is refused.
    override_tensor : dict or None
        Placement of tensors: buffer types, such as "CPU", by regular expressions searched in their names. The
        first match applies.
    lora_base, numa, tokenizer, spm_infill
        Only their defaults are supported: other values raise NotImplementedError with the reason.
    logits_all : bool
        Keep the logits of every token, see ``scores``.
    type_k, type_v : int or str or None
        ggml types of the KV cache, by number or name ("q8_0"). None: f16.
    embedding : bool
        Open for ``embed`` and ``create_embedding``, on llama.cpp's own KV cache; ``pooling_type`` -1 is the model's.
    lora_path : str or None
        A LoRA adapter, see ``add_lora``.
    lora_scale : float
        Its scale.
    chat_format : str or None
        A named format, a Jinja template, or ``chat_template.NAME`` of the model. None: the model's, else ChatML.
    chat_handler : callable or None
        Handles ``create_chat_completion`` instead, called like llama_cpp's handlers.
    draft_model : callable or None
        Drafts tokens, which are verified in one batch, see ``LlamaPromptLookupDecoding``. Not for eviction rules.
    draft : Method, MtpDraft, str or None
        The model drafts by itself. "mtp": with its MTP block (NextN), for methods without eviction rules; see
        ``MtpDraft``. "longheads": reading only the chunks that its heads select, and verifying the draft reading
        everything, for the methods full and dca; see ``SelfDraft``.
    seed : int
        Seed of the sampler; random by default.
    flash_attn : bool
        Accepted without effect: pylongctx's attention is always a flash attention.
    verbose : bool
        Log the chosen method settings and cache reuse (``logging.getLogger("pylongctx")``, to stderr if the program
        has no handlers), and let llama.cpp print its warnings.
    method : Method or str or None
        How a long context is processed: an object such as ``SelfExtend()``, or a string such as
        ``"selfextend,group_size=8"`` or ``"longheads+corm"``. None: llama.cpp's own KV cache. "auto", the default: full
        attention, on llama.cpp's own KV cache with one warning if no method supports the model. A method given by name
        raises an error for such a model.
    overflow : str
        How to handle a text that does not fit into the context. "error": raise PromptTooLong, and end an answer there.
        "evict_middle": evict the oldest turns after the system prompt of a conversation, before the answer and while
        it is generated, without evaluating anything again; see ``usage``. For full attention ("auto", "full").
    cache_reuse : int
        Minimum tokens of a prompt that are reused after a gap: where the prompt lacks some tokens of the sequence, such
        as turns that a client left out, the KV entries of at least so many equal tokens after them are kept. They were
        computed with the missing tokens, so answers differ slightly from those of a full prefill. 0: never. For full
        attention ("auto", "full"; ``"full,spans=N"`` allows N - 1 gaps, by default one).
    kv_limit : int or None
        Maximum bytes of KV memory, as in ``kv_usage().bytes``; beyond it ContextFull is raised and nothing changes.
    kv_store : str or None
        A folder that stores KV entries of prefilled texts, readable by its owner only. A prompt with a stored prefix,
        from this or an earlier process, continues after it; several processes may share the folder. A lost or damaged
        block is evaluated again. A folder that another user owns or may write to is refused. None: no store.
    kv_store_limit : int or None
        Maximum bytes of its files; the least recently used ones are removed. None: 20 GiB.
    kv_store_words : bool
        Store the first words of each text, for ``pylongctx kv ls``. The tokens are stored anyway.
    kv_offload : "host" or "disk" or None
        Keep K and V in a slower memory and copy the chunks that heads select to a buffer, where they replace those
        that are read less often. "host": in host memory, with the buffer on the device. "disk": in a file, with the
        buffer in host memory; for layers on the CPU. For longheads without an eviction rule.
    kv_offload_mib : int or None
        MiB of the buffer; None: twice what a query selects, and at least what one reads before selection begins.
        ``offload_usage()`` counts hits.
    kv_offload_path : str or None
        The folder of the file, which has no name and is gone when it is closed, even if the process is killed. None:
        the cache folder.
    rpc_servers : str or None
        "host:port,host:port" of machines that run ``pylongctx rpc-server``: their devices are used like local
        ones. A server that exits while in use ends this process, as in llama.cpp. For trusted networks only.
    progress_callback : callable or None
        Called as ``progress_callback(n_done, n_total)`` after each step of the prefill.
    n_parallel : int
        Sequences of ``n_ctx`` tokens each, on which ``complete_many`` and lists of prompts run concurrently.
    preflight : bool
        Check before any allocation that weights, K and V of ``n_ctx`` tokens and compute buffers fit into free
        memory. False: open it anyway, for shorter texts; KV memory is allocated as they grow.
    deterministic : bool
        A token has bitwise identical logits, no matter how its text was divided into batches, what is evaluated in the
        same batch, restored before it or drafted after it, with any number of threads, on one kind of CPU and one
        build. For methods without an eviction rule, on CPUs. It is slower.
    **kwargs
        Unknown arguments are ignored with a warning.

    Raises
    ------
    ValueError
        When the file, the method or a number is invalid.
    NotImplementedError
        When an argument requests an unsupported feature.
    MemoryError
        When model and context do not fit, with a table of the size of each part and suggestions.
    ConnectionError
        When a model of the catalogue is missing and cannot be downloaded.
    OSError
        When ``kv_store`` cannot be created; PermissionError when another user owns it or may write to it.

    Examples
    --------
    >>> with Llama(path, method="longheads", n_ctx=4096, verbose=False) as reader:
    ...     answer = reader("It was the best of times, it was the worst of", max_tokens=2, temperature=0.0)
    >>> answer["object"], answer["usage"]["completion_tokens"]
    ('text_completion', 2)
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int | str = 0,
        split_mode: int = 1,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: dict[str, bool | int | float | str] | None = None,
        seed: int = DEFAULT_SEED,
        n_ctx: int = 0,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = -1,
        pooling_type: int = -1,
        attention_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: LlamaChatCompletionHandler | None = None,
        draft_model: DraftModel | None = None,
        tokenizer: object | None = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        method: Method | str | None = AUTO,
        draft: Method | MtpDraft | str | None = None,
        overflow: str = "error",
        cache_reuse: int = 0,
        kv_limit: int | None = None,
        kv_store: str | os.PathLike[str] | None = None,
        kv_store_limit: int | None = None,
        kv_store_words: bool = True,
        kv_offload: str | None = None,
        kv_offload_mib: int | None = None,
        kv_offload_path: str | os.PathLike[str] | None = None,
        rpc_servers: str | None = None,
        progress_callback: Callable[[int, int], None] | None = None,
        n_parallel: int = 1,
        preflight: bool = True,
        deterministic: bool = False,
        override_tensor: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        arguments.check_unknown(kwargs, list(given))
        if verbose:
            _log.show()
        self._arguments = given
        self.verbose, self.chat_format = verbose, chat_format
        self.n_parallel = arguments.check_count("n_parallel", n_parallel)
        self._opened = opened = OpenedModel(given, self.n_parallel)
        self._finalizer = weakref.finalize(self, opened.close)
        try:
            super().__init__(
                opened.model,
                _source(opened),
                opened.path,
                Templates(opened.model, chat_format),
                seed,
                last_n_tokens_size,
                chat_handler,
            )
            self._note(opened)
            if lora_path is not None:
                self.add_lora(lora_path, lora_scale)
        except BaseException:
            self.close()
            raise

    def _note(self, opened: OpenedModel) -> None:
        """Keep what llama_cpp.Llama shows as attributes."""
        self.model_path = opened.path
        self.n_threads, self.n_threads_batch = opened.threads
        self.n_batch: int = self._arguments["n_batch"] if opened.context is None else opened.context.n_batch
        self.metadata = opened.model.metadata()

    from_pretrained = classmethod(from_pretrained)

    # ---- lifetime ----

    def close(self) -> None:
        """Free model and context; waits for a running evaluation. The object cannot be used afterwards.

        Examples
        --------
        >>> with Llama(path, verbose=False) as other:  # closes it at the end
        ...     n = other.n_vocab()
        """
        self._finalizer()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # ---- the sequence ----

    @property
    def session(self) -> Session:
        """The sequence: its tokens and logits, evaluation, rewinding, and facts about the model.

        Raises
        ------
        RuntimeError
            When the object is closed, or was loaded with ``vocab_only``.
        """
        return self._solo.session

    @property
    def sessions(self) -> Sequence[Session]:
        """All sequences; ``session`` is the first one."""
        return [slot.session for slot in self._solo.engine.slots]

    @property
    def counters(self) -> Counters:
        """The work since the object was opened: tokens of prompts and answers, drafts and how many were right.

        Examples
        --------
        >>> before = llm.counters.generated_tokens
        >>> answer = llm("It was", max_tokens=3, temperature=0)
        >>> llm.counters.generated_tokens - before
        3
        """
        return self._solo.engine.counters

    @property
    def states(self) -> States:
        """The states that the sequence can continue from: the checkpoint and the cache, and their identity."""
        return self._solo.states

    @property
    def _solo(self) -> Solo:
        self._model.handle  # noqa: B018 - raises when closed
        if not isinstance(self._source, Solo):
            raise RuntimeError(NO_CONTEXT)
        return self._source

    @property
    def method(self) -> Method | None:
        """The method with every automatic choice filled in; None with llama.cpp's own KV cache."""
        return self.session.method

    def n_ctx(self) -> int:
        """Return the context window in tokens.

        Examples
        --------
        >>> llm.n_ctx()
        2048
        """
        return self.session.context.n_ctx

    @property
    def n_tokens(self) -> int:
        """The number of evaluated tokens; setting a smaller number removes the tokens after it."""
        return self.session.n_tokens

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        if not 0 <= n <= self.session.n_tokens:
            raise ValueError(f"n_tokens can only be reduced: it must be from 0 to {self.session.n_tokens}, not {n}")
        with self.session.lock:
            self.session.n_tokens = n

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """int32 [n_ctx]; the first ``n_tokens`` are the evaluated tokens."""
        return self.session.input_ids

    @property
    def _input_ids(self) -> NDArray[np.int32]:  # llama_cpp's
        return self.session.tokens

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits, float32 [n_tokens, n_vocab] with logits_all, else only the last row, [1, n_vocab].

        The array is a view that later evaluations may overwrite; it has no rows before the first evaluation.
        """
        return self.session.scores

    _scores = scores

    @property
    def eval_tokens(self) -> deque[int]:
        """The evaluated tokens."""
        return deque(self._input_ids.tolist(), maxlen=self.session.n_ctx)

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The rows of ``scores`` as lists."""
        return deque(self.scores.tolist(), maxlen=self.session.n_ctx if self.session.logits_all else 1)

    def reset(self) -> None:
        """Remove all tokens.

        Examples
        --------
        >>> llm.reset()
        >>> llm.n_tokens
        0
        """
        with self.session.lock:
            self.session.clear()

    def abort(self) -> None:
        """Stop an evaluation in another thread, which raises Aborted; the object stays usable.

        Examples
        --------
        >>> from threading import Timer
        >>> Timer(60, llm.abort).cancel()  # without cancel(): stops what runs after a minute
        """
        self.session.context.abort = True

    # ---- evaluation ----

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the current ones.

        Raises
        ------
        ValueError
            When a token is outside the vocabulary, or the tokens do not fit (ContextFull).
        Aborted
            When ``abort`` was called during the evaluation.

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval([1, 7, 9])
        >>> llm.n_tokens, llm.scores.shape == (1, llm.n_vocab())
        (3, True)
        """
        ids = self._model.check_tokens(tokens)
        with self.session.lock:
            self.session.context.abort = False
            self.session.eval(ids)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Evaluate a prompt after its cached prefix, so that the sequence holds it and the logits after it.

        Raises
        ------
        ValueError
            When a token is outside the vocabulary, or the tokens do not fit (PromptTooLong).
        Aborted
            When ``abort`` was called during the evaluation.

        Examples
        --------
        >>> llm.prefill([1, 7, 9])
        >>> llm.prefill([1, 7, 8])  # evaluates one token
        >>> llm.n_tokens
        3
        """
        self._solo.prefill(tokens)

    def eval_rows(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Evaluate tokens and yield their logits, float32 [k, n_vocab] per step of at most n_ubatch tokens.

        Memory does not grow with the tokens. An array is valid until the next step.

        Examples
        --------
        >>> llm.reset()
        >>> sum(len(rows) for rows in llm.eval_rows([1, 7, 9]))
        3
        """
        ids = self._model.check_tokens(tokens)
        self.session.context.abort = False
        return self.session.eval_rows(ids)

    def trace(self, start: int | None = None, stop: int | None = None) -> AbstractContextManager[Trace]:
        """Record the chunks that each layer and head reads: ``with llm.trace() as trace: llm.eval(tokens)``.

        The results do not change. ``pylongctx.attention`` computes numbers and a map. A position that is evaluated
        again replaces its record.

        Parameters
        ----------
        start, stop : int or None
            Record the queries at positions ``start <= p < stop`` of the text. None: the current number of tokens,
            and n_ctx. A query takes 4 * n_layer * n_head * window / chunk_size bytes.

        Raises
        ------
        ValueError
            When the method does not read chunks, or the range is empty or outside the context.
        RuntimeError
            When a trace is already being recorded.
        MemoryError
            When the records of the range do not fit into memory.

        Examples
        --------
        >>> llm.reset()
        >>> with llm.trace(stop=64) as trace:
        ...     llm.eval(tokens[:64])
        >>> len(trace.positions)
        64
        """
        return record(self.session, start, stop)

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """Return the length of the common prefix of two token sequences.

        Examples
        --------
        >>> llm.longest_token_prefix([1, 7, 9], [1, 7, 8, 9])
        2
        """
        return longest_prefix(a, b)

    @staticmethod
    def logits_to_logprobs(logits: NDArray[np.float32] | list[float], axis: int = -1) -> NDArray[np.float32]:
        """Return the log-softmax along ``axis``, float32 of the same shape; rows may hold -inf.

        Examples
        --------
        >>> round(float(llm.logits_to_logprobs([0.0, 0.0])[0]), 4)  # log(1/2)
        -0.6931
        """
        x = np.asarray(logits, np.float32)
        top = np.max(x, axis=axis, keepdims=True)
        shifted = x - np.where(np.isfinite(top), top, np.float32(0))
        with np.errstate(divide="ignore"):
            return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)), np.float32)

    # ---- states ----

    def save_state(self) -> LlamaState:
        """Return tokens, last logits and KV entries, without the sampler and the earlier ``scores``.

        Examples
        --------
        >>> llm.eval([1, 7, 9])
        >>> state = llm.save_state()
        >>> llm.reset()
        >>> llm.load_state(state)
        >>> llm.n_tokens
        3
        """
        return self.states.save()

    def load_state(self, state: LlamaState) -> None:
        """Continue from a saved state; with logits_all the earlier rows of ``scores`` are NaN.

        Raises
        ------
        InvalidInput
            When another model, method or setting saved it, or it is damaged. Then the object is empty and usable.
        """
        self.states.load(state)

    def checkpoint(self) -> LlamaState:
        """Keep and return a snapshot in memory: a prompt with its tokens as prefix continues from there.

        It is for methods that cannot rewind, such as corm, which evicts: take it where the next prompt may differ,
        such as after the prompt of a chat turn. It is as large as the KV cache; the next one replaces it.

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval([1, 7])
        >>> llm.checkpoint().n_tokens
        2
        >>> llm.eval([9])
        >>> llm.restore()
        >>> llm.n_tokens
        2
        """
        return self.states.take_checkpoint()

    def restore(self, state: LlamaState | None = None) -> None:
        """Rewind to ``state``, or to the last checkpoint.

        Raises
        ------
        RuntimeError
            When there is no checkpoint.
        InvalidInput
            When the state belongs to another model, method or setting, see ``load_state``.
        """
        state = state or self.states.checkpoint
        if state is None:
            raise RuntimeError("there is no checkpoint: call checkpoint() first")
        self.load_state(state)

    @property
    def cache(self) -> BaseLlamaCache | None:
        """The cache of states that completions start from, see ``set_cache``."""
        return self.states.cache

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Let completions start from the states of a cache, and add theirs to it; None: no cache.

        Examples
        --------
        >>> from pylongctx import LlamaRAMCache
        >>> llm.set_cache(LlamaRAMCache(capacity_bytes=2**28))
        >>> llm.set_cache(None)
        """
        self.states.cache = cache

    # ---- the vocabulary ----

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the token ids of UTF-8 bytes; ``special`` parses the texts of special tokens.

        Examples
        --------
        >>> llm.detokenize(llm.tokenize(b"It was"))
        b'It was'
        """
        return self._model.tokenize(text, add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Return the bytes of tokens; a space right after a leading BOS token is dropped."""
        return self._model.detokenize(tokens, special)

    def tokenizer(self) -> LlamaTokenizer:
        """Return an object with ``encode`` and ``decode`` on str.

        Examples
        --------
        >>> llm.tokenizer().decode(llm.tokenizer().encode("It was"))
        'It was'
        """
        return LlamaTokenizer(self._model)

    def n_embd(self) -> int:
        """Return the embedding size of the model."""
        return int(self._model.info.n_embd)

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return int(self._model.info.n_vocab)

    def token_bos(self) -> int:
        """Return the beginning-of-sequence token; -1 if there is none."""
        return int(self._model.info.token_bos)

    def token_eos(self) -> int:
        """Return the end-of-sequence token; -1 if there is none."""
        return int(self._model.info.token_eos)

    def token_nl(self) -> int:
        """Return the newline token; -1 if there is none."""
        return int(self._model.info.token_nl)

    # ---- one token ----

    def sample(
        self,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_eta: float = 0.1,
        mirostat_tau: float = 5.0,
        penalize_nl: bool = True,
        logits_processor: Processors = None,
        grammar: Grammar | None = None,
        idx: int | None = None,
        **more: Unpack[SamplerOptions],
    ) -> int:
        """Choose a token from the logits after the last token, or after token ``idx`` with logits_all.

        The other parameters are those of ``create_completion``.

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval(llm.tokenize(b"It was the best of"))
        >>> llm.sample(temp=0) == int(llm.scores[-1].argmax())
        True
        """
        params = sampling_params(flattened(locals()), self._seeds, self.last_n_tokens_size)
        session = self.session
        with session.lock:
            row = session.row(idx)
            sampler = Sampler(self._model, params, constraint(grammar), session.tokens)
            with session.lock.calling():
                return sampler.sample(process(logits_processor, session.tokens, row))

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Processors = None,
        stopping_criteria: StoppingCriteria | None = None,
        grammar: Grammar | None = None,
        **more: Unpack[SamplerOptions],
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens that continue ``tokens`` endlessly; ``.send(tokens)`` appends tokens after the last one.

        With ``reset``, ``tokens`` are the whole sequence, whose cached prefix is reused;
        without, they follow the current tokens. The other parameters are those of ``create_completion``.

        Examples
        --------
        >>> for token in llm.generate(llm.tokenize(b"It was"), temp=0):
        ...     if token == llm.token_eos() or llm.n_tokens > 8:
        ...         break
        """
        params = sampling_params(flattened(locals()), self._seeds, self.last_n_tokens_size)
        before = tokens if reset else [*self.session.tokens.tolist(), *tokens]
        sampler = Sampler(self._model, params, constraint(grammar), before)
        asked = {"processors": logits_processor, "criteria": stopping_criteria, "follows": not reset}
        return self._generate(tokens, sampler, asked)

    def _generate(
        self, tokens: Sequence[int], sampler: Sampler, asked: Mapping[str, Any]
    ) -> Generator[int, Sequence[int] | None, None]:
        solo = self._solo
        drawn = solo.drawn(solo.endless(tokens, sampler, **asked))
        sent: Sequence[int] | None = None
        while True:
            try:
                token, _ = drawn.send(sent)
            except StopIteration:
                return
            sent = yield token
            sent = self._model.check_tokens(sent).tolist() if sent else None

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model; a new one is used from the next generation on."""
        return self._solo.draft_model

    @draft_model.setter
    def draft_model(self, model: DraftModel | None) -> None:
        check_draft(model, self.session.method)
        check_model(model, self.session.model)
        self._solo.draft_model = model

    # ---- several prompts ----

    def complete_many(
        self,
        prompts: Sequence[Prompt],
        progress: Callable[[int, int], None] | None = None,
        model: str | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Return the completion of each prompt, in order.

        They run concurrently on the ``n_parallel`` sequences of the object. A common prefix of prompts is evaluated
        once. The tokens of ``session`` may change.

        Parameters
        ----------
        prompts : list
            Texts, or lists of tokens.
        progress : callable or None
            Called as ``progress(n_done, n_prompts)`` after each answer.
        model : str or None
            The model's name in answers.
        **options
            Options of ``create_completion`` for all prompts. A seed applies to every prompt.

        Raises
        ------
        ValueError
            When a prompt is empty or does not fit into the context (PromptTooLong); then nothing is evaluated.

        Examples
        --------
        >>> answers = llm.complete_many(["It was the best", "It was the worst"], max_tokens=2, temperature=0)
        >>> [answer["usage"]["completion_tokens"] for answer in answers]
        [2, 2]
        """
        return [answer.completion for answer in self.answer_many(prompts, progress, model, **options)]

    def answer_many(
        self,
        prompts: Sequence[Prompt],
        progress: Callable[[int, int], None] | None = None,
        model: str | None = None,
        **options: Any,
    ) -> list[Answered]:
        """Run ``complete_many``, and also return the tokens of each answer."""
        solo, name, n = self._solo, self._name if model is None else model, len(prompts)
        for prompt in prompts:
            if (n_tokens := len(prompt_tokens(solo, prompt))) >= solo.n_ctx:
                raise solo.session.too_long(n_tokens)
        generations = (self.generation(prompt, **options) for prompt in prompts)
        with solo.lock():
            return complete_together(solo, generations, name, lambda i: progress and progress(i, n))

    # ---- documents ----

    @property
    def documents(self) -> Sequence[Document]:
        """The documents, the least recently used first."""
        return list(self._solo.engine.documents)

    def read(self, text: str, name: str | None = None, ratio: float | None = None) -> Document:
        """Prefill a text independently, so that later prompts can contain it anywhere without another prefill.

        It is recognized wherever a prompt contains its text: among others in any order, or after a changed system
        prompt. Its first tokens are evaluated there; the others were computed without the tokens before them (EPIC,
        arXiv 2410.15332), so answers differ slightly from those of a full prefill. Keys are not rotated again; queries
        see them at their distance in the prompt. The tokens of the sequence are removed. With ``kv_store``, a text that
        an earlier process prefilled is loaded from the store.

        Parameters
        ----------
        text : str
            The text, at least 128 tokens long.
        name : str or None
            Name for parts of messages: ``{"type": "document", "name": ...}``. None: the text itself.
        ratio : float or None
            Fraction of its KV entries to keep, see ``compress``; ``kv_store`` stores these. None: all.

        Returns
        -------
        document : Document
            ``str(document)`` is the text, so that it can be put into a prompt.

        Raises
        ------
        ValueError
            When the method is not ``full,spans=N``, or with a ratio ``full,spans=N+kvzip``, the model has sliding
            windows or recurrent states, ``ratio`` is invalid, the text is too short or too long, or the context has no
            room for the replay (ContextFull).

        Examples
        --------
        >>> from pylongctx import Llama
        >>> with Llama("model.gguf", n_ctx=1024, method="full,spans=3", verbose=False) as reader:
        ...     book = reader.read("It was the best of times, it was the worst of times. " * 20, name="book")
        ...     parts = [{"type": "document", "name": "book"}, {"type": "text", "text": "Which times?"}]
        ...     answer = reader.create_chat_completion([{"role": "user", "content": parts}], max_tokens=1)
        ...     [place.document.name for place in reader.session.placed]
        ['book']
        """
        solo = self._solo
        document = solo.engine.documents.add(text, name, ratio=ratio)
        if document.rows is None:
            solo.prefill(document.prompt.tolist(), reads=document)
        return document

    def forget(self, document: Document | str) -> None:
        """Free a document, so that prompts with its text are prefilled normally; ValueError for an unknown name."""
        self._solo.engine.documents.forget(document.name if isinstance(document, Document) else document)

    # ---- the KV cache ----

    def kv_usage(self) -> KVUsage:
        """Return the KV memory: ``bytes``, ``peak_bytes``, ``full_bytes``, ``rows`` int32 [n_layer, n_head_kv].

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval(tokens[:64])
        >>> usage = llm.kv_usage()
        >>> usage.bytes <= usage.peak_bytes, int(usage.rows.min())
        (True, 64)
        """
        return self.session.context.kv_usage()

    def offload_usage(self) -> OffloadUsage:
        """Return how KV entries of ``kv_offload`` were read since the model was loaded."""
        return self.session.context.offload_usage()

    def kv_store_usage(self) -> StoreUsage:
        """Return a copy of the counters of ``kv_store`` since the model was loaded.

        Raises
        ------
        ValueError
            When there is no store.

        Examples
        --------
        >>> from pylongctx import Llama
        >>> with Llama("model.gguf", n_ctx=1024, kv_store="kv", verbose=False) as reader:
        ...     answer = reader("a long text " * 150, max_tokens=1)
        ...     reader.kv_store_usage().hits
        0
        """
        if self._opened.store is None:
            raise ValueError("this Llama has no kv_store: open it with kv_store=FOLDER")
        return replace(self._opened.store.usage)

    def held_rows(self, layer: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the tokens that a KV head still holds, and their scores.

        Returns
        -------
        rows : numpy.ndarray
            int32 [n], positions, ascending.
        scores : numpy.ndarray
            int32 [n]: with corm the last query to which the token was important, -1 for none (CORM, definition 3.1; one
            of the last ``window`` ones if ``evict_every`` is at least ``window``, since one is enough to stay);
            with scissorhands a count; with weight-based rules a float (``scores.view(numpy.float32)``): the sum of
            all weights, with kvzip the largest.

        Raises
        ------
        IndexError
            When the model has no such layer or head.
        """
        shape = self.kv_usage().rows.shape
        if not (0 <= layer < shape[0] and 0 <= head < shape[1]):
            raise IndexError(f"the model has {shape[0]} layers of at most {shape[1]} KV heads, not ({layer}, {head})")
        return self.session.context.held_rows(layer, head)

    def compress(self, ratio: float) -> CompressionReport:
        """Evict most KV entries of a text, independently of later questions: for ``method="kvzip"``, alone or composed.

        The text is replayed after itself in pieces of up to 2000 tokens, for which ``n_ctx`` must have room; this takes
        one to two times as long as the prefill, composed up to three times. Then the pages of evicted entries are
        freed. The text and prompts that begin with it continue from there; rewinding before its end evaluates it again.

        Parameters
        ----------
        ratio : float
            Fraction of the entries of a full cache to keep, above 0 and at most 1. A text that is already compressed
            keeps at most its current entries.

        Returns
        -------
        CompressionReport
            Bytes before and after, seconds, and how much the model's predictions changed where it repeats the text.

        Raises
        ------
        ValueError
            When the method's rule does not support it, there is no text, ``ratio`` is invalid, or the context has no
            room for the replay (ContextFull). The text is unchanged.
        Aborted
            When ``abort`` was called. The text is unchanged.

        Examples
        --------
        >>> from pylongctx import Llama
        >>> with Llama("model.gguf", method="kvzip", n_ctx=1024, verbose=False) as reader:
        ...     text = reader.tokenize(b"The code of the mill is 4127. " + b"It was the best of times. " * 60)
        ...     reader.eval(text)
        ...     report = reader.compress(0.5)
        ...     for question in (b"What is the code?", b"What was it?"):
        ...         answer = reader(text + reader.tokenize(question, add_bos=False), max_tokens=1)
        >>> report.bytes_after < 0.7 * report.bytes_before
        True
        """
        return self._solo.compress(ratio)

    # ---- adapters ----

    @property
    def loras(self) -> Mapping[str, float]:
        """The LoRA adapters in use: path and scale."""
        return self._opened.adapters.scales

    def add_lora(self, path: str | os.PathLike[str], scale: float = 1.0) -> None:
        """Use a LoRA adapter, or change the scale of one in use; all tokens are removed.

        Raises
        ------
        ValueError
            When the file is not an adapter of this model, or the scale is not from -10^4 to 10^4; then nothing changes.

        Examples
        --------
        >>> llm.add_lora("adapter.gguf", 0.5)  # doctest: +SKIP
        """
        self._opened.adapters.add(self.session, os.fspath(path), scale)
        self._solo.engine.documents.clear()

    def remove_lora(self, path: str | os.PathLike[str]) -> None:
        """Stop using an adapter; KeyError when it is not in use."""
        self._opened.adapters.remove(self.session, os.fspath(path))
        self._solo.engine.documents.clear()

    # ---- embeddings ----

    def create_embedding(self, input: Texts, model: str | None = None) -> CreateEmbeddingResponse:
        """Embed texts, or their tokens; returns OpenAI's response dict.

        Examples
        --------
        >>> with Llama(path, embedding=True, pooling_type=1, verbose=False) as embedder:
        ...     len(embedder.create_embedding(["a", "b"])["data"])
        2
        """
        return self._embedder.response(input, self.model_path if model is None else model)

    @overload
    def embed(
        self, input: Texts, normalize: bool = False, truncate: bool = True, return_count: Literal[False] = False
    ) -> Vectors: ...
    @overload
    def embed(
        self, input: Texts, normalize: bool = False, truncate: bool = True, *, return_count: Literal[True]
    ) -> tuple[Vectors, int]: ...

    def embed(
        self, input: Texts, normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Vectors | tuple[Vectors, int]:
        """Embed a text or several, each a string or its tokens.

        Parameters
        ----------
        normalize : bool
            Scale every vector to length 1.
        truncate : bool
            Cut a text after its first ``n_batch`` tokens, instead of refusing it.
        return_count : bool
            Return the number of tokens too.

        Returns
        -------
        list
            One list of floats per text, or without pooling per token; for a single text only its own.

        Raises
        ------
        RuntimeError
            When the object was not opened with ``embedding=True``.
        ValueError
            When a text has no tokens, or too many.

        Examples
        --------
        >>> with Llama(path, embedding=True, pooling_type=1, verbose=False) as embedder:
        ...     len(embedder.embed("the thief")) == embedder.n_embd()
        True
        """
        vectors, n_tokens = self._embedder.embed(input, normalize, truncate)
        return (vectors, n_tokens) if return_count else vectors

    def pooling_type(self) -> int:
        """Return the pooling type: 0 none, 1 mean, 2 cls, 3 last, 4 rank."""
        return self.session.context.pooling_type()

    @property
    def _embedder(self) -> Embedder:
        if not self._arguments["embedding"]:
            raise RuntimeError("Llama model must be created with embedding=True to call this method")
        return Embedder(self.session)


def _source(opened: OpenedModel) -> TokenSource:
    """Return the source of a Llama's tokens."""
    if not opened.sessions:
        return NoTokens(opened.model, NO_CONTEXT)
    states = States(opened.sessions[0], lambda: opened.identity)
    return Solo(opened.sessions, states, opened.draft_model, opened.library)
