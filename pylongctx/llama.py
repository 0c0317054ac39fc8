"""The class Llama: llama_cpp.Llama's interface on a context that runs with a method."""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx import _arguments as arguments
from pylongctx._context import Context, KVUsage, OffloadUsage
from pylongctx._lib import lib
from pylongctx._model import Model
from pylongctx._session import Session, longest_prefix
from pylongctx._tokenizer import LlamaTokenizer
from pylongctx._tracing import record
from pylongctx.chat.completion import Chat
from pylongctx.embeddings import Embeddings
from pylongctx.hub import from_pretrained
from pylongctx.inspect.trace import Trace
from pylongctx.lora import Adapter, Adapters
from pylongctx.methods import Full, Method, parse
from pylongctx.sampling import seed_sequence
from pylongctx.speculative import check_draft

DEFAULT_SEED = 0xFFFFFFFF


class Llama(Chat, Embeddings, Adapters):
    """A GGUF model and one context, with the interface of ``llama_cpp.Llama`` 0.3.36.

    Calls from several threads wait for each other; only ``abort`` comes through at once. Between two chunks of a stream
    another call may run, after which the stream raises RuntimeError. A forked child must open an object of its own.

    Parameters
    ----------
    model_path : str
        GGUF file.
    n_gpu_layers : int
        How many of the last layers go to devices, with their part of the KV memory; -1: all.
    tensor_split : list of float or None
        Shares of the devices: those of ``rpc_servers``, then the GPUs of this machine. None: by free memory.
    n_ctx : int
        Context window in tokens. 0 (the default here): the trained context, times 4 for a method that extends.
    n_threads, n_threads_batch : int or None
        Threads for one token (None: half of the cores) and for a prompt (None: all cores).
    logits_all : bool
        Keep the logits of every token, see ``scores``.
    type_k, type_v : int or str or None
        ggml types of the KV cache, by number or name ("q8_0"). None: f16.
    embedding : bool
        Open for ``embed`` and ``create_embedding``, on llama.cpp's own memory; ``pooling_type`` -1 is the model's.
    lora_path, lora_scale : str and float
        A LoRA adapter, see ``add_lora``.
    chat_format : str or None
        A named format, Jinja text, or ``chat_template.NAME`` of the model. None: the model's own template, else ChatML.
    chat_handler : callable or None
        Answers ``create_chat_completion`` instead, called as llama_cpp's handlers.
    draft_model : callable or None
        Guesses tokens, which are evaluated together, see ``LlamaPromptLookupDecoding``. Not with a rule that evicts.
    seed : int
        Seed of the sampler; unseeded runs are random.
    flash_attn : bool
        Accepted; the attention of pylongctx never holds a whole score matrix.
    verbose : bool
        Print the chosen method settings, cache reuse, and llama.cpp's warnings to stderr.
    method : Method or str or None
        How a long context is read: an object such as ``SelfExtend()``, or a string such as
        ``"selfextend,group_size=8"`` or ``"longheads+corm"``. None: llama.cpp's own KV cache.
    kv_limit : int or None
        Most bytes of KV memory, as ``kv_usage().bytes`` counts them; beyond, ContextFull is raised, nothing changed.
    kv_offload : "host" or None
        "host": K and V lie in memory of the host, the pages that the heads choose are brought to the device, the least
        recently read ones making place. For longheads without an eviction rule.
    kv_offload_mib : int or None
        MiB of the devices for these pages; None: twice what a token reads. ``offload_usage()`` tells how it goes.
    rpc_servers : str or None
        "host:port,host:port" of machines that run ``pylongctx rpc-server``: their devices are used as if they were
        here. A server that goes away while it is used ends this process, as in llama.cpp. For trusted networks only.
    progress_callback : callable or None
        Called as ``progress_callback(n_done, n_total)`` after each step of a prompt.
    **kwargs
        Unknown names are ignored with a warning.

    The other parameters are those of llama.cpp.

    Raises
    ------
    ValueError
        When the file, the method or a number is not usable.
    NotImplementedError
        When an argument asks for what this version does not have.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
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
        chat_handler: Any = None,
        draft_model: Any = None,
        tokenizer: Any = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        method: Method | str | None = "full",
        kv_limit: int | None = None,
        kv_offload: str | None = None,
        kv_offload_mib: int | None = None,
        rpc_servers: str | None = None,
        progress_callback: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs")}
        arguments.check_unknown(kwargs, list(given))
        arguments.check_later(given)
        arguments.warn_without_device(n_gpu_layers, rpc_servers)
        self._arguments = given
        self.model_path = str(model_path)
        self.verbose = verbose
        self.chat_format = chat_format
        self.chat_handler = chat_handler
        self.draft_model = draft_model
        self._adapters: dict[str, Adapter] = {}
        self.last_n_tokens_size = arguments.check_count("last_n_tokens_size", last_n_tokens_size, 0)
        threads = self.n_threads, self.n_threads_batch = arguments.thread_counts(n_threads, n_threads_batch)
        self.set_seed(seed)
        settings, spec = self._settings(given, threads), _spec(method, embedding)
        check_draft(draft_model, parse(spec) if spec else None)
        lib.lctx_log_set_level(2 if verbose else 1)
        self._model = Model(self.model_path, arguments.model_settings(given))
        self._finalizer = weakref.finalize(self, _close, self._model, None, self._adapters)
        self.metadata = self._model.metadata()
        self.n_batch = n_batch
        self._loaded = None if vocab_only else self._open(settings, spec)
        if lora_path is not None:
            self._add_first_lora(lora_path, lora_scale)

    def _open(self, settings: dict[str, Any], spec: str) -> Session:
        try:
            context = Context(self._model, settings, spec)
        except BaseException:
            self.close()
            raise
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, self._model, context, self._adapters)
        self.n_batch = context.n_batch
        session = Session(self._model, context, self._arguments["logits_all"], self.verbose)
        session.progress = self._arguments["progress_callback"]
        if self.verbose and context.why:
            print(f"pylongctx: {context.why}", file=sys.stderr)
        return session

    def _add_first_lora(self, path: str, scale: float) -> None:
        try:
            self.add_lora(path, scale)
        except BaseException:
            self.close()
            raise

    def _settings(self, given: dict[str, Any], threads: tuple[int, int]) -> dict[str, Any]:
        return arguments.context_settings(given, threads)

    from_pretrained = classmethod(from_pretrained)

    # ---- life ----

    def close(self) -> None:
        """Free model and context; waits for a running evaluation. The object is of no use afterwards."""
        self._finalizer()

    def __enter__(self) -> "Llama":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # ---- facts ----

    @property
    def method(self) -> Method | None:
        """The method with every automatic choice filled in; None with llama.cpp's own KV cache."""
        spec = self._session.context.method
        return parse(spec) if spec else None

    def kv_usage(self) -> KVUsage:
        """Return the KV memory: ``bytes``, ``peak_bytes``, ``full_bytes``, ``rows`` int32 [n_layer, n_head_kv]."""
        return self._session.context.kv_usage()

    def offload_usage(self) -> OffloadUsage:
        """Return how the pages of ``kv_offload="host"`` were read since the model was loaded."""
        return self._session.context.offload_usage()

    def held_rows(self, layer: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return which tokens a KV head still holds, and what its queries think of them.

        Returns
        -------
        rows : numpy.ndarray
            int32 [n], positions, ascending.
        scores : numpy.ndarray
            int32 [n]: with corm the last query to which the token was important, -1 for none (CORM, definition 3.1; one
            of the last ``window`` when ``evict_every`` is not below it, where one is enough to stay);
            with scissorhands a count; with h2o and tova a float's bits (``scores.view(numpy.float32)``).

        Raises
        ------
        IndexError
            When the model has no such layer or head.
        """
        shape = self.kv_usage().rows.shape
        if not (0 <= layer < shape[0] and 0 <= head < shape[1]):
            raise IndexError(f"the model has {shape[0]} layers of at most {shape[1]} KV heads, not ({layer}, {head})")
        return self._session.context.held_rows(layer, head)

    def n_ctx(self) -> int:
        """Return the context window in tokens."""
        return self._session.context.n_ctx

    def n_embd(self) -> int:
        """Return the width of the model."""
        return int(self._model.info.n_embd)

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return int(self._model.info.n_vocab)

    def token_bos(self) -> int:
        """Return the beginning-of-sequence token, -1 for none."""
        return int(self._model.info.token_bos)

    def token_eos(self) -> int:
        """Return the end-of-sequence token, -1 for none."""
        return int(self._model.info.token_eos)

    def token_nl(self) -> int:
        """Return the newline token, -1 for none."""
        return int(self._model.info.token_nl)

    # ---- vocabulary ----

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the token ids of UTF-8 bytes; ``special`` reads the texts of special tokens as such."""
        return self._model.tokenize(text, add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Return the bytes of tokens; a space right after a leading BOS token is dropped."""
        return self._model.detokenize(tokens, special)

    def tokenizer(self) -> LlamaTokenizer:
        """Return an object with ``encode`` and ``decode`` on str."""
        return LlamaTokenizer(self._model)

    # ---- state ----

    @property
    def n_tokens(self) -> int:
        """The number of evaluated tokens; setting a smaller number forgets the tokens after it."""
        return self._session.n_tokens

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        if not 0 <= n <= self._session.n_tokens:
            raise ValueError(f"n_tokens can only go back: 0 to {self._session.n_tokens}, not {n}")
        self._session.n_tokens = n

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """int32 [n_ctx]; the first ``n_tokens`` are the evaluated tokens."""
        return self._session.input_ids

    @property
    def _input_ids(self) -> NDArray[np.int32]:
        return self._session.tokens

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits, float32 [n_tokens, n_vocab] with logits_all, else only the last row, [1, n_vocab].

        The array is a view that later evaluations may overwrite; it has no rows before the first evaluation.
        """
        return self._session.scores

    _scores = scores

    @property
    def eval_tokens(self) -> deque[int]:
        """The evaluated tokens."""
        return deque(self._input_ids.tolist(), maxlen=self.n_ctx())

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The rows of ``scores`` as lists."""
        return deque(self.scores.tolist(), maxlen=self.n_ctx() if self._session.logits_all else 1)

    def set_seed(self, seed: int) -> None:
        """Seed the sampler of the next run; -1 is random."""
        self._seeds = seed_sequence(seed)

    def reset(self) -> None:
        """Forget all tokens."""
        with self._session.lock:
            self._session.clear()

    def abort(self) -> None:
        """Stop the evaluation that another thread runs; it raises Aborted and the object stays usable."""
        self._session.context.abort = True

    # ---- evaluation ----

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the current ones.

        Raises
        ------
        ValueError
            When a token is outside the vocabulary, or the tokens do not fit (ContextFull).
        Aborted
            When ``abort`` was called meanwhile.
        """
        ids = self._model.check_tokens(tokens)
        with self._session.lock:
            self._session.context.abort = False
            self._session.eval(ids)

    def eval_rows(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Evaluate tokens and yield their logits, float32 [k, n_vocab] per step of at most n_ubatch tokens.

        Memory does not grow with the tokens. An array is valid until the next step.
        """
        ids = self._model.check_tokens(tokens)
        self._session.context.abort = False
        return self._session.eval_rows(ids)

    def trace(self, start: int | None = None, stop: int | None = None) -> AbstractContextManager[Trace]:
        """Record which chunks each layer and head reads: ``with llm.trace() as trace: llm.eval(tokens)``.

        The results do not change. Numbers and a map come from ``pylongctx.inspect``. A position that is evaluated again
        replaces its record.

        Parameters
        ----------
        start, stop : int or None
            Record the queries at positions ``start <= p < stop`` of the text. None: the current number of tokens,
            and n_ctx. A query takes 4 * n_layer * n_head * window / chunk_size bytes.

        Raises
        ------
        ValueError
            When the method reads no chunks, or the range is empty or outside of the context.
        RuntimeError
            When a trace is being recorded already.
        MemoryError
            When the records of the range do not fit into memory.
        """
        return record(self._session, self.method, start, stop)

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """Return how many leading tokens are equal."""
        return longest_prefix(a, b)

    @staticmethod
    def logits_to_logprobs(logits: NDArray[np.float32] | list[float], axis: int = -1) -> NDArray[np.float32]:
        """Return the log-softmax along ``axis``, float32 of the same shape; rows may hold -inf."""
        x = np.asarray(logits, np.float32)
        top = np.max(x, axis=axis, keepdims=True)
        shifted = x - np.where(np.isfinite(top), top, np.float32(0))
        with np.errstate(divide="ignore"):
            return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)), np.float32)


def _spec(method: Method | str | None, embedding: bool) -> str:
    if embedding and method not in (None, "full") and not isinstance(method, Full):
        raise ValueError(f"embedding=True runs on llama.cpp's own memory, without method={method}")
    if method is None or embedding:
        return ""
    return str(method if isinstance(method, Method) else parse(method))


def _close(model: Model, context: Context | None, adapters: dict[str, Adapter]) -> None:
    if context is not None:
        context.close()
    for adapter in adapters.values():
        adapter.close()
    model.close()
